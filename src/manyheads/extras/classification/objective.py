"""Learning to classify: texts with labels, judged by likelihood, accuracy and macro F1; and steps without the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from manyheads.errors import ConfigError
from manyheads.extras.classification.classes import Confusion
from manyheads.extras.classification.encoders import EncoderJudge, EncoderObjective, with_names
from manyheads.extras.classification.labelled_store import LabelledBatch, LabelledStream, eval_labelled
from manyheads.extras.classification.prepare import LabelledData, open_labelled
from manyheads.tasks.data_sets import vocabulary_size
from manyheads.training.record.report import Sample, ValidationReport
from manyheads.training.run.objective import SyntheticTokenRun

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.extras.classification.classifier import SequenceClassifier
    from manyheads.extras.classification.settings import ClassificationConfig


@dataclass(frozen=True)
class ClassJudge(EncoderJudge):
    """Judges a classifier on held-out texts; see `EncoderJudge`."""

    model: SequenceClassifier
    data: LabelledData
    config: ClassificationConfig

    @torch.no_grad()
    def run(self, step: int) -> ValidationReport | None:
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
            nll -= float(log_probs.gather(1, moved.labels[:, None]).cpu().double().sum())
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


class ClassificationObjective(EncoderObjective):
    """Labelled texts for an encoder with a class head; an optimiser step counts texts, not tokens.

    Args:
        config: of the run.
        data_dir: where the embedded corpus is prepared, and found again by a resumed run.
        progress: told how far that is.

    Raises: DataError, ConfigError, SaveError: the data cannot be used.
    """

    judges = ClassJudge
    names = ("labels",)
    task = "classification"
    next_command = "classify {run}"

    def __init__(self, config: ClassificationConfig, data_dir: Path, progress: Progress | None = None) -> None:
        data = open_labelled(config.data, config.tokenizer, data_dir, progress=progress)
        super().__init__(_resolve(config, data), data)
        special = {"pad_id": data.tokenizer.pad_id, "eos_id": data.tokenizer.eos_id}
        self.stream = LabelledStream(data.train, config.data, config.seed, **special)


open_objective = ClassificationObjective


def _resolve(config: ClassificationConfig, data: LabelledData) -> ClassificationConfig:
    """Fill in labels and vocabulary size.

    Raises: ConfigError: the config has other labels than the data, or too few ids for its tokenizer.
    """
    model = config.model
    if model.labels and tuple(model.labels) != data.labels:
        origin = f"the model {config.initial.model} has" if config.initial.model else "model.labels is"
        raise ConfigError(
            f"{origin} {', '.join(model.labels)}, but the labels of {data.path} are {', '.join(data.labels)}; "
            + ("prepare data with the model's labels." if config.initial.model else "leave model.labels out.")
        )
    return with_names(config, data, "labels")  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SyntheticRun(SyntheticTokenRun):
    """Texts of random ids; see `training.run.objective.SyntheticTokenRun`."""

    config: ClassificationConfig
    unit = "texts"

    def at(self, length: int) -> SyntheticRun:
        """See `SyntheticRun.at`.

        If the data determines the labels, two are assumed: the head is the smallest part of a model.
        """
        model = self.config.model
        size, told = vocabulary_size(model.vocab_size, self.config.data.path, self.config.tokenizer.vocab_size)
        known = {
            "vocab_size": size,
            "labels": model.labels or ("0", "1"),
        }
        return SyntheticRun(replace(self.config, model=replace(model, **known)), told)

    def batch(self, length: int, rows: int) -> LabelledBatch:
        model = self.config.model
        tokens, labels = torch.randint(model.vocab_size, (rows, length)), torch.randint(len(model.labels), (rows,))
        return LabelledBatch(tokens, torch.full((rows,), length), labels, torch.arange(rows))
