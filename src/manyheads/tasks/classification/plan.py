"""Training steps of a classifier at any size, without its data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from manyheads.data.labelled_batch import LabelledBatch
from manyheads.tasks.classification.settings import ClassificationConfig
from manyheads.training.plan.trial import Knob, token_knobs

__all__ = ["Trial"]


@dataclass(frozen=True)
class Trial:
    """Texts of random ids; see `training.plan.trial.Trial`."""

    config: ClassificationConfig

    @property
    def rows(self) -> int:
        """Rows of the longest texts; see `Trial.rows`."""
        data = self.config.data
        return max(1, data.max_tokens // data.accumulate // data.max_len)

    def at(self, length: int) -> Trial:
        """See `Trial.at`. Labels that the data will give are two here; the head is the smallest part of a model."""
        model = self.config.model
        known = {
            "vocab_size": model.vocab_size or self.config.tokenizer.vocab_size,
            "labels": model.labels or ("0", "1"),
        }
        return Trial(replace(self.config, model=replace(model, **known)))

    def batch(self, length: int, rows: int) -> LabelledBatch:
        """See `Trial.batch`."""
        model = self.config.model
        tokens, labels = torch.randint(model.vocab_size, (rows, length)), torch.randint(len(model.labels), (rows,))
        return LabelledBatch(tokens, torch.full((rows,), length), labels, torch.arange(rows))

    def begin(self, model: Any, lanes: int, seed: int) -> None:
        """See `Trial.begin`."""

    def knobs(self) -> list[Knob]:
        """The tokens of a step; see `Trial.knobs`."""
        data = self.config.data
        return token_knobs(data, data.max_len, "texts")
