"""Subtitles: the text of each cue in SubRip (.srt) and WebVTT (.vtt) files. Numbers, times and notes are copied."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from functools import partial

from manyheads.documents.parts import Document, Part, Segment, Tag, Text, tile

__all__ = ["read_subtitles"]

TIMES = re.compile(r"\ufeff?[ \t]*(?:\d+:)?\d{1,2}:\d{2}[,.]\d{1,3}[ \t]*-->[ \t]*(?:\d+:)?\d{1,2}:\d{2}[,.]\d{1,3}")
LINE = re.compile(r"([^\r\n]*)(\r\n|\r|\n|\Z)")
TAG = re.compile(r"<(/?)([a-zA-Z]*)[^<>]*>|\{\\[^{}]*\}|\\[Nnh]")
DIALOGUE = re.compile(r"[-–—]\s*\S")


def read_subtitles(text: str, *, entities: bool) -> Document:
    """Return a segment for each cue; the lines of a cue are one text, except that lines with dashes are turns.

    Args: entities: `&amp;` and the like stand for characters, as in WebVTT.
    """
    segments: list[Segment] = []
    cue: list[tuple[int, int]] | None = None  # places of the lines of the cue that is being read
    for line in LINE.finditer(text):
        if TIMES.match(line[0]):
            cue = []
        elif cue is not None and line[1].strip():
            cue.append(line.span(1))
        elif cue is not None:
            segments += _segments(text, cue, entities=entities)
            cue = None
    return Document(text, tuple(segments))


def _segments(text: str, lines: Sequence[tuple[int, int]], *, entities: bool) -> list[Segment]:
    if len(lines) > 1 and all(DIALOGUE.match(TAG.sub("", text[start:end])) for start, end in lines):
        return [one for line in lines for one in _segments(text, [line], entities=entities)]
    if not lines:
        return []
    start, end = lines[0][0], lines[-1][1]
    shown = text[start:end]
    if dash := re.match(r"\s*(?:[-–—]\s*)?", shown):
        start += dash.end()
    end -= len(shown) - len(shown.rstrip())
    if start >= end:
        return []
    ranges: list[tuple[int, int, Tag | str]] = []
    opened: list[tuple[str, int]] = []
    for found in re.finditer(rf"{TAG.pattern}|[ \t]*(?:\r\n|\r|\n)[ \t]*|&#?\w+;", text[start:end]):
        code = found[0]
        if not code.strip():
            ranges.append((*found.span(), " "))
        elif code[0] == "&":
            if entities:
                ranges.append((*found.span(), html.unescape(code)))
        elif code[0] != "<" or not found[2]:
            ranges.append((*found.span(), Tag(code, "alone")))
        elif not found[1]:
            opened.append((found[2], len(ranges)))
            ranges.append((*found.span(), Tag(code, "alone")))
        else:
            match = next((one for one in reversed(opened) if one[0] == found[2]), None)
            if match is None:
                ranges.append((*found.span(), Tag(code, "alone")))
                continue
            del opened[opened.index(match) :]
            low, high, tag = ranges[match[1]]
            assert isinstance(tag, Tag)
            ranges[match[1]] = (low, high, Tag(tag.code, "open", match[1]))
            ranges.append((*found.span(), Tag(code, "close", match[1])))
    line_end = next((one[2] for one in LINE.finditer(text) if one[2]), "\n")
    build = partial(_build, num_lines=len(lines), line_end=line_end, entities=entities)
    return [Segment(start, end, tile(text[start:end], ranges), build)]


def _build(parts: Sequence[Part], *, num_lines: int, line_end: str, entities: bool) -> str:
    """Return the cue, on as many lines as before, of about equal length."""
    glue = "\0"
    text = "".join(
        (html.escape(part.text, quote=False) if entities else part.text)
        if isinstance(part, Text)
        else part.code.replace(" ", glue)
        for part in parts
    )
    words = text.split()
    width = len(re.sub(TAG, "", text)) / num_lines
    lines: list[list[str]] = [[]]
    for index, word in enumerate(words):
        length = len(re.sub(TAG, "", " ".join(lines[-1])))
        is_full = lines[-1] and length + len(re.sub(TAG, "", word)) / 2 >= width
        if lines[-1] and len(lines) < num_lines and (is_full or len(words) - index <= num_lines - len(lines)):
            lines.append([])
        lines[-1].append(word)
    return line_end.join(" ".join(line) for line in lines).replace(glue, " ")
