"""The generation rules of Marian models in `transformers`, by which OPUS-MT's models were published and measured."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manyheads.decoding.rules import BeamRules

__all__ = ["Marian5Rules", "MarianRules"]


@dataclass(frozen=True, kw_only=True)
class MarianRules(BeamRules):
    """Beam search as `transformers` 4.35 does it; `length_penalty_kind` should be `power`.

    The start token (which is the padding token) counts in a length, the EOS that ends a hypothesis does not: for
    hypotheses that ended that is the number of their target tokens, EOS included, so `score` is ours. Different are

    - the limit: a hypothesis cut there has no EOS to leave out, so its length is one more; it competes with those that
      ended (with `forced_eos`, as all of OPUS-MT have it, there are none such);
    - stopping: with num_beams hypotheses ended, `early_stopping` false stops when the worst of them scores at least
      best_found / (length + 1) ** p, where best_found may itself have ended. That is a guess: with p > 0 a running
      hypothesis may still come to more by growing longer. `never` takes the limit for the length, and is no guess.

    Paper: none; the guess is discussed in that project's pull request 20901.
    """

    cut_competes = True

    def score_cut(self, sums: Tensor, length: int) -> Tensor:
        return self.score(sums, length + 1)

    def finished(self, kept: Tensor, best_found: Tensor, best_running: Tensor, length: int, limits: Tensor) -> Tensor:
        return self._settled(kept, best_found, length + 1, limits + 1)

    def _settled(self, kept: Tensor, best: Tensor, length: int, limits: Tensor) -> Tensor:
        worst = kept[:, self.num_beams - 1]
        full = ~worst.isneginf()
        if self.early_stopping is True:
            return full
        is_certain = self.early_stopping == "never" and self.exponent > 0
        return full & (worst >= best / self.penalty(limits if is_certain else length))


@dataclass(frozen=True, kw_only=True)
class Marian5Rules(MarianRules):
    """Beam search as `transformers` 5 does it: no length counts the start token, and only what runs on gives hope."""

    def score_cut(self, sums: Tensor, length: int) -> Tensor:
        return self.score(sums, length)

    def finished(self, kept: Tensor, best_found: Tensor, best_running: Tensor, length: int, limits: Tensor) -> Tensor:
        return self._settled(kept, best_running, length, limits)
