"""The search rules of Marian models in `transformers`, with which OPUS-MT's models were published and evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manyheads.decoding.rules import BeamRules

__all__ = ["Marian5Rules", "MarianRules"]


@dataclass(frozen=True, kw_only=True)
class MarianRules(BeamRules):
    """Beam search as in `transformers` 4.35; `length_penalty_kind` should be `power`.

    A length includes the start token (the padding token) but not the EOS that ends a hypothesis. For ended hypotheses
    this
    equals the number of their target tokens with EOS, so `score` is the same as ours. The differences are

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
        worst = kept[:, self.num_beams - 1]
        full = ~worst.isneginf()
        if self.early_stopping is True:
            return full
        is_certain = self.early_stopping == "never" and self.exponent > 0
        return full & (worst >= best / self.penalty(limits if is_certain else length))


@dataclass(frozen=True, kw_only=True)
class Marian5Rules(MarianRules):
    """Beam search as in `transformers` 5: lengths exclude the start token; only running hypotheses delay the end."""

    def score_cut(self, sums: Tensor, length: int) -> Tensor:
        return self.score(sums, length)

    def finished(self, kept: Tensor, best_found: Tensor, best_running: Tensor, length: int, limits: Tensor) -> Tensor:
        return self._settled(kept, best_running, length, limits)
