"""Repetition penalty and n-gram bans over all earlier tokens, at constant cost per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


def penalised(scores: Tensor, penalty: float) -> Tensor:
    """Return the logits or log-probabilities of earlier tokens with the penalty: positive ones are divided by it.

    Paper: Keskar et al. 2019, arXiv:1909.05858, sec. 4.1. Differs, as in transformers and vLLM: negative ones are
    multiplied, because division would make them more probable.
    """
    return torch.where(scores > 0, scores / penalty, scores * penalty)


class Repetition:
    """Makes earlier tokens less probable, and forbids n-grams that already occurred.

    Args:
        histories: tokens of each row so far.
        vocab_size: number of ids.
        penalty: see `penalised`; 1 is off.
        ngram_size: 0 is off.
        device: device of the scores.

    Cost: per step, rows x vocab_size for the penalty, rows for n-grams.
    """

    def __init__(
        self,
        histories: Sequence[Sequence[int]],
        vocab_size: int,
        *,
        penalty: float,
        ngram_size: int,
        device: torch.device,
    ) -> None:
        self._penalty, self._size = penalty, ngram_size
        self._seen = torch.zeros(len(histories), vocab_size, dtype=torch.bool, device=device) if penalty != 1 else None
        self._followers: list[dict[tuple[int, ...], set[int]]] = [defaultdict(set) for _ in histories]
        self._last: list[tuple[int, ...]] = [() for _ in histories]
        for row, history in enumerate(histories):
            if self._seen is not None and history:
                self._seen[row, torch.tensor(sorted(set(history)), device=device)] = True
            if ngram_size:
                for token in history:
                    self._follow(row, token)

    def apply(self, scores: Tensor) -> Tensor:
        """Apply the penalty to (rows, vocab_size), and set tokens that would repeat an n-gram to -inf.

        A row that would have no token left may repeat one: it must go on with some token of the vocabulary.
        """
        if self._seen is not None:
            scores = torch.where(self._seen, penalised(scores, self._penalty), scores)
        if self._size:
            banned = [
                (row, token)
                for row, last in enumerate(self._last)
                if len(last) == self._size - 1
                for token in self._followers[row].get(last, ())
            ]
            if banned:
                rows, tokens = torch.tensor(banned, device=scores.device).t()
                restrained = scores.index_put((rows, tokens), scores.new_tensor(-torch.inf))
                is_stuck = restrained.amax(-1, keepdim=True).isneginf()
                scores = torch.where(is_stuck, scores, restrained)
        return scores

    def add(self, tokens: Tensor) -> None:
        """Add the token that each row produced. tokens: (rows,)"""
        if self._seen is not None:
            self._seen.scatter_(1, tokens[:, None], True)
        if self._size:
            for row, token in enumerate(tokens.tolist()):
                self._follow(row, token)

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these rows, in this order."""
        if self._seen is not None:
            self._seen = self._seen[torch.tensor(rows, device=self._seen.device, dtype=torch.int64)]
        self._followers = [self._followers[row] for row in rows]
        self._last = [self._last[row] for row in rows]

    def _follow(self, row: int, token: int) -> None:
        last = self._last[row]
        if len(last) == self._size - 1:
            self._followers[row][last].add(token)
        self._last[row] = (*last, token)[-(self._size - 1) :] if self._size > 1 else ()
