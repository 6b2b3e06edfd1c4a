"""Pairs and texts from objects in memory: lists, generators, data sets of torch or of the package `datasets`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from manyheads.data.lines import OnBadUtf8, ReadReport
from manyheads.data.translation.readers import mended, nested_value, preview
from manyheads.errors import DataError

_SIDES = ("source", "target")
_TEXT = "text"


class Items:
    """The items of an object, which is read once.

    Args: given: an iterable, or an object with a length and numbered items. name: for messages.

    Raises: DataError: it is no such object, is one text, or has no items.
    """

    def __init__(self, given: Any, name: str) -> None:
        is_numbered = hasattr(given, "__getitem__") and hasattr(given, "__len__") and not hasattr(given, "__iter__")
        if isinstance(given, str | bytes | Mapping) or not (is_numbered or isinstance(given, Iterable)):
            raise DataError(
                f"{name} is {preview(str(given))}, a {type(given).__name__}; give an iterable of texts, or of pairs of"
                " texts."
            )
        self.name = name
        self._num = len(given) if hasattr(given, "__len__") else None
        items = iter(given) if not is_numbered else (given[place] for place in range(len(given)))
        self.first = next(items, None)
        if self.first is None:
            raise DataError(f"{name} has no items; give texts, or pairs of texts.")
        self._items = chain([self.first], items)

    @property
    def has_pairs(self) -> bool:
        """Whether the first item is a pair of texts."""
        keys = self.first if isinstance(self.first, Mapping) else ()
        return isinstance(self.first, tuple | list) or "translation" in keys or set(_SIDES) <= set(keys)

    def __iter__(self) -> Iterator[tuple[Any, str]]:
        """Yield each item, and what messages call it. Raises: DataError: there are fewer than the object's length."""
        number = 0
        for number, item in enumerate(self._items, 1):
            yield item, f"{self.name}: item {number:,}"
        if self._num is not None and number < self._num:
            raise DataError(f"{self.name} has ended after {number:,} of its {self._num:,} items.")

    def describe(self) -> str:
        """See `data.translation.preparing.Pairs`."""
        return self.name


def _checked(value: Any, where: str, expected: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where} is {preview(str(value))}, a {type(value).__name__}; give {expected}.")
    return str(value)


@dataclass(frozen=True)
class ItemPairs:
    """Pairs of texts: (source, target), or records with keys.

    Args: keys: of both sides; None: `source` and `target`, or those of the languages in `translation`.
    """

    items: Items
    keys: tuple[str | None, str | None] = (None, None)
    languages: tuple[str | None, str | None] = (None, None)
    on_bad_utf8: OnBadUtf8 = "fail"

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
        """Yield them as lines. Raises: DataError: an item is no pair of texts."""
        report = report or ReadReport()
        for item, where in self.items:
            report.lines += 1
            pair = mended(self._sides(item, where), where, self.on_bad_utf8, report)
            if pair is None:
                report.bad_utf8_skipped += 1
            else:
                yield pair

    def _sides(self, item: Any, where: str) -> list[str]:
        if isinstance(item, Mapping):
            inside = "translation" in item and all(self.languages)
            usual = [f"translation.{one}" for one in self.languages] if inside else _SIDES
            return [nested_value(item, key or other, where) for key, other in zip(self.keys, usual, strict=True)]
        if not isinstance(item, tuple | list) or len(item) != len(_SIDES):
            raise DataError(f"{where} is {preview(str(item))}, no pair; give pairs of texts, (source, target).")
        return [_checked(side, f"{where}, {name}", "a text") for side, name in zip(item, _SIDES, strict=True)]

    def describe(self) -> str:
        """See `data.translation.preparing.Pairs`."""
        return self.items.name


@dataclass(frozen=True)
class ItemTexts:
    """Texts, or records with a `text`; each ends with a line break. apart: each is a document, as a file is."""

    items: Items
    on_bad_utf8: OnBadUtf8 = "fail"
    apart: bool = False

    def read(self, *, as_bytes: bool, report: ReadReport | None = None) -> Iterator[tuple[bytes, bool]]:
        """See `data.language.texts.Text`. Raises: DataError: an item is no text."""
        report = report or ReadReport()
        for item, where in self.items:
            text = nested_value(item, _TEXT, where) if isinstance(item, Mapping) else _checked(item, where, "a text")
            try:
                content = text.encode()
            except UnicodeEncodeError:
                if mended([text, ""], where, self.on_bad_utf8, report) is None:
                    report.bad_utf8_skipped += 1
                    continue
                content = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
            yield content + b"\n" * (not content.endswith(b"\n")), self.apart
        if not self.apart:
            yield b"", True

    def describe(self) -> str:
        """See `data.language.texts.Text`."""
        return self.items.name
