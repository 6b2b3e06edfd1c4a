"""Terminology: words of the source that must be translated in a given way."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyheads.data.lines import read_lines
from manyheads.errors import DataError

__all__ = ["Term", "Terms", "contains"]


@dataclass(frozen=True, slots=True)
class Term:
    """A source word or phrase and its translation."""

    source: str
    target: str


class Terms:
    """Terms, found as whole words whatever their case; of two that overlap the longer one counts.

    Args: terms: none of their texts is empty.
    """

    def __init__(self, terms: Sequence[Term] = ()) -> None:
        self._by_source = {term.source.casefold(): term for term in terms}
        alternatives = "|".join(re.escape(one) for one in sorted(self._by_source, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<!\w)(?:{alternatives})(?!\w)", re.IGNORECASE) if terms else None

    @classmethod
    def read(cls, path: str | Path) -> Terms:
        """Read a file of lines `source<TAB>target`; empty lines and lines that begin with # are left out.

        Raises: DataError: the file cannot be read, or a line has not two columns.
        """
        terms = []
        for number, line in enumerate(read_lines(path), 1):
            if not line.strip() or line.startswith("#"):
                continue
            columns = [column.strip() for column in line.split("\t")]
            if len(columns) != 2 or not all(columns):
                raise DataError(
                    f"{path}: line {number} has {len(columns)} column{'s' * (len(columns) != 1)}; a term is"
                    " source<TAB>target, both with text."
                )
            terms.append(Term(*columns))
        if not terms:
            raise DataError(f"{path} has no terms; each line is source<TAB>target.")
        return cls(terms)

    def __iter__(self) -> Iterator[Term]:
        return iter(self._by_source.values())

    def of(self, text: str) -> list[Term]:
        """Return the terms that occur in a text, each once."""
        if self._pattern is None:
            return []
        found = [self._by_source.get(match[0].casefold()) for match in self._pattern.finditer(text)]
        return list(dict.fromkeys(term for term in found if term is not None))


def contains(text: str, phrase: str) -> bool:
    """Whether a text contains a phrase, whatever its case; a word may be inflected at its end."""
    return re.search(rf"(?<!\w){re.escape(phrase)}", text, re.IGNORECASE) is not None
