"""One batch to search, with the parts that all searches share, such as forbidden tokens, and the rules that other
toolkits define differently.

Rules are scores of hypotheses and conditions to stop. Beam search uses a `Rules` object and never a model's class.
`BeamRules` is ours. A converted model can have other rules, for example lengths that include the start token, a
heuristic bound for stopping, or a forced EOS at the last position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, overload

import torch
from torch import Tensor

from manyheads.decoding.inputs_and_results import Hypothesis
from manyheads.nn.kernels import policy

if TYPE_CHECKING:
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.models.protocols import Searchable


class Rules(Protocol):
    """The interface for beam search. Lengths count target tokens, with EOS and without BOS."""

    def score(self, sums: Tensor, length: int) -> Tensor:
        """Return the ranking scores of hypotheses of this length from their summed log-probabilities; any shape."""

    def score_cut(self, sums: Tensor, length: int) -> Tensor:
        """Return the same as `score` for hypotheses that reach the limit without EOS."""

    def finished(self, kept: Tensor, best_found: Tensor, best_running: Tensor, length: int, limits: Tensor) -> Tensor:
        """Return which sentences need no further step. (sentences,) bool

        Args:
            kept: (sentences, num_beams) scores of the best ended hypotheses, best first, -inf if there are fewer.
            best_found: (sentences,) the highest sum of this step, of an ended or a running hypothesis.
            best_running: (sentences,) the highest sum of a running hypothesis; it has `length` tokens.
            length: number of tokens so far.
            limits: (sentences,) maximum number of tokens.
        """

    def last_step(self, log_probs: Tensor, at_limit: Tensor, eos_id: int) -> None:
        """Optionally change the log-probabilities of sentences at their last token. Shape: (sentences, beams,
        vocab_size)."""

    @property
    def cut_competes(self) -> bool:
        """Whether cut hypotheses of a sentence that is not `finished` at its limit are ranked together with ended ones.
        Otherwise they are ranked after them.
        """


@dataclass(frozen=True)
class BeamRules:
    """Our rules.

    score = sum / penalty(length), where penalty is `gnmt`: ((5 + length) / 6) ** p (Wu et al. 2016, arXiv:1609.08144,
    eq. 14, without its coverage term), `power`: length ** p, or `none`: 1.

    With `early_stopping` a sentence is finished when num_beams hypotheses have ended. Otherwise it is finished when its
    num_return_sequences-th best ended hypothesis scores at least as high as any running hypothesis can reach.
    Log-probabilities are at most 0 and the penalty does not decrease with length (p >= 0), so a running hypothesis with
    sum s in a sentence of at most `limit` tokens can reach at most

        s / penalty(limit)        for gnmt and power, and s for none.

    So the result is the same as that of a search up to the limit.
    """

    settings: DecodingSettings

    cut_competes = False

    @overload
    def penalty(self, length: int) -> float: ...
    @overload
    def penalty(self, length: Tensor) -> Tensor: ...
    def penalty(self, length: int | Tensor) -> float | Tensor:
        """Return the divisor of a sum; `length` is one number or a tensor of lengths."""
        kind, exponent = self.settings.length_penalty_kind, self.settings.length_penalty
        if kind == "none" or exponent == 0:
            return 1.0 if isinstance(length, int) else length.new_ones(()).float()
        base = (5.0 + length) / 6.0 if kind == "gnmt" else length * 1.0
        result: float | Tensor = base**exponent
        return result

    def score(self, sums: Tensor, length: int) -> Tensor:
        return sums / self.penalty(length)

    def score_cut(self, sums: Tensor, length: int) -> Tensor:
        return self.score(sums, length)

    def finished(self, kept: Tensor, best_found: Tensor, best_running: Tensor, length: int, limits: Tensor) -> Tensor:
        if self.settings.early_stopping is True:
            return ~kept[:, self.settings.num_beams - 1].isneginf()
        return kept[:, self.settings.num_return_sequences - 1] >= best_running / self.penalty(limits)

    def last_step(self, log_probs: Tensor, at_limit: Tensor, eos_id: int) -> None:
        """With `forced_eos` the last token is EOS with log-probability 0. Otherwise any token is possible, and a
        hypothesis without EOS counts as cut.
        """
        if self.settings.forced_eos:
            log_probs.masked_fill_(at_limit[:, None, None], -torch.inf)
            log_probs[:, :, eos_id].masked_fill_(at_limit[:, None], 0.0)


class MarianRules(BeamRules):
    """Beam search as in `transformers` 4.35; `length_penalty_kind` should be `power`.

    OPUS-MT's models were published and evaluated with it. A length includes the start token (the padding token) but not
    the EOS that ends a hypothesis. For ended hypotheses this equals the number of their target tokens with EOS, so
    `score` is the same as ours. The differences are

    - the limit: a hypothesis that is cut there has no EOS, so its length is larger by one; it competes with those that
      ended (with `forced_eos`, which all OPUS-MT models use, there are no such hypotheses);
    - stopping: when num_beams hypotheses have ended, `early_stopping` false stops if the worst of them scores at least
      best_found / (length + 1) ** p, where best_found may itself have ended. This is a heuristic: with p > 0 a running
      hypothesis may still score higher when it gets longer. `never` uses the limit as the length and is exact.

    Paper: none; pull request 20901 of `transformers` discusses the heuristic.
    """

    cut_competes = True

    def score_cut(self, sums: Tensor, length: int) -> Tensor:
        return self.score(sums, length + 1)

    def finished(self, kept: Tensor, best_found: Tensor, best_running: Tensor, length: int, limits: Tensor) -> Tensor:
        return self._settled(kept, best_found, length + 1, limits + 1)

    def _settled(self, kept: Tensor, best: Tensor, length: int, limits: Tensor) -> Tensor:
        worst = kept[:, self.settings.num_beams - 1]
        full = ~worst.isneginf()
        if self.settings.early_stopping is True:
            return full
        is_certain = self.settings.early_stopping == "never" and self.settings.length_penalty > 0
        return full & (worst >= best / self.penalty(limits if is_certain else length))


class Marian5Rules(MarianRules):
    """Beam search as in `transformers` 5: lengths exclude the start token; only running hypotheses delay the end."""

    def score_cut(self, sums: Tensor, length: int) -> Tensor:
        return self.score(sums, length)

    def finished(self, kept: Tensor, best_found: Tensor, best_running: Tensor, length: int, limits: Tensor) -> Tensor:
        return self._settled(kept, best_running, length, limits)


RULES: dict[str, type[BeamRules]] = {"manyheads": BeamRules, "marian": MarianRules, "marian-5": Marian5Rules}
"""`DecodingSettings.rules` -> class."""


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


def penalised(scores: Tensor, penalty: float) -> Tensor:
    """Return the logits or log-probabilities of earlier tokens with the penalty: positive ones are divided by it.

    Paper: Keskar et al. 2019, arXiv:1909.05858, sec. 4.1. Differs, as in transformers and vLLM: negative ones are
    multiplied, because division would make them more probable.
    """
    return torch.where(scores > 0, scores / penalty, scores * penalty)


class Constraints:
    """Banned ids, minimum length, repetition penalty and no-repeat n-gram, in that order.

    Log-probabilities are renormalised only if `renormalize_logits` is set.

    The repetition penalty (see `penalised`) changes logits in greedy search and sampling, and
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

    @staticmethod
    def range_of(limits: Tensor) -> tuple[int, int]:
        """Return the smallest and the largest."""
        least, most = torch.stack(limits.aminmax()).tolist()
        return least, most

    def reads_now(self, length: int, longest: int) -> bool:
        """Return whether to read after this step which sentences are finished. longest: the largest limit in the batch.

        Steps beyond a sentence's end have no effect on it. A grammar is defined only within a sentence's limit.
        """
        if self.report_early or self.grammar is not None or length >= longest:
            return True
        return length % policy.steps_between_reads(self.source.device) == 0

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
