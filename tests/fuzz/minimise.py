"""Smaller cases with the same fault, by leaving out parts ("ddmin" of Zeller and Hildebrandt 2002, in short)."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["smaller_bytes", "smaller_list"]

T = TypeVar("T", bound=Sequence)  # type: ignore[type-arg]


def _smaller(content: T, still: Callable[[T], bool], until: float) -> T:
    size = max(1, len(content) // 2)
    while content and time.monotonic() < until:
        place, changed = 0, False
        while place < len(content) and time.monotonic() < until:
            without = content[:place] + content[place + size :]  # type: ignore[operator]
            if still(without):
                content, changed = without, True
            else:
                place += size
        if size == 1 and not changed:
            return content
        size = max(1, size // 2)
    return content


def smaller_bytes(content: bytes, still: Callable[[bytes], bool], until: float) -> bytes:
    """Return a smaller content for which `still` is true. until: of time.monotonic(), when it must end."""
    return _smaller(content, still, until)


def smaller_list(words: list[str], still: Callable[[list[str]], bool], until: float) -> list[str]:
    """The same for a list of words."""
    return _smaller(words, still, until)
