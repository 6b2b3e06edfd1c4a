"""Splitting a text into sentences, and rejoining their translations with what stood between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from manyheads.text.abbreviations import stands_before_number

__all__ = ["Sentence", "in_windows", "rejoin", "split"]

_WINDOW = 1 << 15

# The end of a sentence: marks, closing quotes and brackets, then white space; or marks of scripts without spaces. A run
# of marks is looked at once, because texts come from clients.
_END = re.compile(r"""(?:(?<![.!?…‽؟।])[.!?…‽؟।]++["'”’»)\]]*+(?=\s))|(?:[。！？]+["'”’」』）]*)""")
_NEXT_WORD = re.compile(r"\S.{0,39}", re.DOTALL)
_INITIALS = re.compile(r"[A-Z](?:\.[A-Z])+")  # of U.S. and D.C., which rarely end a sentence
_LAST_WORD = re.compile(r"([^\W\d_]+(?:\.[^\W\d_]+)*|\d+)\.$")
_YEAR_DIGITS = 4
# Words whose full stop does not end a sentence. A number and a full stop is an ordinal in many languages, not a year.
_ABBREVIATIONS = frozenset(
    """mr mrs ms dr prof st mt sr jr no vs etc e.g i.e cf fig vol pp approx dept inc ltd co
    hr fr nr bzw z.b d.h u.a usw ca evtl ggf inkl str tel abb bd jh m mme mlle sra srta""".split()  # noqa: SIM905
)


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
    *,
    at_sentence_ends: bool = True,
    at_line_ends: bool = True,
    check: Callable[[int], None] = lambda _: None,
) -> list[Sentence]:
    """Return the sentences of a text in order, separated where it is asked; a text can be one sentence.

    Words are never cut; white space outside sentences belongs to none, so `rejoin` restores it.

    Args: check: called with the number of sentences so far; it may raise an error to end the work.
    """
    found: list[Sentence] = []
    start = 0
    for line in text.split("\n") if at_line_ends else [text]:
        for part in in_windows(line, _cut) if at_sentence_ends else [line]:
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


def _cut(text: str) -> list[str]:
    return [text[begin:end] for begin, end in pairwise([0, *_ends(text), len(text)])]


def rejoin(text: str, sentences: list[Sentence], translations: list[str]) -> str:
    """Return the text with each sentence replaced by its translation, and the white space between them as it was."""
    parts, place = [], 0
    for sentence, translation in zip(sentences, translations, strict=True):
        parts += [text[place : sentence.start], translation]
        place = sentence.end
    return "".join([*parts, text[place:]])


def _ends(line: str) -> list[int]:
    """Return the places after the sentences of a line, except the last one's."""
    found = []
    for match in _END.finditer(line):
        after = _NEXT_WORD.search(line, match.end())
        if after is None or after[0][0].islower():
            continue
        if match.group() == ".":
            if stands_before_number(line[max(0, match.end() - 40) : match.end()], after[0]):
                continue
            word = _LAST_WORD.search(line, max(0, match.end() - 40), match.end())
            known = word is not None and word.group(1).lower()
            is_ordinal = word is not None and word.group(1).isdigit() and len(word.group(1)) < _YEAR_DIGITS
            if word is not None and (known in _ABBREVIATIONS or is_ordinal or len(word.group(1)) == 1):
                continue
            if word is not None and _INITIALS.fullmatch(word.group(1)):
                continue
        found.append(match.end())
    return found
