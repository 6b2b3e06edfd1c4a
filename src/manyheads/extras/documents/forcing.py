"""Terminology in single sentences: if a translation lacks a term, the search is repeated with the terms forced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from manyheads.decoding.degenerate import is_degenerate
from manyheads.extras.documents.terms import Term, Terms, contains
from manyheads.text.kept_words import hide, unhide

if TYPE_CHECKING:
    from manyheads.decoding.translator import Translator

__all__ = ["ForcedTerms", "translate_with_phrases"]


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
    from manyheads.decoding.forced import translate_forced  # these import torch
    from manyheads.decoding.stand_ins import restored, show, stand_ins_of

    settings = translator.options(**{**overrides, "do_sample": False, "num_return_sequences": 1})
    hidden = [hide(text) if settings.keep_words else (text, []) for text in texts]
    shown = [show(text, stand_ins_of(translator) if words else (), whole=True) for text, words in hidden]
    wanted = [[*each, *one.names] for each, one in zip(phrases, shown, strict=True)]
    found = translate_forced(translator, [one.text for one in shown], wanted, settings)
    return [
        unhide(" ".join(filter(None, restored(one, forced.text))), words)
        for one, forced, (_, words) in zip(shown, found, hidden, strict=True)
    ]
