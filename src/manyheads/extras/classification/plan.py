"""Training steps of a classifier at any size, without its data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from manyheads.extras.classification.labelled_store import LabelledBatch
from manyheads.tasks.data_sets import vocabulary_size
from manyheads.training.run.objective import SyntheticTokenRun

if TYPE_CHECKING:
    from manyheads.extras.classification.settings import ClassificationConfig


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
