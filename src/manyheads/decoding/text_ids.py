"""Texts to ids, with a check of their type."""

from __future__ import annotations

from collections.abc import Sequence

from manyheads.errors import RequestError
from manyheads.text.sides import Side

__all__ = ["check_texts", "encode_texts"]


def encode_texts(texts: Sequence[str], side: Side) -> list[list[int]]:
    """Return the ids of each text. Raises: RequestError: a text is not a string."""
    check_texts(texts)
    return side.encode_batch(list(texts))


def check_texts(texts: Sequence[str]) -> None:
    """Raises: RequestError: a text is not a string."""
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise RequestError(f"text {number} is a {type(text).__name__}; texts are strings.")
