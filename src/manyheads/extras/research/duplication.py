"""The duplication task: 0w0w with random symbols w. Only attention to the first half can predict the second half.

Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 2.1 and table 2. Differs: every step has new sequences, and validation
and test sequences come from separate random streams.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from manyheads.data.language.segments import SegmentBatch
from manyheads.data.sampler import mix
from manyheads.errors import ConfigError
from manyheads.evaluation.likelihood import evaluation_mode
from manyheads.seeding import derive_seed
from manyheads.text.vocabulary import IdVocabulary

if TYPE_CHECKING:
    from manyheads.data.settings import SegmentSettings
    from manyheads.models.composites import LanguageModel

NUM_SYMBOLS = 127
ROWS_AN_EPOCH = 500
HELD_OUT = {"valid": 64, "test": 256}


def duplicated(seed: int, name: str, first: int, count: int, length: int) -> NDArray[np.int64]:
    """Return sequences by number: 0, then w of symbols 1 to 127, then 0 and the same w.

    Args:
        seed: the run's seed.
        name: `train`, `valid` or `test`; each is a separate random stream.
        first: number of the first sequence. A sequence depends only on seed, name, length and its number.
        count: number of sequences.
        length: length of each; even.

    Returns: (count, length) ids.
    """
    base = np.uint64(derive_seed(seed, "duplication", name, length))
    rows = np.arange(first, first + count, dtype=np.uint64)
    places = np.arange(length // 2 - 1, dtype=np.uint64)
    words = 1 + mix(mix(mix(rows + base)[:, None] + places)) % np.uint64(NUM_SYMBOLS)
    half = np.concatenate([np.zeros((count, 1), np.int64), words.astype(np.int64)], axis=1)
    return np.concatenate([half, half], axis=1)


def _batch(sequences: NDArray[np.int64], first: int) -> SegmentBatch:
    """Return a batch in which each token is predicted from the tokens before it; only second halves count."""
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
    """The training sequences of a run by epoch and row, with the interface of `SegmentStream`.

    Args:
        settings: `lanes` sequences of `segment_len` tokens per step, in `accumulate` parts.
        seed: determines the sequences.
    """

    def __init__(self, settings: SegmentSettings, seed: int) -> None:
        self.settings = settings
        self.seed = seed

    def rows(self, epoch: int) -> int:
        """Return the number of steps of an epoch, which only determines validation and plots."""
        return ROWS_AN_EPOCH

    def at(self, epoch: int, row: int, progress: float = 1.0) -> list[SegmentBatch]:
        """Return the micro-batches of one optimiser step; no sequence occurs twice.

        Args: progress: has no effect.

        Raises: IndexError: no such row.
        """
        if not 0 <= row < ROWS_AN_EPOCH:
            raise IndexError(f"row {row} of {ROWS_AN_EPOCH}")
        options = self.settings
        first = (epoch * ROWS_AN_EPOCH + row) * options.lanes
        sequences = duplicated(self.seed, "train", first, options.lanes, options.segment_len)
        return _batch(sequences, first).split(options.accumulate)

    def describe(self) -> str:
        """Return one line for users."""
        options = self.settings
        return f"{options.lanes} new sequences of {options.segment_len} tokens a step, their second halves predicted"


def held_out(seed: int, split: str, length: int, rows: int) -> Iterator[SegmentBatch]:
    """Yield validation or test sequences in batches.

    Args:
        seed: the run's seed.
        split: `valid` (64 sequences) or `test` (256).
        length: length of a sequence.
        rows: number of sequences in a batch.
    """
    count = HELD_OUT[split]
    for first in range(0, count, rows):
        sequences = duplicated(seed, split, first, min(rows, count - first), length)
        yield _batch(sequences, first)


@dataclass(frozen=True)
class DuplicationData:
    """The task's data for a run, with the interface of prepared data.

    Args:
        seed: determines the sequences.
        length: length of each.

    Raises: ConfigError: the length is odd, or too short for a symbol.
    """

    seed: int
    length: int

    def __post_init__(self) -> None:
        if self.length < 4 or self.length % 2:
            raise ConfigError(
                f"data.segment_len is {self.length}; for the duplication task it must be even and at least 4."
            )

    @property
    def vocabulary(self) -> IdVocabulary:
        """The ids of 0, of the symbols, and of the beginning of a sequence."""
        return IdVocabulary(NUM_SYMBOLS + 1, documents="fixed", document_len=self.length)

    @property
    def tokenizer(self) -> IdVocabulary:
        """The vocabulary, under the name that the data of every task has for it."""
        return self.vocabulary

    @property
    def digest(self) -> str:
        """The same for the same sequences."""
        sample = duplicated(self.seed, "train", 0, 2, self.length).tobytes()
        return hashlib.sha256(sample + f"duplication {self.seed} {self.length}".encode()).hexdigest()

    def describe(self) -> str:
        """Return one line for users."""
        return f"the duplication task 0w0w of {self.length} tokens, {NUM_SYMBOLS} symbols"


@dataclass(frozen=True)
class Duplicated:
    """Sums over the scored targets. num_correct: how many of them have the highest probability."""

    nll_sum: float
    num_tokens: int
    num_correct: int

    @property
    def nats_per_token(self) -> float:
        """Mean negative log-likelihood."""
        return self.nll_sum / max(self.num_tokens, 1)

    @property
    def accuracy(self) -> float:
        """In percent, as in the paper's table 2."""
        return 100 * self.num_correct / max(self.num_tokens, 1)


@torch.no_grad()
def evaluate_duplication(
    model: LanguageModel,
    batches: Iterable[SegmentBatch],
    *,
    device: torch.device | str = "cpu",
    stop: Callable[[], bool] | None = None,
) -> Duplicated | None:
    """Predict each token from the correct tokens before it (teacher forcing); targets after the context are scored.

    Paper: Kitaev et al. 2020, sec. 2.1, table 2.
    Args:
        model: put into evaluation mode during the call.
        batches: of `extras.research.duplication.held_out`.
        device: the model's device.
        stop: called before each batch.

    Returns: sums; None if `stop` returned true.
    """
    sums, num_tokens, num_correct = [], 0, 0
    with evaluation_mode(model):
        for batch in batches:
            if stop is not None and stop():
                return None
            batch = batch.to(device)
            targets = batch.targets[:, batch.num_context :]
            log_probs = model.log_probs(batch.tokens)[:, batch.num_context :]
            sums.append(-float(log_probs.gather(2, targets[:, :, None]).cpu().sum(dtype=torch.float64)))
            num_correct += int((log_probs.argmax(-1) == targets).sum())
            num_tokens += targets.numel()
    return Duplicated(math.fsum(sums), num_tokens, num_correct)
