"""Results of a search and of a translator, as plain Python values, and the errors that end a search."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from manyheads.errors import NonFiniteError

Stop = Callable[[], bool]
"""Called before each step of a search; true ends the search by SearchStopped."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output of a search.

    Args:
        ids: target tokens with the forced prefix, without BOS and EOS.
        score: the ranking score: the sum of the search's log-probabilities (after the repetition penalty, before the
            temperature), divided by the length penalty; of a reranked one see `extras.reranking`.
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


_LEAST_REPEATS = 5


_LEAST_CHARACTERS = 10


_REPEATED = re.compile(rf"(.{{1,20}}?)\1{{{_LEAST_REPEATS - 1},}}")


_SAME_CHARACTERS = re.compile(r"(.)\1{9,}")


_LONGEST_RUN = 3  # up to this many repetitions are normal language: "very, very, very"


def repeats_itself(text: str) -> bool:
    """Return whether repetitions of one piece make up at least half of the text.

    The piece has at most 20 characters: a token, a word or a short phrase. It occurs at least 5 times in a row. That
    takes at least 10 characters, so that a number with many zeros is no repetition.
    """
    text = " " + " ".join(text.split())  # every word then begins with a space, the first too
    repeated = [len(found[0]) for found in _REPEATED.finditer(text)]
    return 2 * sum(length for length in repeated if length >= _LEAST_CHARACTERS) >= len(text)


def is_degenerate(source: str, text: str) -> bool:
    """Return whether a translation is empty, or repeats a word or a character that its source does not repeat.

    Stricter than `repeats_itself`: one run of a word in a long text is enough, because a second search costs little.
    """
    if not text.strip():
        return bool(source.strip())
    if _SAME_CHARACTERS.search(text) and not _SAME_CHARACTERS.search(source):
        return True
    words, source_words = text.casefold().split(), source.casefold().split()
    if _longest_run(words) > max(_LONGEST_RUN, _longest_run(source_words)):
        return True
    most, usual = (max(Counter(some).values(), default=0) for some in (words, source_words))
    return len(words) >= 8 and most > len(words) / 2 and most > 2 * usual


def _longest_run(words: Sequence[str]) -> int:
    return max((len(list(run)) for _, run in groupby(words)), default=0)
