"""Sentences to ids, with a check of their type."""

from __future__ import annotations

import re
from collections.abc import Sequence

from manyheads.errors import RequestError
from manyheads.text.sides import Side

__all__ = ["check_texts", "encode_texts"]

_LINE_BREAKS = re.compile(r"[\r\n]+")


def encode_texts(texts: Sequence[str], side: Side) -> list[list[int]]:
    """Return the ids of each text, which is one sentence.

    A line break inside it becomes a space; line breaks at its ends are removed, because models of sentences were not
    trained on line breaks.

    Raises: RequestError: a text is not a string.
    """
    check_texts(texts)
    return side.encode_batch([" ".join(filter(None, _LINE_BREAKS.split(text))) for text in texts])


def check_texts(texts: Sequence[str]) -> None:
    """Raises: RequestError: a text is not a string."""
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise RequestError(f"text {number} is a {type(text).__name__}; texts are strings.")
