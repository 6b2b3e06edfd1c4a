"""Batches of segments for tests of language models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manyheads.data.segments import SegmentBatch

VOCAB = 23


def ids(lanes: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (lanes, length), generator=torch.Generator().manual_seed(seed))


def batch_of(tokens: Tensor, lengths: list[int] | None = None, **changes: Any) -> SegmentBatch:
    """tokens (lanes, len + 1): the last column is only a target."""
    lanes, length = tokens.shape[0], tokens.shape[1] - 1
    given = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "lengths": torch.tensor(lengths or [length] * lanes),
        "resets": torch.zeros(lanes, dtype=torch.bool),
        "sample_ids": torch.arange(lanes),
    }
    return SegmentBatch(**{**given, **changes})
