"""Learning to parse by scores of spans, judged by likelihood and labelled brackets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manyheads.architectures.span_parser import SpanParser
from manyheads.data.prepared_spans import SpanData, open_spans
from manyheads.data.progress import Progress
from manyheads.data.span_store import SpanStore, SpanStream, eval_spans
from manyheads.decoding.chart_parser import parse_batches
from manyheads.distributed.group import Group
from manyheads.errors import ConfigError, DataError
from manyheads.evaluation.brackets import SIGNATURE
from manyheads.evaluation.parses import judge_trees
from manyheads.tasks.data_sets import known_sets
from manyheads.tasks.spans.settings import SpanConfig
from manyheads.text.languages import LanguagePair
from manyheads.text.parsing import words_of
from manyheads.text.spans import tree_of
from manyheads.text.trees import Node, format_tree
from manyheads.training.record.report import Sample, ValidationReport
from manyheads.training.run.objective import Translate
from manyheads.training.run.signals import StopFlag

__all__ = ["SpanJudge", "SpanObjective", "open_objective"]


def open_objective(config: SpanConfig, data_dir: Path, progress: Progress | None = None) -> SpanObjective:
    """See `tasks.runs.open_objective`."""
    return SpanObjective(config)


class SpanObjective:
    """Trees as spans for an encoder with a span head; an optimiser step counts words.

    Args: config: of the run.

    Raises: DataError, ConfigError: the data cannot be used.
    """

    def __init__(self, config: SpanConfig) -> None:
        self.data = open_spans(config.data.path)
        self.digest = self.data.digest
        self.config = _resolve(config, self.data)
        self.model_config, self.generation = self.config.model, None
        self.task = "spans"
        self.languages: tuple[LanguagePair, ...] = ()
        self.next_command = "translate {run}"
        self.stream = SpanStream(self.data.train, config.data, config.seed)

    def describe(self) -> str:
        """See `Objective.describe`."""
        return f"{self.data.describe()}\n{self.stream.describe()}"

    def prepare_weights(self, model: SpanParser, group: Group) -> Sequence[str]:
        """See `Objective.prepare_weights`."""
        return ()

    def first_state(self, model: SpanParser) -> None:
        """See `Objective.first_state`."""

    def begin(self, model: SpanParser, lanes: int, seed: int) -> None:
        """See `Objective.begin`."""

    def judge(self, model: SpanParser, device: torch.device, stop: StopFlag, translate: Translate | None) -> SpanJudge:
        """See `Objective.judge`."""
        return SpanJudge(model, self.data, "valid", self.config, device, stop)

    def judge_sets(self, model: SpanParser, device: torch.device, stop: StopFlag) -> dict[str, SpanJudge]:
        """See `Objective.judge_sets`."""
        found = {}
        sets = known_sets(self.config.initial.data, {self.config.data.path: self.data}, SpanData.open)
        for name, data in sets.items():
            split = next((split for split in ("test", "valid") if getattr(data, split) is not None), None)
            if split is not None and (data.constituents, data.tags) == (self.data.constituents, self.data.tags):
                found[f"{name} {split}"] = SpanJudge(model, data, split, self.config, device, stop)
        return found

    def lighter(self) -> str:
        """See `Objective.lighter`."""
        accumulate = self.config.data.accumulate
        return (
            f"(data.max_tokens {self.config.data.max_tokens}, data.accumulate {accumulate}): lower max_tokens, or raise"
            f" accumulate to {2 * accumulate}, which splits each step into smaller parts; either makes it a new run."
        )


def _resolve(config: SpanConfig, data: SpanData) -> SpanConfig:
    """Fill in labels, tags, root and vocabulary size.

    Raises: ConfigError: the config has others than the data, or too few ids for its tokenizer.
    """
    model, size = config.model, data.tokenizer.vocab_size
    for name in ("constituents", "tags", "root"):
        own, known = getattr(model, name), getattr(data, name)
        if own and own != known:
            origin = f"the model {config.initial.model}" if config.initial.model else f"model.{name}"
            raise ConfigError(
                f"{origin} has other {name} than {data.path}: {_difference(own, known)}; prepare data with the same"
                " ones, or leave the setting out."
            )
    if model.vocab_size and model.vocab_size < size and not config.initial.model:
        raise ConfigError(
            f"model.vocab_size is {model.vocab_size:,}, but the tokenizer of {data.path} gives {size:,} ids; set it to"
            " 0, which uses them all."
        )
    known = {"constituents": data.constituents, "tags": data.tags, "root": data.root}
    return replace(config, model=replace(model, vocab_size=max(model.vocab_size, size), **known))


def _difference(own: str | tuple[str, ...], known: str | tuple[str, ...]) -> str:
    if isinstance(own, str) or isinstance(known, str):
        return f"{own}, {known}"
    return ", ".join(sorted({*own} ^ {*known})[:5]) or "their order"


@dataclass(frozen=True)
class SpanJudge:
    """Judges a model on held-out trees.

    Args:
        model: a composite.
        data: with the trees.
        split: `valid` or `test`.
        config: budgets and precision.
        device: where the model is.
        stop: looked at between batches.

    Raises: DataError: a sentence is longer than the model's positions; better now than at the first validation.
    """

    model: SpanParser
    data: SpanData
    split: str
    config: SpanConfig
    device: torch.device
    stop: StopFlag

    def __post_init__(self) -> None:
        longest = self.config.model.max_len
        if self.store is not None and self.store.lengths.max(initial=0) > longest:
            place = int(self.store.lengths.argmax())
            raise DataError(
                f"Sentence {place + 1} of {self.data.path} {self.split} has {self.store.lengths[place]} words, but the"
                f" model has {longest} positions; raise model.max_len, or leave the sentence out."
            )

    @property
    def store(self) -> SpanStore | None:
        """The held-out trees as numbers."""
        store: SpanStore | None = getattr(self.data, self.split)
        return store

    def __bool__(self) -> bool:
        """Whether there is anything to validate on."""
        return self.store is not None and len(self.store) > 0

    @torch.no_grad()
    def run(self, step: int) -> ValidationReport | None:
        """See `Judge.run`."""
        assert self.store is not None
        self.model.eval()
        texts = self.data.texts[self.split]
        trees: list[Node | None] = [None] * len(texts)
        nll, num_words = 0.0, 0
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            batches = eval_spans(self.store, self.config.data.max_tokens)
            for batch, parsed in parse_batches(self.model, batches, self.device):
                if self.stop:
                    return None
                output = self.model(batch.to(self.device))
                nll, num_words = nll + float(output.nll_sum), num_words + int(output.num_tokens)
                for sample, (tags, spans) in zip(batch.sample_ids.tolist(), parsed, strict=True):
                    trees[sample] = tree_of(words_of(texts[sample][0]), tags, spans, self.data.root)
        found = judge_trees(trees, [tree for _, tree in texts], root=self.data.root)
        shown = [place for place, tree in enumerate(trees) if tree is not None][: self.config.validation.num_samples]
        return ValidationReport(
            step=step,
            loss=nll / num_words,
            f1=found.all.f1,
            exact_match=found.all.exact_match,
            brackets_signature=SIGNATURE,
            samples=tuple(
                Sample(source=texts[place][0], text=format_tree(tree), reference=texts[place][1])
                for place in shown
                if (tree := trees[place]) is not None
            ),
        )
