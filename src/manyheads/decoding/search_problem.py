"""One batch to search, with the parts that all searches share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from manyheads.decoding.constraints import Constraints
from manyheads.decoding.hypothesis import Hypothesis
from manyheads.decoding.rules import Rules
from manyheads.decoding.settings import DecodingSettings
from manyheads.models.protocols import Searchable

SearchSteps = Generator[list[tuple[int, list[Hypothesis]]], Collection[int] | None, None]
"""A search, a step at a time: it yields the (sentence, hypotheses) that are finished after each step, best hypothesis
first. `send` takes sentences that are no longer needed: they are removed from the batch before the next step."""

# Finished sentences leave a batch when they are at least this fraction (one in ...) of it.
_LEAVE_AT = 8


class SentenceGrammar(Protocol):
    """The permitted outputs for the sentences of one batch."""

    def allowed(self, history: Tensor, sentence: Tensor, room: Tensor) -> Tensor:
        """Return the permitted next tokens.

        Args:
            history: (rows, length) target tokens so far, without BOS.
            sentence: (rows,) index of each row's sentence in the batch.
            room: (rows,) number of tokens that may still be generated, EOS included.

        Returns: (rows, at least vocab_size) bool.
        """


class Grammar(Protocol):
    """A rule for outputs, applied to the sentences of a batch; see `text.sides.TranslationTokenizer.grammar`."""

    def of(self, source: Tensor, source_lengths: Tensor) -> SentenceGrammar:
        """Return the grammar of one batch. source (sentences, source_len), each row tokens + EOS; source_lengths
        (sentences,).
        """


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """A batch and its options.

    Shape: source (sentences, source_len), source_lengths and limits (sentences,) on the model's device; indices has a
        number for each sentence that does not depend on its batch.

    report_early: yield each sentence in the step that finishes it, not when it leaves the batch.
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
    report_early: bool = False

    @property
    def prefix(self) -> tuple[int, ...]:
        return self.settings.forced_prefix_ids

    def prompt(self) -> Tensor:
        """The first input of every sentence's decoder: BOS and the forced prefix. (sentences, 1 + prefix)"""
        return self.source.new_tensor([[self.bos_id, *self.prefix]]).expand(self.source.size(0), -1)

    def constraints(self) -> Constraints:
        return Constraints(
            self.settings, pad_id=self.pad_id, bos_id=self.bos_id, eos_id=self.eos_id, device=self.source.device
        )

    def allowed(self, history: Tensor | None, sentence: Tensor, limits: Tensor) -> Tensor | None:
        """Return the next tokens that the grammar permits; None: all.

        Shape: history (rows, length), with the same number of rows for each sentence; sentence, limits (sentences,).
            Returns (rows, vocab_size).
        """
        if self.grammar is None or history is None:
            return None
        sentences = sentence.numel()
        each = history.size(0) // sentences
        room = limits - history.size(1)
        return self.grammar.allowed(history, sentence.repeat_interleave(each), room.repeat_interleave(each))

    def last_step(self, log_probs: Tensor, adjusted: Tensor, at_limit: Tensor) -> None:
        """Let the rules change the log-probabilities of sentences at their limit. Both are (rows, vocab_size), or the
        same tensor.
        """
        for values in (log_probs,) if adjusted is log_probs else (log_probs, adjusted):
            self.rules.last_step(values.view(at_limit.numel(), -1, values.size(-1)), at_limit, self.eos_id)

    def leave_now(self, num_done: int, count: int) -> bool:
        """Return whether finished sentences leave a batch of `count` now: all together, when they are an eighth of it.

        Until then the search continues them without effect. This costs less than copying the state of all other
        sentences whenever one is finished, and avoids products with many different numbers of rows (see decision 006).
        With a grammar they leave at once, because a grammar is defined only within a sentence's limit.
        """
        return num_done > 0 and (self.grammar is not None or _LEAVE_AT * num_done >= count)

    def marks(self, sentence: Tensor, chosen: Collection[int]) -> Tensor:
        """Return which of these sentences are among the chosen ones. sentence: (sentences,); returns bool."""
        return torch.isin(sentence, torch.tensor(sorted(chosen), device=sentence.device, dtype=sentence.dtype))


def run_to_end(steps: SearchSteps) -> list[list[Hypothesis]]:
    """Take all steps of a search. Returns: the hypotheses of each sentence, in order."""
    found = dict(pair for finished in steps for pair in finished)
    return [found[sentence] for sentence in sorted(found)]


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
