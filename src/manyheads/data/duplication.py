"""The duplication task: 0w0w, w being random symbols. The second half can be told only by looking half a sequence back.

Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 5.1. Differs: sequences are drawn anew for every step, and those that
validate and test come from streams of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from manyheads.data.sampler import mix
from manyheads.data.segments import SegmentBatch
from manyheads.data.settings import SegmentSettings
from manyheads.errors import ConfigError
from manyheads.seeding import derive_seed
from manyheads.text.id_vocabulary import IdVocabulary

__all__ = ["NUM_SYMBOLS", "DuplicationData", "DuplicationStream", "duplicated", "held_out"]

NUM_SYMBOLS = 127
ROWS_AN_EPOCH = 500
HELD_OUT = {"valid": 64, "test": 256}


def duplicated(seed: int, name: str, first: int, count: int, length: int) -> NDArray[np.int64]:
    """Sequences by number: 0, then w of symbols 1 to 127, then 0 and the same w.

    Args:
        seed: of the run.
        name: `train`, `valid` or `test`; each has a stream of its own.
        first: number of the first sequence. A sequence depends on seed, name, length and its number alone.
        count: how many.
        length: of each, even.

    Returns: (count, length) ids.
    """
    base = np.uint64(derive_seed(seed, "duplication", name, length))
    rows = np.arange(first, first + count, dtype=np.uint64)
    places = np.arange(length // 2 - 1, dtype=np.uint64)
    words = 1 + mix(mix(mix(rows + base)[:, None] + places)) % np.uint64(NUM_SYMBOLS)
    half = np.concatenate([np.zeros((count, 1), np.int64), words.astype(np.int64)], axis=1)
    return np.concatenate([half, half], axis=1)


def _batch(sequences: NDArray[np.int64], first: int) -> SegmentBatch:
    """Sequences to be predicted from what stands before each token; only second halves count."""
    count, length = sequences.shape
    begins = np.full((count, 1), NUM_SYMBOLS + 1, np.int64)
    return SegmentBatch(
        tokens=torch.from_numpy(np.concatenate([begins, sequences[:, :-1]], axis=1)),
        targets=torch.from_numpy(sequences),
        lengths=torch.full((count,), length),
        resets=torch.ones(count, dtype=torch.bool),
        sample_ids=torch.arange(first, first + count),
        num_context=length // 2,
    )


class DuplicationStream:
    """The training sequences of a run by epoch and row, as `SegmentStream` gives segments of a text.

    Args:
        settings: `lanes` sequences of `segment_len` tokens a step, in `accumulate` parts.
        seed: which sequences.
    """

    def __init__(self, settings: SegmentSettings, seed: int) -> None:
        self.settings = settings
        self.seed = seed

    def rows(self, epoch: int) -> int:
        """Steps of an epoch, which has no meaning here but that validation and plots speak of it."""
        return ROWS_AN_EPOCH

    def at(self, epoch: int, row: int) -> list[SegmentBatch]:
        """The micro-batches of one optimiser step; no sequence comes twice. Raises: IndexError: no such row."""
        if not 0 <= row < ROWS_AN_EPOCH:
            raise IndexError(f"row {row} of {ROWS_AN_EPOCH}")
        options = self.settings
        first = (epoch * ROWS_AN_EPOCH + row) * options.lanes
        sequences = duplicated(self.seed, "train", first, options.lanes, options.segment_len)
        return _batch(sequences, first).split(options.accumulate)

    def next_position(self, epoch: int, row: int) -> tuple[int, int]:
        """Where to go on after a step."""
        return (epoch, row + 1) if row + 1 < ROWS_AN_EPOCH else (epoch + 1, 0)

    def describe(self) -> str:
        """One line for people."""
        options = self.settings
        return f"{options.lanes} new sequences of {options.segment_len} tokens a step, their second halves predicted"


def held_out(seed: int, split: str, length: int, rows: int) -> Iterator[SegmentBatch]:
    """Validation or test sequences, so many at a time.

    Args:
        seed: of the run.
        split: `valid` (64 sequences) or `test` (256).
        length: of a sequence.
        rows: sequences of a batch.
    """
    count = HELD_OUT[split]
    for first in range(0, count, rows):
        sequences = duplicated(seed, split, first, min(rows, count - first), length)
        yield _batch(sequences, first)


@dataclass(frozen=True)
class DuplicationData:
    """The task's data for a run, in place of prepared data.

    Args:
        seed: which sequences.
        length: of each.

    Raises: ConfigError: the length is odd, or too short for a symbol.
    """

    seed: int
    length: int

    def __post_init__(self) -> None:
        if self.length < 4 or self.length % 2:
            raise ConfigError(
                f"data.segment_len is {self.length}; the duplication task has 0w0w in it, an even number of tokens, at"
                " least 4."
            )

    @property
    def vocabulary(self) -> IdVocabulary:
        """0, the symbols, and what stands before a sequence."""
        return IdVocabulary(NUM_SYMBOLS + 1, documents="fixed", document_len=self.length)

    @property
    def tokenizer(self) -> IdVocabulary:
        """The vocabulary, by the name that every task's data has for it."""
        return self.vocabulary

    @property
    def digest(self) -> str:
        """Equal exactly where the sequences are."""
        sample = duplicated(self.seed, "train", 0, 2, self.length).tobytes()
        return hashlib.sha256(sample + f"duplication {self.seed} {self.length}".encode()).hexdigest()

    def describe(self) -> str:
        """One line for people."""
        return f"the duplication task 0w0w of {self.length} tokens, {NUM_SYMBOLS} symbols"
