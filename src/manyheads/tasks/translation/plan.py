"""Training steps of a translator at any size, without its data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from manyheads.data.batch import PairBatch
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.plan.trial import Knob, token_knobs

__all__ = ["Trial"]


@dataclass(frozen=True)
class Trial:
    """Pairs of random ids; see `training.plan.trial.Trial`."""

    config: TrainConfig

    @property
    def rows(self) -> int:
        """Rows of the longest sentences; see `Trial.rows`."""
        data = self.config.data
        return max(1, data.max_tokens // data.accumulate // max(data.max_source_len, data.max_target_len))

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

    def begin(self, model: Any, lanes: int, seed: int) -> None:
        """See `Trial.begin`."""

    def knobs(self) -> list[Knob]:
        """The tokens of a step; see `Trial.knobs`."""
        data = self.config.data
        return token_knobs(data, max(data.max_source_len, data.max_target_len), "sentences")
