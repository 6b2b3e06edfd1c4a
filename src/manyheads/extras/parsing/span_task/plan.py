"""Training steps of a chart parser at any size, without its data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from manyheads.extras.parsing.span_data import MOST_HASHES, MOST_PIECES, SpanBatch
from manyheads.tasks.data_sets import vocabulary_size
from manyheads.training.run.objective import SyntheticTokenRun

if TYPE_CHECKING:
    from manyheads.extras.parsing.span_task.settings import SpanConfig


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
