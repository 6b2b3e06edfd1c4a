"""Subtitles: the text of each cue in SubRip (.srt) and WebVTT (.vtt) files. Numbers, times and notes are copied."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

from manyheads.documents.parts import Document, Part, Segment, Tag, Text, line_end_of, plain, tile

__all__ = ["read_subtitles"]

TIMES = re.compile(r"\ufeff?[ \t]*(?:\d+:)?\d{1,2}:\d{2}[,.]\d{1,3}[ \t]*-->[ \t]*(?:\d+:)?\d{1,2}:\d{2}[,.]\d{1,3}")
LINE = re.compile(r"([^\r\n]*)(\r\n|\r|\n|\Z)")
TAG = re.compile(r"<(/?)([a-zA-Z]*)[^<>]*>|\{\\[^{}]*\}|\\[Nnh]")
MOST_JOINED = 4  # cues that are translated together
_Cue = list[tuple[int, int]]  # the places of its lines
DIALOGUE = re.compile(r"[-–—]\s*\S")


def read_subtitles(text: str, *, entities: bool) -> Document:
    """Return a segment for each cue. The lines of a cue are one text; several that begin with dashes begin one each.

    If a sentence continues in the next cue, both cues are one segment. It does if the first cue has no markup and no
    punctuation at its end, and the next one begins with a lower-case letter.

    Args: entities: `&amp;` and the like stand for characters, as in WebVTT.
    """
    cues: list[_Cue] = []
    lines: _Cue | None = None  # of the cue that is being read
    for line in LINE.finditer(text):
        if TIMES.match(line[0]):
            if lines:  # no empty line ended the last cue
                cues.append(_without_number(text, lines))
            lines = []
        elif lines is not None and line[1].strip():
            lines.append(line.span(1))
        elif lines is not None:
            cues.append(lines)
            lines = None
    segments: list[Segment] = []
    for group in _groups(text, [cue for cue in cues if cue]):
        if len(group) == 1:
            segments += _segments(text, group[0], entities=entities)
        else:
            segments.append(_joined(text, group, entities=entities))
    return Document(text, tuple(segments))


def _without_number(text: str, cue: _Cue) -> _Cue:
    """Return a cue without a last line that is the number of the next one."""
    low, high = cue[-1]
    return cue[:-1] if text[low:high].strip().isdecimal() else cue


def _words(text: str) -> list[str]:
    """Return the words between spaces and line ends; a no-break space is part of a word."""
    return [word for word in re.split(r"[ \t\r\n]+", text) if word]


def _groups(text: str, cues: Sequence[_Cue]) -> list[list[_Cue]]:
    groups: list[list[_Cue]] = []
    for cue in cues:
        if groups and len(groups[-1]) < MOST_JOINED and _goes_on(_shown(text, groups[-1][-1]), _shown(text, cue)):
            groups[-1].append(cue)
        else:
            groups.append([cue])
    return groups


def _shown(text: str, cue: _Cue) -> str:
    return " ".join(text[start:end].strip() for start, end in cue)


def _goes_on(one: str, other: str) -> bool:
    """Whether a sentence continues from one cue to the next."""
    is_plain = not any(TAG.search(cue) or DIALOGUE.match(cue) for cue in (one, other))
    return is_plain and (one[-1:].isalnum() or one[-1:] == ",") and other[:1].islower()


def _joined(text: str, cues: Sequence[_Cue], *, entities: bool) -> Segment:
    """Return several cues as one segment, with their times in between."""
    start, end = cues[0][0][0], cues[-1][-1][1]
    joined = " ".join(_shown(text, cue) for cue in cues)
    between = [text[one[-1][1] : other[0][0]] for one, other in pairwise(cues)]
    shares = [len(_shown(text, cue)) for cue in cues]
    build = partial(
        _build_joined,
        num_lines=[len(cue) for cue in cues],
        shares=shares,
        between=between,
        line_end=line_end_of(text),
        entities=entities,
    )
    return Segment(start, end, (Text(html.unescape(joined) if entities else joined),), build)


def _build_joined(
    parts: Sequence[Part],
    *,
    num_lines: Sequence[int],
    shares: Sequence[int],
    between: Sequence[str],
    line_end: str,
    entities: bool,
) -> str | None:
    """Divide a translation among its cues in proportion to their source, at nearby punctuation if there is some.

    Returns: None if there are fewer words than cues.
    """
    words = _words(plain(parts))
    if len(words) < len(shares):
        return None
    ends = list(accumulate(len(word) + 1 for word in words))
    cuts = [0]
    for number, share in enumerate(accumulate(shares[:-1]), 1):
        ideal = ends[-1] * share / sum(shares)
        possible = range(cuts[-1] + 1, len(words) - (len(shares) - number) + 1)

        def cost(count: int, ideal: float = ideal) -> float:
            return abs(ends[count - 1] - ideal) - (ends[-1] / 10 if not words[count - 1][-1].isalnum() else 0)

        cuts.append(min(possible, key=cost))
    pieces = [" ".join(words[low:high]) for low, high in pairwise([*cuts, len(words)])]
    built = [
        _build([Text(piece)], num_lines=count, line_end=line_end, entities=entities)
        for piece, count in zip(pieces, num_lines, strict=True)
    ]
    return "".join(piece + after for piece, after in zip(built, [*between, ""], strict=True))


def _segments(text: str, lines: Sequence[tuple[int, int]], *, entities: bool) -> list[Segment]:
    turns = [place for place, (start, end) in enumerate(lines) if DIALOGUE.match(TAG.sub("", text[start:end]))]
    if len(turns) > 1 and turns[0] == 0:
        each = [lines[first:last] for first, last in pairwise([*turns, len(lines)])]
        return [one for turn in each for one in _segments(text, turn, entities=entities)]
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
    build = partial(_build, num_lines=len(lines), line_end=line_end_of(text), entities=entities)
    return [Segment(start, end, tile(text[start:end], ranges), build)]


def _build(parts: Sequence[Part], *, num_lines: int, line_end: str, entities: bool) -> str:
    """Return the cue, on as many lines as before, of about equal length."""
    glue = "\0"
    text = "".join(
        (html.escape(part.text, quote=False) if entities else part.text)
        if isinstance(part, Text)
        else (html.escape(part.code, quote=False) if entities and part.is_text else part.code).replace(" ", glue)
        for part in parts
    )
    words = _words(text)
    width = len(re.sub(TAG, "", text)) / num_lines
    lines: list[list[str]] = [[]]
    for index, word in enumerate(words):
        length = len(re.sub(TAG, "", " ".join(lines[-1])))
        is_full = lines[-1] and length + len(re.sub(TAG, "", word)) / 2 >= width
        if lines[-1] and len(lines) < num_lines and (is_full or len(words) - index <= num_lines - len(lines)):
            lines.append([])
        lines[-1].append(word)
    return line_end.join(" ".join(line) for line in lines).replace(glue, " ")
