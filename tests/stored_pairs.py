"""Pairs of lists, written as a store of pairs."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from manyheads.data.store import Rows, write_blocks_of_pairs


def write_pairs(folder: str | Path, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], vocab_size: int) -> int:
    """Write each pair as a block of its own. Returns: the number of pairs."""
    return write_blocks_of_pairs(folder, ((row(source), row(target)) for source, target in pairs), vocab_size)


def row(ids: Sequence[int]) -> Rows:
    return np.asarray(ids, np.int64), np.array([len(ids)])
