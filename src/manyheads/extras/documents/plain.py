"""Plain text: paragraphs, which empty lines separate. Lines that were wrapped are joined and wrapped again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from manyheads.extras.documents.parts import LINE_END, Document, Part, Segment, Text, lay_out, line_end_of, trimmed

__all__ = ["read_plain"]

PARAGRAPH = re.compile(r"(?<![^\r\n\ufeff])[^\r\n]*\S[^\r\n]*(?:(?:\r\n|\r|\n)[^\r\n]*\S[^\r\n]*)*")
ITEM = re.compile(r"\s*(?:[-*+•]|\d{1,2}[.)])\s")  # of a list


def read_plain(text: str) -> Document:
    """Return the paragraphs of a text.

    The lines of a paragraph are joined if they look wrapped, that is, if at every line end the next word does not fit
    into the width of the paragraph. Otherwise, and if several begin as items of a list, each line is a segment by
    itself, as in a poem.
    """
    segments: list[Segment] = []
    for paragraph in PARAGRAPH.finditer(text, int(text.startswith("\ufeff"))):
        if _is_wrapped(LINE_END.split(paragraph[0])):
            segments.append(_segment(text, *paragraph.span()))
            continue
        start = paragraph.start()
        for line_end in [*LINE_END.finditer(paragraph[0]), None]:
            end = paragraph.end() if line_end is None else paragraph.start() + line_end.start()
            segments.append(_segment(text, start, end))
            start = end if line_end is None else paragraph.start() + line_end.end()
    return Document(text, tuple(segments))


def _is_wrapped(lines: Sequence[str]) -> bool:
    if len(lines) == 1:
        return True
    if sum(ITEM.match(line) is not None for line in lines) > 1:  # one alone can be a date: `12. Mai`
        return False
    width = max(len(line.rstrip()) for line in lines)
    return all(len(line.rstrip()) + 1 + len(after.split()[0]) > width for line, after in pairwise(lines))


def _segment(text: str, start: int, end: int) -> Segment:
    start, end = trimmed(text, start, end)
    shown = text[start:end]
    joined = " ".join(line.strip(" \t") for line in LINE_END.split(shown))
    build: Callable[[Sequence[Part]], str] = partial(
        lay_out, escape=str, lines=LINE_END.split(shown), line_end=line_end_of(shown), prefix_characters=" \t"
    )
    return Segment(start, end, (Text(joined),), build)
