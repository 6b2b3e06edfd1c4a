"""Splitting a text into sentences, and rejoining their translations with what stood between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from manyheads.extras.documents.sentence_ends import split_sentences

__all__ = ["Sentence", "in_windows", "rejoin", "split"]

_WINDOW = 1 << 15


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
    text: str,
    language: str | None = None,
    *,
    at_sentence_ends: bool = True,
    at_line_ends: bool = True,
    check: Callable[[int], None] = lambda _: None,
) -> list[Sentence]:
    """Return the sentences of a text in order, separated where it is asked; a text can be one sentence.

    Words are never cut; white space outside sentences belongs to none, so `rejoin` restores it.

    Args:
        language: of the text, as in BCP 47; None: unknown.
        check: called with the number of sentences so far; it may raise an error to end the work.
    """
    found: list[Sentence] = []
    start = 0
    for line in text.split("\n") if at_line_ends else [text]:
        for part in in_windows(line, partial(split_sentences, language=language)) if at_sentence_ends else [line]:
            check(len(found))
            if part.strip():
                found.append(Sentence(part.strip(), start + len(part) - len(part.lstrip())))
            start += len(part)
        start += 1
    return found


def in_windows(text: str, cut: Callable[[str], list[str]]) -> Iterator[str]:
    """Yield the sentences of a text, of which `cut` sees at most _WINDOW characters in a call.

    So no call keeps the interpreter's lock for long. Only a sentence of more characters is cut elsewhere.

    Args: cut: a text -> its sentences, which together are the text.
    """
    start = 0
    while start < len(text):
        end = start + _WINDOW
        found = cut(text[start:end])
        if len(found) > 1 and end < len(text):
            found.pop()  # the next call sees the whole of it
        yield from found
        start += sum(map(len, found))


def rejoin(text: str, sentences: list[Sentence], translations: list[str]) -> str:
    """Return the text with each sentence replaced by its translation, and the white space between them as it was."""
    parts, place = [], 0
    for sentence, translation in zip(sentences, translations, strict=True):
        parts += [text[place : sentence.start], translation]
        place = sentence.end
    return "".join([*parts, text[place:]])
