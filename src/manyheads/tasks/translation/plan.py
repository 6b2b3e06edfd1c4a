"""Training steps of a translator at any size, without its data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from manyheads.data.batch import PackedBatch, PairBatch
from manyheads.tasks.data_sets import vocabulary_size
from manyheads.training.run.objective import SyntheticTokenRun

if TYPE_CHECKING:
    from manyheads.tasks.translation.settings import TrainConfig


@dataclass(frozen=True)
class SyntheticRun(SyntheticTokenRun):
    """Pairs of random ids; see `training.run.objective.SyntheticTokenRun`."""

    config: TrainConfig
    unit = "sentences"

    @property
    def longest(self) -> int:
        return self.config.data.longest

    def at(self, length: int) -> SyntheticRun:
        model, usual, told = self.config.model, self.config.tokenizer.vocab_size, ""
        sizes = {}
        for name in ("source_vocab_size", "target_vocab_size"):
            sizes[name], told = vocabulary_size(getattr(model, name), self.config.data.path, usual)
        return SyntheticRun(replace(self.config, model=replace(model, **sizes)), told)

    def batch(self, length: int, rows: int) -> PairBatch | PackedBatch:
        lengths = torch.full((rows,), length)
        sizes = (self.config.model.source_vocab_size, self.config.model.target_vocab_size)
        source, target = (torch.randint(size, (rows, length)) for size in sizes)
        pairs = PairBatch(source, lengths, target, lengths, torch.arange(rows))
        return PackedBatch.of(pairs) if self.config.data.batching == "packed" else pairs
