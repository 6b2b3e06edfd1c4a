"""Results of a translator."""

from __future__ import annotations

from dataclasses import dataclass


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
