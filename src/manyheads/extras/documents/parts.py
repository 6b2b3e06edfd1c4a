"""The parts of a document: segments, which are translated, and everything else, which is copied.

The reader of a format (one file each) only finds the segments. A segment is a range of the file's characters, with the
text and markup in it. `Document.with_translations` replaces these ranges. So everything outside them stays the same,
byte for byte, whatever the format.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from manyheads.text.words import PRIVATE

GLUE = chr(PRIVATE + 0xFFF0)  # a space at which no line is broken


LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class Text:
    """Text to be translated, without the format's escapes."""

    text: str


@dataclass(frozen=True, slots=True)
class Tag:
    """Markup, or a word that is kept.

    Args:
        code: its characters.
        kind: `open` and `close` enclose text; `alone` marks a position; `word` takes the place of a word in its
            sentence, for example code, an image, a URL.
        pair: the same number for the two tags of a pair.
        is_text: code is text without the format's escapes; otherwise it is written as it is.
        is_loose: a word that is no part of the grammar; see `text.words.is_loose`.
    """

    code: str
    kind: Literal["open", "close", "alone", "word"]
    pair: int = -1
    is_text: bool = False
    is_loose: bool = False


Part = Text | Tag


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a document that is translated as a whole: a paragraph, a heading, a cell, a subtitle.

    Args:
        start, end: its place in the document, in characters.
        parts: its text and markup, in order.
        build: the parts of the translation -> the characters for the document; None if they would change the
            document's structure.
    """

    start: int
    end: int
    parts: tuple[Part, ...]
    build: Callable[[Sequence[Part]], str | None]


@dataclass(frozen=True)
class Document:
    """A text and its segments, which are in order and do not overlap.

    Args:
        left: places of text that the reader does not support and does not translate.
        notes: what else people should know.
        outside: places of text that stands where the format has none; it is not translated.
    """

    text: str
    segments: tuple[Segment, ...]
    left: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    outside: tuple[int, ...] = ()

    def with_translations(self, translations: Sequence[Sequence[Part] | None]) -> tuple[str, list[int]]:
        """Return the document with the translation of each segment; None keeps a segment as it is.

        Returns: the text, and the indices of segments that are kept because their translation does not fit into the
            document's structure.
        """
        pieces, kept, done = [], [], 0
        for index, (segment, parts) in enumerate(zip(self.segments, translations, strict=True)):
            if parts is None or tuple(parts) == segment.parts:
                continue
            built = segment.build(parts)
            if built is None:
                kept.append(index)
                continue
            pieces += [self.text[done : segment.start], built]
            done = segment.end
        return "".join([*pieces, self.text[done:]]), kept

    def line_of(self, segment: Segment) -> int:
        """Return the number of the line on which a segment begins, from 1."""
        return self.line_at(segment.start)

    def line_at(self, place: int) -> int:
        """Return the number of the line of a character, from 1."""
        return bisect_left(self._line_ends, place) + 1

    @cached_property
    def _line_ends(self) -> list[int]:
        return [found.start() for found in re.finditer("\n", self.text)]


def plain(parts: Sequence[Part]) -> str:
    """Return the characters of text and tags, one after the other."""
    return "".join(part.text if isinstance(part, Text) else part.code for part in parts)


def line_end_of(text: str) -> str:
    """Return the line end of the first line of a text; a line feed if there is only one line."""
    found = LINE_END.search(text)
    return found[0] if found else "\n"


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a range of a text without the white space at both of its ends."""
    shown = text[start:end]
    return start + len(shown) - len(shown.lstrip()), start + len(shown.rstrip())


def tile(text: str, tags: Sequence[tuple[int, int, Tag | str]]) -> tuple[Part, ...]:
    """Return the parts of a text; some ranges of it, in order, are tags or stand for other characters."""
    parts: list[Part] = []
    plain: list[str] = []
    done = 0

    def flush() -> None:
        if joined := "".join(plain):
            parts.append(Text(joined))
        plain.clear()

    for start, end, tag in tags:
        plain.append(text[done:start])
        if isinstance(tag, str):
            plain.append(tag)
        else:
            flush()
            parts.append(tag)
        done = end
    plain.append(text[done:])
    flush()
    return tuple(parts)


def lay_out(
    parts: Sequence[Part],
    escape: Callable[[str], str],
    lines: Sequence[str],
    line_end: str,
    *,
    prefix_characters: str = " \t>",
) -> str:
    """Return the characters of a translation, on about as many lines as its source.

    Args:
        parts: of the translation.
        escape: text -> the format's characters.
        lines: the lines of the source, of which the first begins where the segment begins; the others with what stands
            before their text (an indent, a `>`). With a single line, the translation gets a single line.
        line_end: what ends a line.
        prefix_characters: what can stand before the text of a line.
    """
    glued = [_characters(part, escape) for part in parts]
    words = "".join(glued).split(" ")
    if len(lines) == 1:
        return " ".join(words).replace(GLUE, " ")
    width = max(len(line) for line in lines)
    prefix = lines[1][: len(lines[1]) - len(lines[1].lstrip(prefix_characters))]
    written = [[words[0]]]
    length = len(LINE_END.split(words[0])[-1])
    for word in words[1:]:
        head, *more = LINE_END.split(word)  # markup can go over lines itself
        if length + 1 + len(head) > width and not _begins_block(word):
            written.append([prefix + word])
            length = len(prefix) - 1
        else:
            written[-1].append(word)
        length = len(more[-1]) if more else length + 1 + len(head)
    return line_end.join(" ".join(line) for line in written).replace(GLUE, " ")


def _characters(part: Part, escape: Callable[[str], str]) -> str:
    if isinstance(part, Text):
        return escape(part.text)
    return (escape(part.code) if part.is_text else part.code).replace(" ", GLUE)


def _begins_block(word: str) -> bool:
    """Whether a line that begins with this word might be more than text to Markdown."""
    return not word or word[0] in "-+*#>=|:~`<[!$" or word.rstrip(".)").isdigit()
