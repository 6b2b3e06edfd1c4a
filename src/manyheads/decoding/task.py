"""One batch to search, with everything that the searches have in common worked out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.architectures.protocols import Searchable
from manyheads.decoding.constraints import Constraints
from manyheads.decoding.grammar import SentenceGrammar
from manyheads.decoding.hypothesis import SearchStopped
from manyheads.decoding.rules import Rules
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import NonFiniteError

__all__ = ["Task", "length_limits"]

# Those that are done leave a batch when they are one in so many.
_LEAVE_AT = 8


@dataclass(frozen=True, kw_only=True)
class Task:
    """A batch and its options.

    Shape: source (sentences, source_len), source_lengths and limits (sentences,) on the model's device; indices has a
        number for each sentence that does not depend on the batch it came into.
    """

    model: Searchable
    source: Tensor
    source_lengths: Tensor
    limits: Tensor
    indices: Sequence[int]
    settings: DecodingSettings
    pad_id: int
    bos_id: int
    eos_id: int
    rules: Rules
    grammar: SentenceGrammar | None = None
    stop: Callable[[], bool] | None = None

    @property
    def prefix(self) -> tuple[int, ...]:
        return self.settings.forced_prefix_ids

    def prompt(self) -> Tensor:
        """What every sentence's decoder is given first: BOS and the forced prefix. (sentences, 1 + prefix)"""
        return self.source.new_tensor([[self.bos_id, *self.prefix]]).expand(self.source.size(0), -1)

    def constraints(self) -> Constraints:
        return Constraints(
            self.settings, pad_id=self.pad_id, bos_id=self.bos_id, eos_id=self.eos_id, device=self.source.device
        )

    def allowed(self, history: Tensor | None, sentence: Tensor, limits: Tensor) -> Tensor | None:
        """What the grammar permits next; None: everything.

        Shape: history (rows, length), as many rows for each sentence; sentence, limits (sentences,). Returns (rows,
        vocab_size).
        """
        if self.grammar is None or history is None:
            return None
        sentences = sentence.numel()
        each = history.size(0) // sentences
        room = limits - history.size(1)
        return self.grammar.allowed(history, sentence.repeat_interleave(each), room.repeat_interleave(each))

    def last_step(self, log_probs: Tensor, adjusted: Tensor, at_limit: Tensor) -> None:
        """Let the rules rewrite what sentences at their limit choose from. Both are (rows, vocab_size), or one."""
        for values in (log_probs,) if adjusted is log_probs else (log_probs, adjusted):
            self.rules.last_step(values.view(at_limit.numel(), -1, values.size(-1)), at_limit, self.eos_id)

    def leave_now(self, num_done: int, count: int) -> bool:
        """Whether sentences that are done are to leave a batch of `count`: all at once, when they are an eighth of it.

        Until then they are searched on for nothing. That costs less than to copy what all others remember whenever one
        is done, and to have products made for one more number of rows (see decision 006). A grammar, which only knows
        what fits into a sentence's room, has them leave at once.
        """
        return num_done > 0 and (self.grammar is not None or _LEAVE_AT * num_done >= count)

    def check_stop(self) -> None:
        """Raises: SearchStopped: the hook said yes."""
        if self.stop is not None and self.stop():
            raise SearchStopped

    @staticmethod
    def check_finite(is_nan: bool, length: int) -> None:
        """Raises: NonFiniteError: a log-probability is NaN."""
        if is_nan:
            raise NonFiniteError(
                f"The model gave NaN log-probabilities for target token {length}; its weights are damaged or overflow"
                " in this precision. Check the model, or use precision fp32."
            )


def length_limits(source_lengths: Tensor, settings: DecodingSettings, max_len: int | None = None) -> Tensor:
    """Most target tokens of each sentence, EOS included. (sentences,) int64

    `max_new_tokens`, or max_len_ratio x source length + max_len_offset, at most `max_len` (a model's table of
    positions); at least one token after the forced prefix, and room for `min_new_tokens` and EOS.
    """
    if settings.max_new_tokens:
        limits = torch.full_like(source_lengths, settings.max_new_tokens, dtype=torch.int64)
    else:
        limits = (source_lengths * settings.max_len_ratio).long() + settings.max_len_offset
        limits = limits.clamp(min=settings.min_new_tokens + 1)
    if max_len is not None:
        limits = limits.clamp(max=max_len)
    return limits.clamp(min=len(settings.forced_prefix_ids) + 1)
