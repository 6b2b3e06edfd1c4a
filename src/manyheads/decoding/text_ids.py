"""Sentences to ids, with a check of their type."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from manyheads.errors import RequestError
from manyheads.text.sides import Side

_LINE_BREAKS = re.compile(r"[\r\n]+")


def encode_texts(texts: Sequence[str], side: Side) -> list[list[int]]:
    """Return the ids of each text, which is one sentence.

    A line break inside it becomes a space; line breaks at its ends are removed, because models of sentences were not
    trained on line breaks.

    Raises: RequestError: a text is not a string.
    """
    check_texts(texts)
    return side.encode_batch([" ".join(filter(None, _LINE_BREAKS.split(text))) for text in texts])


def with_end(ids: Sequence[int], side: Side) -> list[int]:
    """Return the ids of a source with its EOS, unless the side's sources have none."""
    return [*ids, side.eos_id] if getattr(side, "ends_sources", True) else list(ids)


def prefix_ids(text: str, side: Side) -> tuple[int, ...]:
    """Return the ids of the beginning of a translation. White space at its end only ends a word: it is no piece."""
    return tuple(side.encode(text.rstrip()))


def check_texts(texts: Sequence[str], what: str = "text") -> None:
    """Raises: RequestError: it is no list, or a text is not a string. what: messages call a text so."""
    # Any kind of sequence will do; a generator would be empty after this check, and a set has no order.
    is_list = hasattr(texts, "__len__") and hasattr(texts, "__getitem__") and not isinstance(texts, bytes | Mapping)
    if not is_list:
        raise RequestError(f"a {type(texts).__name__} was given; give one {what}, a string, or a list of {what}s.")
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise RequestError(f"{what} {number} is a {type(text).__name__}; {what}s are strings.")
