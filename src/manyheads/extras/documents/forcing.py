"""Terminology in single sentences: if a translation lacks a term, the search is repeated with the terms forced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manyheads.decoding.degenerate import is_degenerate
from manyheads.decoding.kept_texts import translate_with_phrases
from manyheads.decoding.translator import Translator
from manyheads.extras.documents.terms import Terms, contains

__all__ = ["TermCounts", "force_terms"]


@dataclass
class TermCounts:
    """wanted: terms in the sources. met: terms whose target is in the translation. forced: sentences searched again."""

    wanted: int = 0
    met: int = 0
    forced: int = 0

    def describe(self) -> str:
        """Return a line for users."""
        again = f", {self.forced:,} lines searched again" if self.forced else ""
        return f"terms in the translation: {self.met:,} of {self.wanted:,}{again}"


def force_terms(
    translator: Translator,
    terms: Terms,
    sources: Sequence[str],
    translations: Sequence[str],
    counts: TermCounts,
    **overrides: Any,
) -> list[str]:
    """Return the translations. A translation that lacks a term is replaced by that of a search that forces the term.

    Args:
        sources: sentences; empty ones have no terms.
        translations: of the sources, in order.
        counts: to be increased.
        overrides: fields of `DecodingSettings`; sampling is not possible.

    Raises: as `Translator.translate`.
    """
    texts = list(translations)
    found = [terms.of(source) for source in sources]
    lacking = [
        place for place, each in enumerate(found) if not all(contains(texts[place], term.target) for term in each)
    ]
    if lacking:
        wanted = [[term.target for term in found[place]] for place in lacking]
        forced = translate_with_phrases(translator, [sources[place] for place in lacking], wanted, **overrides)
        for place, text in zip(lacking, forced, strict=True):
            if not is_degenerate(sources[place], text) or is_degenerate(sources[place], texts[place]):
                texts[place] = text
    counts.forced += len(lacking)
    counts.wanted += sum(map(len, found))
    counts.met += sum(contains(text, term.target) for text, each in zip(texts, found, strict=True) for term in each)
    return texts
