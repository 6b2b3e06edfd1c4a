"""Results of a search, as plain Python values, and the errors that end it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manyheads.errors import NonFiniteError

Stop = Callable[[], bool]
"""Called before each step of a search; true ends the search by SearchStopped."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output of a search.

    Args:
        ids: target tokens with the forced prefix, without BOS and EOS.
        score: the ranking score: the sum of the search's log-probabilities (after the repetition penalty, before the
            temperature), divided by the length penalty; of a reranked one see `reranking`.
        token_log_probs: the model's log-probability of each id, and of EOS last if `ended`; 0 for forced tokens.
            Empty if another engine searched (see `engines`).
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


def check_stop(stop: Stop | None) -> None:
    """Raises: SearchStopped: the `stop` hook returned true."""
    if stop is not None and stop():
        raise SearchStopped


def check_finite(is_nan: bool, length: int) -> None:
    """Raises: NonFiniteError: a log-probability of token `length` of the output is NaN."""
    if is_nan:
        raise NonFiniteError(
            f"The model gave NaN log-probabilities for target token {length}; its weights are damaged or overflow in"
            " this precision. Check the model, or use precision fp32."
        )
