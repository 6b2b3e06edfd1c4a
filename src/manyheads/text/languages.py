"""Languages of texts: their names in BCP 47, and a guess if the language is not given."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from manyheads.errors import ConfigError

LanguagePair = tuple[str, str]
"""Source and target."""

TAG = re.compile(
    r"([a-z]{2,3})(-[a-z]{3}){0,3}(-[a-z]{4})?(-(?:[a-z]{2}|\d{3}))?((?:-(?:[a-z\d]{5,8}|\d[a-z\d]{3}))*)"
    r"((?:-[a-wy-z\d](?:-[a-z\d]{2,8})+)*)(-x(?:-[a-z\d]{1,8})+)?"
)
MOST_TEXTS = 1000  # number of texts that are enough for a guess
PASSAGE_CHARACTERS = 300
LEAST_LETTERS = 200  # of fewer letters there is no guess
CLEAR_SHARE = 0.5  # of the texts, weighted by length, that must be in one language


def language_tag(text: str, option: str = "") -> str:
    """Return a language tag in its usual spelling, as `en`, `de-AT`, `zh-Hant-TW`.

    Args: option: for the message.

    Raises: ConfigError: it does not have the form of a tag (BCP 47, RFC 5646 sec. 2.1).
    """
    lowered = text.replace("_", "-").lower()
    if not TAG.fullmatch(lowered):
        raise ConfigError(
            f"{option} {text}: this is not a language tag; give one of BCP 47, such as en, de or pt-BR.".strip()
        )
    first, *rest = lowered.split("-")
    parts = [first]
    for number, part in enumerate(rest):
        if any(len(one) == 1 for one in rest[: number + 1]):
            parts.append(part)  # an extension is written in small letters
        elif len(part) == 4 and part.isalpha():
            parts.append(part.title())
        else:
            parts.append(part.upper() if len(part) == 2 else part)
    return "-".join(parts)


def same_language(one: str, other: str) -> bool:
    """Return whether two tags name the same language; script and region do not count."""
    return one.split("-")[0].lower() == other.split("-")[0].lower()


def guess_language(texts: Iterable[str]) -> str | None:
    """Return the language of most of the first texts, as in ISO 639-1; None: unknown, or py3langid is not installed."""
    try:
        import py3langid
    except ImportError:
        return None
    votes: Counter[str] = Counter()
    for passage in _passages(islice(texts, MOST_TEXTS)):
        if letters := sum(char.isalpha() for char in passage):
            votes[py3langid.classify(passage)[0]] += letters
    if votes.total() < LEAST_LETTERS:
        return None
    [(language, count)] = votes.most_common(1)
    return language if count >= CLEAR_SHARE * votes.total() else None


def _passages(texts: Iterable[str]) -> Iterator[str]:
    """Yield several texts joined: the guess is better for a longer passage."""
    passage = ""
    for text in texts:
        passage += text + "\n"
        if len(passage) >= PASSAGE_CHARACTERS:
            yield passage
            passage = ""
    yield passage


def warn_of_languages(given: tuple[str | None, str | None], guessed: tuple[str | None, str | None]) -> str | None:
    """Return a warning if files look exchanged, have the same language, or have another language than the given one.

    Args:
        given: languages of source and target that a person named.
        guessed: what the texts look like; None: unknown.
    """
    source, target = guessed
    if source is not None and target is not None and source == target:
        return f"Source and target both look like {source}; is one of the files wrong?"
    pairs: Sequence[tuple[str, str | None, str | None]] = (
        ("source", given[0], guessed[0]),
        ("target", given[1], guessed[1]),
    )
    wrong = [(side, tag, found) for side, tag, found in pairs if tag and found and not same_language(tag, found)]
    if len(wrong) == 2 and same_language(given[0] or "", target or "") and same_language(given[1] or "", source or ""):
        return f"The files look exchanged: the source looks like {source}, the target like {target}."
    told = [f"the {side} looks like {found}, not {tag}" for side, tag, found in wrong]
    return f"{' and '.join(told).replace('the', 'The', 1)}." if told else None
