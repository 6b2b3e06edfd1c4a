"""Training steps of a translator at any size, without its data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from manyheads.data.batch import PairBatch
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.plan.trial import TokenTrial

__all__ = ["Trial"]


@dataclass(frozen=True)
class Trial(TokenTrial):
    """Pairs of random ids; see `training.plan.trial.TokenTrial`."""

    config: TrainConfig
    unit = "sentences"

    @property
    def longest(self) -> int:
        """See `TokenTrial.longest`."""
        return max(self.config.data.max_source_len, self.config.data.max_target_len)

    def at(self, length: int) -> Trial:
        """See `Trial.at`."""
        model, size = self.config.model, self.config.tokenizer.vocab_size
        sizes = {name: getattr(model, name) or size for name in ("source_vocab_size", "target_vocab_size")}
        return Trial(replace(self.config, model=replace(model, **sizes)))

    def batch(self, length: int, rows: int) -> PairBatch:
        """See `Trial.batch`."""
        lengths = torch.full((rows,), length)
        sizes = (self.config.model.source_vocab_size, self.config.model.target_vocab_size)
        source, target = (torch.randint(size, (rows, length)) for size in sizes)
        return PairBatch(source, lengths, target, lengths, torch.arange(rows))
