"""Splitting a text into sentences, and rejoining their translations with what stood between them."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.text.sentences import split_sentences

__all__ = ["Sentence", "rejoin", "split"]


@dataclass(frozen=True)
class Sentence:
    """A sentence of a text.

    Args: text: without white space around it. start: its place in the text, in characters.
    """

    text: str
    start: int

    @property
    def end(self) -> int:
        """The place after it."""
        return self.start + len(self.text)


def split(
    text: str, language: str | None = None, *, at_sentence_ends: bool = True, at_line_ends: bool = True
) -> list[Sentence]:
    """Return the sentences of a text in order, separated where it is asked; a text can be one sentence.

    Words are never cut; white space outside sentences belongs to none, so `rejoin` restores it.

    Args: language: of the text, as in BCP 47; None: unknown.
    """
    found = []
    start = 0
    for line in text.splitlines(keepends=True) if at_line_ends else [text]:
        for piece in split_sentences(line, language) if at_sentence_ends else [line]:
            if piece.strip():
                found.append(Sentence(piece.strip(), start + len(piece) - len(piece.lstrip())))
            start += len(piece)
    return found


def rejoin(text: str, sentences: list[Sentence], translations: list[str]) -> str:
    """Return the text with each sentence replaced by its translation, and the white space between them as it was."""
    parts, place = [], 0
    for sentence, translation in zip(sentences, translations, strict=True):
        parts += [text[place : sentence.start], translation]
        place = sentence.end
    return "".join([*parts, text[place:]])
