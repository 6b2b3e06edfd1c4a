"""The memory of a translator's training, and the largest step that fits, without its data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from manyheads.data.batch import PairBatch
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.plan.fit import Fit, along, largest
from manyheads.training.plan.memory import Footprint, measure

__all__ = ["PairTrial", "fit", "predict_pairs"]

SHORT_PAIR = 16
_PROBE_TOKENS = (512, 2048)


@dataclass(frozen=True)
class PairTrial:
    """Pairs of random ids; see `training.plan.memory.Trial`."""

    config: TrainConfig

    def batch(self, length: int, rows: int) -> PairBatch:
        """See `Trial.batch`."""
        lengths = torch.full((rows,), length)
        sizes = (self.config.model.source_vocab_size, self.config.model.target_vocab_size)
        source, target = (torch.randint(size, (rows, length)) for size in sizes)
        return PairBatch(source, lengths, target, lengths, torch.arange(rows))

    def begin(self, model: Any, lanes: int, seed: int) -> None:
        """See `Trial.begin`."""


def predict_pairs(config: TrainConfig, length: int, rows: int) -> Footprint:
    """Predict the peak memory of a translator's training on a CPU, by steps of that size.

    Args:
        config: of the run; neither its data nor its folder is opened.
        length: tokens of every source and target.
        rows: pairs of a micro-batch.
    """
    model, size = config.model, config.tokenizer.vocab_size
    model = replace(
        model, source_vocab_size=model.source_vocab_size or size, target_vocab_size=model.target_vocab_size or size
    )
    trial = PairTrial(replace(config, model=model))
    return measure(trial, length, rows, (length,))


def fit(config: TrainConfig, limit_bytes: float) -> list[Fit]:
    """The largest number of tokens in a step; see `tasks.runs.fit`.

    Long sentences have more attention scores, short ones more rows. The kind that takes more memory per token decides.
    """
    accumulate = config.data.accumulate
    longest = max(config.data.max_source_len, config.data.max_target_len)
    found = []
    for length in {min(SHORT_PAIR, longest), longest}:
        rows = [max(1, tokens // length) for tokens in _PROBE_TOKENS]
        rows[1] = max(rows[1], rows[0] + 1)
        peaks = [predict_pairs(config, length, count).total_bytes for count in rows]
        tokens = [count * length for count in rows]
        found.append(largest(along(tokens, peaks), limit_bytes, length))
    value, predicted = min(found)
    given = f"sentences of at most {longest:,}" + (f", accumulate {accumulate}" if accumulate > 1 else "")
    return [Fit("data.max_tokens", value * accumulate, config.data.max_tokens, given, predicted)]
