"""Scores of hypotheses and stopping rules, which other toolkits define differently.

Beam search uses a `Rules` object and never a model's class. `BeamRules` is ours. A converted model can have other
rules, for example lengths that include the start token, a heuristic bound for stopping, or a forced EOS at the last
position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, overload

import torch
from torch import Tensor

from manyheads.decoding.settings import DecodingSettings


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
