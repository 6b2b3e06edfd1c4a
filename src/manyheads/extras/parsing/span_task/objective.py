"""Learning to parse by scores of spans, judged by likelihood and labelled brackets; and steps without the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from manyheads.errors import ConfigError
from manyheads.extras.classification.encoders import EncoderJudge, EncoderObjective, with_names
from manyheads.extras.parsing.brackets import SIGNATURE, judge_trees
from manyheads.extras.parsing.parser import parse_batches
from manyheads.extras.parsing.span_data import (
    MOST_HASHES,
    MOST_PIECES,
    SpanBatch,
    SpanData,
    SpanStream,
    eval_spans,
    open_spans,
    tree_of,
)
from manyheads.extras.parsing.trees import Node, format_tree
from manyheads.tasks.data_sets import vocabulary_size
from manyheads.text.words import words_of
from manyheads.training.record.report import Sample, ValidationReport
from manyheads.training.run.objective import SyntheticTokenRun

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.extras.parsing.span_parser import SpanParser
    from manyheads.extras.parsing.span_task.settings import SpanConfig


@dataclass(frozen=True)
class SpanJudge(EncoderJudge):
    """Judges a chart parser on held-out trees; see `EncoderJudge`."""

    model: SpanParser
    data: SpanData
    config: SpanConfig

    @torch.no_grad()
    def run(self, step: int) -> ValidationReport | None:
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


class SpanObjective(EncoderObjective):
    """Trees as spans for an encoder with a span head; an optimiser step counts words.

    Args: config: of the run. data_dir, progress: not used, as no trees are embedded.

    Raises: DataError, ConfigError: the data cannot be used.
    """

    judges = SpanJudge
    names = ("constituents", "tags")
    task = "spans"
    next_command = "translate {run}"

    def __init__(self, config: SpanConfig, data_dir: Path, progress: Progress | None = None) -> None:
        data = open_spans(config.data.path)
        super().__init__(_resolve(config, data), data)
        self.stream = SpanStream(data.train, config.data, config.seed)


open_objective = SpanObjective


def _resolve(config: SpanConfig, data: SpanData) -> SpanConfig:
    """Fill in labels, tags, root and vocabulary size.

    Raises: ConfigError: the config has others than the data, or too few ids for its tokenizer.
    """
    names = (*SpanObjective.names, "root")
    for name in names:
        own, known = getattr(config.model, name), getattr(data, name)
        if own and own != known:
            origin = f"the model {config.initial.model}" if config.initial.model else f"model.{name}"
            raise ConfigError(
                f"{origin} has other {name} than {data.path}: {_difference(own, known)}; prepare data with the same"
                " ones, or leave the setting out."
            )
    return with_names(config, data, *names)  # type: ignore[no-any-return]


def _difference(own: str | tuple[str, ...], known: str | tuple[str, ...]) -> str:
    if isinstance(own, str) or isinstance(known, str):
        return f"{own}, {known}"
    return ", ".join(sorted({*own} ^ {*known})[:5]) or "their order"


@dataclass(frozen=True)
class SyntheticRun(SyntheticTokenRun):
    """Sentences of random features; see `training.run.objective.SyntheticTokenRun`."""

    config: SpanConfig
    unit = "sentences"

    def at(self, length: int) -> SyntheticRun:
        """See `SyntheticRun.at`. If the data determines labels and tags, fifty of each are assumed."""
        model, names = self.config.model, tuple(map(str, range(50)))
        size, told = vocabulary_size(model.vocab_size, self.config.data.path, self.config.tokenizer.vocab_size)
        known: dict[str, Any] = {
            "vocab_size": size,
            "constituents": model.constituents or names,
            "tags": model.tags or names,
            "root": model.root or "ROOT",
        }
        return SyntheticRun(replace(self.config, model=replace(model, **known)), told)

    def batch(self, length: int, rows: int) -> SpanBatch:
        model = self.config.model
        return SpanBatch(
            pieces=torch.randint(model.vocab_size, (rows, length, MOST_PIECES)),
            affixes=torch.randint(2**16, (rows, length, MOST_HASHES)),
            lengths=torch.full((rows,), length),
            tags=torch.randint(len(model.tags), (rows, length)),
            labels=torch.randint(len(model.constituents) + 1, (rows, length, length)),
            sample_ids=torch.arange(rows),
        )
