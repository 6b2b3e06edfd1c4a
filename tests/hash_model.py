"""A model that can be searched and understood: its log-probabilities are a hash of source and target so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

PAD, BOS, EOS = 0, 1, 2


@dataclass
class HashState:
    """One integer a row; `sentences` lines with equally many rows."""

    codes: Tensor
    sentences: int
    calls: list[tuple[int, int]]

    def reorder(self, rows: Tensor) -> HashState:
        assert rows.dtype == torch.int64
        assert rows.dim() == 2
        old_beams = self.codes.numel() // self.sentences
        owners = rows // old_beams
        assert (owners == owners[:, :1]).all(), "rows of one line come from several sentences"
        assert owners[:, 0].unique().numel() == rows.size(0), "a sentence came twice"
        self.calls.append((rows.size(0), rows.size(1)))
        return HashState(self.codes[rows.flatten()], rows.size(0), self.calls)


@dataclass
class HashModel:
    """Log-probabilities depend on the whole past, so that any mistake in reordering changes them.

    Args:
        vocab_size: ids.
        seed: another seed, another language.
        eos_bonus: added to the logit of EOS.
        sharpness: spread of the logits.
    """

    vocab_size: int = 7
    seed: int = 0
    eos_bonus: float = 0.0
    sharpness: float = 4.0
    max_len: int | None = None
    reorders: list[tuple[int, int]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)

    def start(self, source: Tensor, source_lengths: Tensor) -> HashState:
        codes = torch.full((source.size(0),), self.seed + 17)
        for column in range(source.size(1)):
            codes = torch.where(column < source_lengths, self._mix(codes, source[:, column]), codes)
        return HashState(codes, source.size(0), self.reorders)

    def step(self, tokens: Tensor, state: HashState, *, logits: bool = False) -> tuple[Tensor, HashState]:
        assert tokens.size(0) == state.codes.size(0)
        self.steps.append((tokens.size(0), tokens.size(1)))
        codes = state.codes
        for column in tokens.unbind(1):
            codes = self._mix(codes, column)
        values = self._mix(codes[:, None], torch.arange(self.vocab_size)).double() / 2**63  # in [-1, 1)
        scores = values * self.sharpness / 2
        scores[:, EOS] += self.eos_bonus
        if not logits:
            scores = scores.log_softmax(-1)
        return scores.float(), HashState(codes, state.sentences, state.calls)

    @staticmethod
    def _mix(codes: Tensor, tokens: Tensor) -> Tensor:
        """A 64-bit hash (the finaliser of splitmix64; products wrap around)."""
        mixed = codes * 3 + (tokens + 1) * -7046029254386353131
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * factor
        return mixed ^ ((mixed >> 31) & (2**33 - 1))

    def next_log_probs(self, source_ids: list[int]) -> Callable[[list[int]], list[float]]:
        """The same model, recomputed from nothing for one sentence."""

        def compute(target: list[int]) -> list[float]:
            state = self.start(torch.tensor([source_ids]), torch.tensor([len(source_ids)]))
            log_probs, _ = self.step(torch.tensor([target]), state)
            return log_probs[0].tolist()

        return compute


@pytest.fixture(scope="session")
def hash_model() -> type[HashModel]:
    return HashModel
