"""Results of a search and of a translator, as plain Python values, and the errors that end a search."""

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


@dataclass(frozen=True, slots=True)
class Translation:
    """One translation of one text.

    Args:
        text: detokenised.
        score: the ranking score of the n-best list, see `Hypothesis.score`.
        tokens: readable pieces, EOS last unless the translation was cut at the length limit.
        token_log_probs: the model's log-probability of each piece, in nats; 0 for forced pieces. Empty if
            another engine searched (see `engines`).
    """

    text: str
    score: float
    tokens: list[str]
    token_log_probs: list[float]


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of a given reference.

    Args:
        tokens: readable pieces of the reference, EOS last.
        token_log_probs: log-probability of each, given the source and the pieces before it, in nats.
    """

    tokens: list[str]
    token_log_probs: list[float]

    @property
    def sum_log_prob(self) -> float:
        """Log-probability of the whole reference, in nats."""
        return sum(self.token_log_probs)


def one_line(text: str) -> str:
    """Return a translation as one line: a line feed in it becomes a space."""
    return text.replace("\n", " ")
