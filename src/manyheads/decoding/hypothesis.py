"""Results of a search: plain Python values, best first."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Hypothesis", "SearchStopped"]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output of a search.

    Args:
        ids: target tokens with the forced prefix, without BOS and EOS.
        score: the ranking score: the sum of the search's log-probabilities (after the repetition penalty, before the
            temperature), divided by the length penalty.
        token_log_probs: the model's log-probability of each id, and of EOS last if `ended`; 0 for forced tokens.
        ended: whether the model produced EOS; otherwise the hypothesis was cut at the length limit.
    """

    ids: list[int]
    score: float
    token_log_probs: list[float]
    ended: bool

    @property
    def sum_log_prob(self) -> float:
        """Log-probability of the whole output under the model, in nats, forced tokens excluded."""
        return sum(self.token_log_probs)


class SearchStopped(Exception):  # noqa: N818  (an event, not an error)
    """The `stop` hook returned true; the results of the current batch are lost."""
