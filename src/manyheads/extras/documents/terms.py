"""Terminology: words of the source that must be translated in a given way, and the search that forces them."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.data.lines import read_lines
from manyheads.decoding.inputs_and_results import is_degenerate
from manyheads.errors import DataError
from manyheads.text.words import begins, hide, stands, unhide

if TYPE_CHECKING:
    from manyheads.decoding.translator import Translator


@dataclass(frozen=True, slots=True)
class Term:
    """A source word or phrase and its translation."""

    source: str
    target: str


class Terms:
    """Terms, found as whole words in upper or lower case. If two terms overlap, the longer one counts.

    A term of a script without spaces is found at any place.

    Args: terms: none of their texts is empty.
    """

    def __init__(self, terms: Sequence[Term] = ()) -> None:
        terms = [Term(_composed(term.source), _composed(term.target)) for term in terms]
        self._by_source = {term.source.casefold(): term for term in terms}
        # Both spellings: without regard to case `ß` matches `ẞ`, but not `ss`.
        self._spellings = dict.fromkeys(
            (folded, one) for term in terms for folded in [term.source.casefold()] for one in (term.source, folded)
        )

    @classmethod
    def read(cls, path: str | Path) -> Terms:
        """Read a file of lines `source<TAB>target`; empty lines and lines that begin with # are left out.

        Raises: DataError: the file cannot be read, a line does not have two columns, or a source has two targets.
        """
        terms: list[Term] = []
        targets: dict[str, str] = {}
        for number, line in enumerate(read_lines(path), 1):
            if not line.strip() or line.startswith("#"):
                continue
            columns = [column.strip() for column in line.split("\t")]
            if len(columns) != 2 or not all(columns):
                raise DataError(
                    f"{path}: line {number} has {len(columns)} column{'s' * (len(columns) != 1)}; a term is"
                    " source<TAB>target, and neither of them is empty."
                )
            term = Term(*columns)
            known = targets.setdefault(term.source.casefold(), term.target)
            if known != term.target:
                raise DataError(
                    f"{path}: line {number} gives {term.source!r} the target {term.target!r}, but an earlier line gives"
                    f" it {known!r}; keep one of the two lines."
                )
            terms.append(term)
        if not terms:
            raise DataError(f"{path} has no terms; each line is source<TAB>target.")
        return cls(terms)

    def __iter__(self) -> Iterator[Term]:
        return iter(self._by_source.values())

    def __len__(self) -> int:
        return len(self._by_source)

    def of(self, text: str) -> list[Term]:
        """Return the terms that occur in a text, each once."""
        text = _composed(text)
        whole = text.casefold()
        # A pattern is compiled for those that can occur: one of thousands of terms takes long at each place of a text.
        near = dict.fromkeys(spelling for folded, spelling in self._spellings if folded in whole)
        # A term is looked for at each place, because a longer one may begin within a shorter one.
        found = {match.span(1) for spelling in near for match in _pattern(spelling).finditer(text)}
        taken: list[tuple[int, int]] = []
        for span in sorted(found, key=lambda span: (span[0] - span[1], span)):
            place = bisect(taken, span)
            before, after = taken[place - 1 : place], taken[place : place + 1]
            if all(end <= span[0] for _, end in before) and all(span[1] <= start for start, _ in after):
                taken.insert(place, span)
        terms = [self._by_source.get(text[start:end].casefold()) for start, end in taken]
        return list(dict.fromkeys(term for term in terms if term is not None))

    def lacking(self, text: str, translation: str) -> list[str]:
        """Return the targets of all terms of a text if its translation lacks one of them; otherwise nothing."""
        targets = [term.target for term in self.of(text)]
        return [] if all(contains(translation, target) for target in targets) else targets


@lru_cache(maxsize=1 << 14)
def _pattern(spelling: str) -> re.Pattern[str]:
    return re.compile(f"(?=({stands(spelling, any_case=True)}))")


def contains(text: str, phrase: str) -> bool:
    """Whether a text contains a phrase, whatever its case; a word of several letters may be inflected at its end."""
    pattern = stands if len(phrase) == 1 else begins
    return re.search(pattern(_composed(phrase), any_case=True), _composed(text)) is not None


def _composed(text: str) -> str:
    """Return a text in NFC, as tokenizers do: a letter and its accent can be two characters in a file."""
    return unicodedata.normalize("NFC", text)


class ForcedTerms:
    """Terms that are forced in the translations of lines, and their counts."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._wanted = self._met = self._searched_again = 0

    def __iter__(self) -> Iterator[Term]:
        return iter(self._terms)

    def force(
        self, translator: Translator, sources: Sequence[str], translations: Sequence[str], **overrides: Any
    ) -> list[str]:
        """Return the translations. One that lacks a term is replaced by that of a search that forces the term.

        Args:
            sources: sentences; empty ones have no terms.
            translations: of the sources, in order.
            overrides: fields of `DecodingSettings`; sampling is not possible.

        Raises: as `Translator.translate`.
        """
        texts = list(translations)
        found = [self._terms.of(source) for source in sources]
        lacking = [
            place for place, each in enumerate(found) if not all(contains(texts[place], term.target) for term in each)
        ]
        if lacking:
            wanted = [[term.target for term in found[place]] for place in lacking]
            forced = translate_with_phrases(translator, [sources[place] for place in lacking], wanted, **overrides)
            for place, text in zip(lacking, forced, strict=True):
                if not is_degenerate(sources[place], text) or is_degenerate(sources[place], texts[place]):
                    texts[place] = text
        self._searched_again += len(lacking)
        self._wanted += sum(map(len, found))
        self._met += sum(contains(text, term.target) for text, each in zip(texts, found, strict=True) for term in each)
        return texts

    def describe(self) -> str:
        """Return a line for users."""
        again = f", {self._searched_again:,} lines searched again" if self._searched_again else ""
        return f"terms in the translation: {self._met:,} of {self._wanted:,}{again}"


def translate_with_phrases(
    translator: Translator, texts: Sequence[str], phrases: Sequence[Sequence[str]], **overrides: Any
) -> list[str]:
    """Translate texts so that each translation contains its phrases, and the words that are kept.

    Args: see `forced.translate_forced`.

    Raises: as `Translator.translate`.
    """
    from manyheads.decoding.kept_texts import restored, show
    from manyheads.extras.constrained.forced import translate_forced  # these import torch

    settings = translator.options(**{**overrides, "do_sample": False, "num_return_sequences": 1})
    hidden = [hide(text) if settings.keep_words else (text, []) for text in texts]
    shown = [show(text, translator.stand_ins() if words else (), whole=True) for text, words in hidden]
    wanted = [[*each, *one.names] for each, one in zip(phrases, shown, strict=True)]
    found = translate_forced(translator.runner, translator.tokenizer, [one.text for one in shown], wanted, settings)
    return [
        unhide(" ".join(filter(None, restored(one, forced.text))), words)
        for one, forced, (_, words) in zip(shown, found, hidden, strict=True)
    ]
