"""Constraints of a search: changes log-probabilities of all rows to forbid or penalise tokens.

Repetition penalty and n-gram bans cover all earlier tokens, at constant cost per step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyheads.catalogue import HOOKS, load
from manyheads.errors import RequestError
from manyheads.nn.kernels import policy

if TYPE_CHECKING:
    from manyheads.decoding.settings import DecodingSettings, GenerationSettings


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
                rows, tokens = policy.sent(torch.tensor(banned), scores.device).t()
                restrained = scores.index_put((rows, tokens), scores.new_full((), -torch.inf))
                is_stuck = restrained.amax(-1, keepdim=True).isneginf()
                scores = torch.where(is_stuck, scores, restrained)
        return scores

    def add(self, tokens: Tensor, ids: Sequence[int]) -> None:
        """Add the token that each row produced. tokens: (rows,); ids: the same numbers, on the host."""
        if self._seen is not None:
            self._seen = self._seen.scatter(1, tokens[:, None], True)  # `select` may have made it in inference mode
        if self._size:
            for row, token in enumerate(ids):
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


class Constraints:
    """Banned ids, minimum length, repetition penalty and no-repeat n-gram, in that order.

    Log-probabilities are renormalised only if `renormalize_logits` is set.

    The repetition penalty (see `repetition.penalised`) changes logits in greedy search and sampling, and
    log-probabilities in beams, both as `transformers` does.

    Args:
        settings: see `DecodingSettings`.
        pad_id: never produced.
        bos_id: never produced.
        eos_id: banned before `min_new_tokens`.
        device: device of the log-probabilities.

    Attributes: wants_logits: whether `apply` needs the normaliser.
    """

    def __init__(
        self, settings: DecodingSettings, *, pad_id: int, bos_id: int, eos_id: int, device: torch.device
    ) -> None:
        never = sorted({pad_id, bos_id} - {eos_id} | {*settings.banned_ids})  # EOS can be the start token, too
        self._banned = torch.tensor(never, device=device)
        self._banned_early = torch.tensor([*never, eos_id], device=device)
        self._harmless = never[0]
        self._min_new_tokens = settings.min_new_tokens
        self._penalty = settings.repetition_penalty
        self.wants_logits = self._penalty != 1 and settings.num_beams == 1
        self._ngram = settings.no_repeat_ngram_size
        self._renormalize = settings.renormalize_logits

    @property
    def needs_history(self) -> bool:
        """Whether `apply` reads the tokens produced so far."""
        return self._penalty != 1 or self._ngram > 0

    def apply(
        self,
        log_probs: Tensor,
        history: Tensor | None,
        length: int,
        allowed: Tensor | None = None,
        normaliser: Tensor | float = 0.0,
    ) -> Tensor:
        """Return the log-probabilities for the search.

        Args:
            log_probs: (rows, vocab_size); modified in place.
            history: (rows, length) tokens so far, or None if not `needs_history`.
            length: number of target tokens so far.
            allowed: (rows, vocab_size or more) bool, the tokens that a grammar permits; None: all. If only one token is
                permitted, its log-probability is 0, because a forced word carries no information about the tree.
            normaliser: (rows, 1) logits minus log_probs, if `wants_logits`.
        Returns: (rows, vocab_size), -inf for forbidden tokens; `log_probs` itself if no other value changed.
        """
        if allowed is not None:
            allowed = allowed[:, : log_probs.size(1)]
            only_choice = allowed & (allowed.sum(1, keepdim=True) == 1)
            log_probs.masked_fill_(~allowed, -torch.inf).masked_fill_(only_choice, 0.0)
        adjusted = self._restrain(log_probs, history, length, normaliser)
        if not self._renormalize:
            return adjusted
        total = adjusted.logsumexp(-1, keepdim=True)
        return adjusted - total.masked_fill(total.isneginf(), 0.0)  # a row without any allowed token is not changed

    def _restrain(self, log_probs: Tensor, history: Tensor | None, length: int, normaliser: Tensor | float) -> Tensor:
        log_probs.index_fill_(1, self._banned_early if length < self._min_new_tokens else self._banned, -torch.inf)
        if history is None or length == 0:
            return log_probs
        adjusted = log_probs
        if self._penalty != 1:
            logits = log_probs.gather(1, history) + normaliser
            adjusted = log_probs.scatter(1, history, penalised(logits, self._penalty) - normaliser)
        if 0 < self._ngram <= length:
            self._ban_repeats(adjusted, history)
        return adjusted

    def _ban_repeats(self, log_probs: Tensor, history: Tensor) -> None:
        """Ban each token that would complete an n-gram that already occurred."""
        windows = history.unfold(1, self._ngram, 1)  # (rows, windows, n)
        context = history[:, history.size(1) - self._ngram + 1 :]  # (rows, n - 1)
        seen = (windows[:, :, :-1] == context[:, None]).all(-1)
        # If a window does not match, ban an id that is already banned: this avoids a sync and boolean indexing.
        log_probs.scatter_(1, torch.where(seen, windows[:, :, -1], self._harmless), -torch.inf)


def pattern_grammar(settings: DecodingSettings | GenerationSettings, reader: Any, *, check: bool = False) -> Any | None:
    """Return the grammar of the pattern in the settings; None: the settings have no pattern.

    Args: reader: a language model's vocabulary, or a translator's tokenizer. check: whether the limit leaves room.

    Raises: ConfigError: this model cannot write a text that matches. MissingExtraError: a package is missing.
    """
    return load(HOOKS["constrained"])(settings, reader, check=check) if settings.is_constrained else None


def check_ids(settings: DecodingSettings, *, vocab_size: int, pad_id: int, eos_id: int) -> None:
    """Refuse ids that are invalid for this vocabulary.

    Raises: RequestError: a banned or forced id is outside the vocabulary; padding or EOS is forced; a forced id is
        banned; the prefix is not shorter than `max_new_tokens`.
    """
    for name in ("banned_ids", "forced_prefix_ids"):
        for token in getattr(settings, name):
            if not 0 <= token < vocab_size:
                raise RequestError(f"{name} holds {token}; ids of this vocabulary are 0 to {vocab_size - 1}.")
    prefix = settings.forced_prefix_ids
    for token in prefix:
        if token in (pad_id, eos_id) or token in settings.banned_ids:
            raise RequestError(f"forced_prefix_ids holds {token}, which is padding, EOS or banned; leave it out.")
    if settings.max_new_tokens and len(prefix) >= settings.max_new_tokens:
        raise RequestError(
            f"forced_prefix_ids has {len(prefix)} tokens but max_new_tokens is {settings.max_new_tokens};"
            " raise max_new_tokens above the prefix."
        )
