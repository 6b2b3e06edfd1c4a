"""Learning to classify: texts with labels, judged by likelihood, accuracy and macro F1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manyheads.architectures.classifier import SequenceClassifier
from manyheads.data.labelled_store import LabelledStore, LabelledStream, eval_labelled
from manyheads.data.prepared_labelled import LabelledData, open_labelled
from manyheads.data.progress import Progress
from manyheads.distributed.group import Group
from manyheads.errors import ConfigError, DataError
from manyheads.evaluation.classes import Confusion
from manyheads.tasks.classification.settings import ClassificationConfig
from manyheads.tasks.data_sets import known_sets
from manyheads.text.languages import LanguagePair
from manyheads.training.record.report import Sample, ValidationReport
from manyheads.training.run.objective import Translate
from manyheads.training.run.signals import StopFlag

__all__ = ["ClassJudge", "ClassificationObjective", "open_objective"]


def open_objective(
    config: ClassificationConfig, data_dir: Path, progress: Progress | None = None
) -> ClassificationObjective:
    """See `tasks.runs.open_objective`."""
    return ClassificationObjective(config, data_dir, progress)


class ClassificationObjective:
    """Labelled texts for an encoder with a class head; an optimiser step counts texts, not tokens.

    Args:
        config: of the run.
        data_dir: where the embedded corpus is prepared, and found again by a resumed run.
        progress: told how far that is.

    Raises: DataError, ConfigError, SaveError: the data cannot be used.
    """

    def __init__(self, config: ClassificationConfig, data_dir: Path, progress: Progress | None = None) -> None:
        self.data = open_labelled(config.data, config.tokenizer, data_dir, progress=progress)
        self.digest = self.data.digest
        self.config = _resolve(config, self.data)
        self.model_config, self.generation = self.config.model, None
        self.task = "classification"
        self.languages: tuple[LanguagePair, ...] = ()
        self.next_command = "classify {run}"
        tokenizer = self.data.tokenizer
        special = {"pad_id": tokenizer.pad_id, "eos_id": tokenizer.eos_id}
        self.stream = LabelledStream(self.data.train, config.data, config.seed, **special)

    def describe(self) -> str:
        """See `Objective.describe`."""
        return f"{self.data.describe()}\n{self.stream.describe()}"

    def prepare_weights(self, model: SequenceClassifier, group: Group) -> Sequence[str]:
        """See `Objective.prepare_weights`."""
        return ()

    def first_state(self, model: SequenceClassifier) -> None:
        """See `Objective.first_state`."""

    def begin(self, model: SequenceClassifier, lanes: int, seed: int) -> None:
        """See `Objective.begin`."""

    def judge(
        self, model: SequenceClassifier, device: torch.device, stop: StopFlag, translate: Translate | None
    ) -> ClassJudge:
        """See `Objective.judge`."""
        return ClassJudge(model, self.data, "valid", self.config, device, stop)

    def judge_sets(self, model: SequenceClassifier, device: torch.device, stop: StopFlag) -> dict[str, ClassJudge]:
        """See `Objective.judge_sets`."""
        found = {}
        sets = known_sets(self.config.initial.data, {self.config.data.path: self.data}, LabelledData.open)
        for name, data in sets.items():
            split = next((split for split in ("test", "valid") if getattr(data, split) is not None), None)
            if split is not None and data.labels == self.data.labels:
                found[f"{name} {split}"] = ClassJudge(model, data, split, self.config, device, stop)
        return found

    def lighter(self) -> str:
        """See `Objective.lighter`."""
        accumulate = self.config.data.accumulate
        return (
            f"(data.max_tokens {self.config.data.max_tokens}, data.accumulate {accumulate}): lower max_tokens, or raise"
            f" accumulate to {2 * accumulate}, which splits each step into smaller parts; either makes it a new run."
        )


def _resolve(config: ClassificationConfig, data: LabelledData) -> ClassificationConfig:
    """Fill in labels and vocabulary size.

    Raises: ConfigError: the config has other labels than the data, or too few ids for its tokenizer.
    """
    model, size = config.model, data.tokenizer.vocab_size
    if model.labels and tuple(model.labels) != data.labels:
        origin = f"the model {config.initial.model} has" if config.initial.model else "model.labels is"
        raise ConfigError(
            f"{origin} {', '.join(model.labels)}, but the labels of {data.path} are {', '.join(data.labels)}; "
            + ("prepare data with the model's labels." if config.initial.model else "leave model.labels out.")
        )
    if model.vocab_size and model.vocab_size < size and not config.initial.model:
        raise ConfigError(
            f"model.vocab_size is {model.vocab_size:,}, but the tokenizer of {data.path} gives {size:,} ids; set it to"
            " 0, which uses them all."
        )
    return replace(config, model=replace(model, labels=data.labels, vocab_size=max(model.vocab_size, size)))


@dataclass(frozen=True)
class ClassJudge:
    """Judges a model on held-out texts.

    Args:
        model: a composite.
        data: with the texts.
        split: `valid` or `test`.
        config: budgets and precision.
        device: where the model is.
        stop: looked at between batches.

    Raises: DataError: a text is longer than the model's positions; better now than at the first validation.
    """

    model: SequenceClassifier
    data: LabelledData
    split: str
    config: ClassificationConfig
    device: torch.device
    stop: StopFlag

    def __post_init__(self) -> None:
        longest = self.config.model.longest_input
        if self.store is not None and longest is not None:
            lengths = self.store.text.lengths + 1
            if lengths.max(initial=0) > longest:
                raise DataError(
                    f"Text {int(lengths.argmax()) + 1} of {self.data.path} {self.split} has {lengths.max()} tokens, but"
                    f" the model has {longest} positions; raise model.max_len, or shorten the text."
                )

    @property
    def store(self) -> LabelledStore | None:
        """The held-out texts as ids."""
        store: LabelledStore | None = getattr(self.data, self.split)
        return store

    def __bool__(self) -> bool:
        """Whether there is anything to validate on."""
        return self.store is not None and len(self.store) > 0

    @torch.no_grad()
    def run(self, step: int) -> ValidationReport | None:
        """See `Judge.run`."""
        assert self.store is not None
        self.model.eval()
        tokenizer, nll = self.data.tokenizer, 0.0
        predicted: dict[int, tuple[int, float]] = {}
        special = {"pad_id": tokenizer.pad_id, "eos_id": tokenizer.eos_id}
        for batch in eval_labelled(self.store, self.config.data.max_tokens, **special):
            if self.stop:
                return None
            moved = batch.to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
                log_probs = self.model.log_probs(moved.tokens, moved.lengths)
            nll -= float(log_probs.gather(1, moved.labels[:, None]).double().sum())
            best, chosen = log_probs.max(1)
            predicted |= zip(
                batch.sample_ids.tolist(), zip(chosen.tolist(), best.exp().tolist(), strict=True), strict=True
            )
        right = self.store.label.tolist()
        found = Confusion.of(self.data.labels, ((right[place], one) for place, (one, _) in predicted.items()))
        return ValidationReport(
            step=step,
            loss=nll / len(right),
            accuracy=100 * found.accuracy,
            f1=100 * found.macro_f1,
            samples=self._wrong(predicted),
        )

    def _wrong(self, predicted: dict[int, tuple[int, float]]) -> tuple[Sample, ...]:
        """The first texts with a wrong label, as samples."""
        shown: list[Sample] = []
        for place, row in enumerate(self.data.texts.get(self.split, [])):
            if len(shown) >= self.config.validation.num_samples:
                break
            number, probability = predicted[place]
            found = self.data.labels[number]
            if found != row.label:
                shown.append(Sample(source="", text=f"{row.label}, taken for {found} ({probability:.2f}): {row.text}"))
        return tuple(shown)
