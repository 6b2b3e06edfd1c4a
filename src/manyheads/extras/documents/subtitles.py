"""Subtitles: the texts of the cues in SubRip (.srt) and WebVTT (.vtt) files, which may break the format's rules.

A cue has the text between its line of times and the next one, whatever empty lines are in it. Numbers, times, settings,
notes and marks such as dashes, brackets and labels of speakers are copied.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from manyheads.errors import DataError
from manyheads.extras.documents.parts import Document, Part, Segment, Tag, Text, line_end_of, plain, tile, trimmed

_MORE = r"[ \t]?[:.,;][ \t]?\d{1,6}"
_TIME = rf"-?\d{{1,4}}(?:{_MORE}){{1,4}}(?![^\W_])"
_CLOCK = rf"-?\d{{1,4}}[ \t]?:[ \t]?\d{{1,2}}(?:{_MORE}){{0,3}}"
_ARROW = r"[ \t]*(?:-[ \t]?-[ \t]?>|[-–—−=~]{1,3}>|[→⇒])[ \t]*"
# Wherever an arrow points from a time to a number; at a line's beginning, without the second time or with another sign.
TIMES = re.compile(
    rf"(?<![\w.,:;]){_CLOCK}{_ARROW}-?\d"
    rf"|^[\ufeff \t]*{_TIME}(?:{_ARROW}(?:{_TIME}|$)|[ \t]*[-–—−]{{1,3}}[ \t]*{_TIME}[ \t]*$)"
)
# It neither begins a cue nor is text.
TIME_ALONE = re.compile(r"[\ufeff \t]*\d{1,3}:\d{1,2}:\d{1,2}[.,]\d{1,3}[\W\d]*")
SETTINGS = re.compile(r"[\s\ufeff\d:;.,→⇒<=>~–—−-]*+(?:[\w-]++:[^ \t]++[ \t]*+)*+")  # a line of times has nothing else
FOLLOWING = re.compile(r"[ \t]*+[\r\n]\s*+([^\r\n]{0,200})")  # the next line that is not empty
NUMBER = re.compile(r"[\ufeff \t]*#?\d+[.:]?[ \t]*")
COMMENT = re.compile(r"(?:NOTE|STYLE|REGION)(?:[ \t].*)?")  # the first line of a block of WebVTT that is no cue
WORD = re.compile(r"[^\W_]")
SPOKEN = re.compile(r"[^ \t]+[ \t].*[.!?…][\"'”»]?[ \t]*")  # is no identifier of a cue
LINE = re.compile(r"([^\r\n]*)(?:\r\n|\r|\n|\Z)")
TAG = re.compile(r"<(/?)([a-zA-Z]*+)[^<>]*+>|\{\\[^{}]*+\}|\\[Nnh]")
LABEL = r"(?P<label>[^\W\d_][\w .'’&#/-]{0,30}):(?=[ \t]|$)"
MARK = re.compile(
    rf"(?P<tag>{TAG.pattern})|[ \t]+|(?P<mark>[-–—‐−]+|(?:>|&gt;){{2,3}}|[♪♫♬♩🎵🎶]+|#+(?=[ \t]))|{LABEL}"
)
# Another speaker in the same line.
TURN = re.compile(r"""(?<=[.?!…:"'”»)\]>][ \t])(?:[-–—‐−]+|(?:>|&gt;){2,3})[ \t]*(?=[^\W\d_]|["'“«¿¡\[(<])""")
NAMED = re.compile(rf"(?:{TAG.pattern}|[-–—> \t])*+{LABEL}")
NOTES = re.compile(r"[♪♫♬♩🎵🎶]+|(?<=[ \t])#+(?=[ \t]*(?:[\r\n]|\Z))")
BRACKETS = re.compile(r"\[[^\[\]]*+\]|\([^()]*+\)|（[^（）]*+）|【[^【】]*+】")
LINE_BREAK = re.compile(r"(?<![ \t])[ \t]*+(?:\r\n|\r|\n)[ \t]*+")
ENTITY = re.compile(r"&#?\w++;")
IN_TEXT = re.compile(rf"{TAG.pattern}|{LINE_BREAK.pattern}|{ENTITY.pattern}")
MOST_JOINED = 4  # cues that are translated together
_Span = tuple[int, int]
_Cue = list[_Span]  # the places of its lines


def read_subtitles(text: str, *, entities: bool) -> Document:
    """Return the texts of the cues. What is sung or in brackets, and lines with a dash or a label are texts each.

    If a sentence continues in the next cue, both cues are one segment. It does if the first cue has no markup and no
    punctuation at its end, and the next one begins with a lower-case letter.

    Args: entities: `&`, `<` and `>` are always escaped, as in WebVTT.

    Raises: DataError: there is no cue.
    """
    lines = [found.span(1) for found in LINE.finditer(text)]
    times = [number for number, (start, end) in enumerate(lines) if TIMES.search(text[start:end])]
    if not times:
        raise DataError(
            "there is no cue; subtitles have lines of times, such as 00:00:01,000 --> 00:00:04,000, with text below.",
            in_command="Translate the lines of another format by --format lines.",
        )
    has_header = text.startswith(("WEBVTT", "\ufeffWEBVTT"))
    is_vtt = entities or has_header
    cues: list[_Cue] = []
    outside = [lines[number][0] for number in times if not SETTINGS.fullmatch(text, *lines[number])]
    for last, number in pairwise([-1, *times, len(lines)]):
        body = lines[last + 1 : number]
        if number < len(lines):
            body = _without_name(text, body, is_vtt=is_vtt)
        blocks = [one for one in _blocks(text, body) if not (is_vtt and one[0] != body[0] and _is_comment(text, one))]
        if last >= 0:
            cues += blocks
        else:
            outside += [one[0][0] for one in blocks[has_header:] if WORD.search(text, one[0][0], one[-1][1])]
    build = _Builder(text, entities=entities)
    segments: list[Segment] = []
    for group in _groups(text, cues):
        segments += build.segments(group[0]) if len(group) == 1 else [build.joined(group)]
    return Document(text, tuple(segments), outside=tuple(sorted(outside)))


def _is_comment(text: str, block: _Cue) -> bool:
    return COMMENT.fullmatch(text, *block[0]) is not None


def _without_name(text: str, lines: _Cue, *, is_vtt: bool) -> _Cue:
    """Return the lines before a line of times without the number or identifier of its cue."""
    count = len(lines)
    while count and not text[slice(*lines[count - 1])].strip():
        count -= 1
    if count and NUMBER.fullmatch(text, *lines[count - 1]):
        return lines[: count - 1]
    follows_empty = count > 1 and lines[count - 2][0] == lines[count - 2][1]
    if is_vtt and follows_empty and count == len(lines) and not SPOKEN.fullmatch(text, *lines[-1]):
        return lines[:-1]
    return lines


def _blocks(text: str, lines: _Cue) -> list[_Cue]:
    """Return the lines that stand together, without lines of white space, and of a time alone."""
    blocks: list[_Cue] = [[]]
    for start, end in lines:
        if text[start:end].strip(" \t\ufeff") and not TIME_ALONE.fullmatch(text, start, end):
            blocks[-1].append((start, end))
        elif blocks[-1]:
            blocks.append([])
    return [block for block in blocks if block]


def _words(text: str) -> list[str]:
    """Return the words between spaces and line ends; a no-break space is part of a word."""
    return [word for word in re.split(r"[ \t\r\n]+", text) if word]


def _groups(text: str, cues: Sequence[_Cue]) -> list[list[_Cue]]:
    groups: list[list[_Cue]] = []
    for cue in cues:
        if groups and len(groups[-1]) < MOST_JOINED and _goes_on(text, groups[-1][-1], cue):
            groups[-1].append(cue)
        else:
            groups.append([cue])
    return groups


def _shown(text: str, cue: _Cue) -> str:
    return " ".join(text[start:end].strip() for start, end in cue)


def _goes_on(text: str, one: _Cue, other: _Cue) -> bool:
    """Whether a sentence continues from one cue to the next, which does not repeat it."""
    first, second = _shown(text, one), _shown(text, other)
    if not (first[-1:].isalnum() or first[-1:] == ",") or not second[:1].islower():
        return False
    is_plain = not (TAG.search(first) or TAG.search(second)) and len(_texts(text, one)) == len(_texts(text, other)) == 1
    return is_plain and not second.startswith(text[slice(*one[-1])].strip()) and not _prefix(first, are_names=False)


def _prefix(line: str, *, are_names: bool) -> int:
    """Return the length of dashes, notes, labels and the tags before them at a line's beginning.

    Args: are_names: a label may have small letters, too.
    """
    place = length = 0
    while found := MARK.match(line, place):
        place = found.end()
        if found["label"]:
            most_words = 1 if line[place:].isupper() else 3  # of a speaker; other capitals begin a sentence
            is_name = are_names or (found["label"].isupper() and len(found["label"].split()) <= most_words)
            return place if is_name else length
        if found["mark"]:
            length = place
    return length


def _texts(text: str, lines: _Cue) -> list[_Span]:
    """Return the places of a cue's texts: what stands between marks."""
    start, end = lines[0][0], lines[-1][1]
    shown = [text[low:high] for low, high in lines]
    are_names = sum(NAMED.match(line) is not None for line in shown) > 1
    prefixes = [_prefix(line, are_names=are_names) for line in shown]
    cuts = [found.span() for found in NOTES.finditer(text, start, end)]
    for (low, high), line, length in zip(lines, shown, prefixes, strict=True):
        begins = length and (prefixes[0] or not TAG.sub("", line[length:]).strip()[:1].islower())
        if begins or low == start:
            cuts.append((low, low + length))
            cuts += [found.span() for found in TURN.finditer(text, low, high) if length]
    for found in BRACKETS.finditer(text, start, end):
        low, high = found.span()
        before = TAG.sub("", text[max(start, low - 80) : low]).rstrip(" \t")[-1:]
        after = TAG.sub("", text[high : min(end, high + 80)]).lstrip(" \t")[:1]
        if before in "\r\n.!?…:♪♫>-–—])" and (after in "\r\n♪♫[(-–—" or (after.isalnum() and not after.islower())):
            cuts += [(low, low + 1), (high - 1, high)]
    found_texts: list[_Span] = []
    done = start
    for low, high in [*sorted(cuts), (end, end)]:
        if low > done and WORD.search(TAG.sub("", text[done:low])):
            found_texts.append(trimmed(text, done, low))
        done = max(done, high)
    return found_texts


@dataclass(frozen=True)
class _Layout:
    """How texts are written.

    escapes: of characters. line_end: between lines.
    """

    escapes: Mapping[int, str]
    line_end: str

    def write(self, parts: Sequence[Part], num_lines: int, *, before_times: bool) -> str | None:
        """Return a text on as many lines as before, of about equal length.

        Returns: None if players would read times in it, or, before times, the number of the next cue.
        """
        glue = "\0"
        text = "".join(
            part.text.translate(self.escapes)
            if isinstance(part, Text)
            else (part.code.translate(self.escapes) if part.is_text else part.code).replace(" ", glue)
            for part in parts
        )
        words = _words(text)
        sizes = [len(TAG.sub("", word)) for word in words]
        width = len(TAG.sub("", text)) / num_lines
        lines: list[list[str]] = [[]]
        length = 0
        for index, (word, size) in enumerate(zip(words, sizes, strict=True)):
            is_full = lines[-1] and length + size / 2 >= width
            if lines[-1] and len(lines) < num_lines and (is_full or len(words) - index <= num_lines - len(lines)):
                lines.append([])
                length = 0
            length += size + bool(lines[-1])
            lines[-1].append(word)
        written = [" ".join(line).replace(glue, " ") for line in lines]
        if any(TIMES.search(line) for line in written) or (before_times and NUMBER.fullmatch(written[-1])):
            return None
        return self.line_end.join(written)

    def write_joined(
        self,
        parts: Sequence[Part],
        *,
        num_lines: Sequence[int],
        before_times: Sequence[bool],
        shares: Sequence[int],
        between: Sequence[str],
    ) -> str | None:
        """Divide a translation among its cues in proportion to their source, at nearby punctuation if there is some.

        Returns: None if there are fewer words than cues, or as of `write`.
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
            self.write([Text(piece)], count, before_times=is_before)
            for piece, count, is_before in zip(pieces, num_lines, before_times, strict=True)
        ]
        if None in built:
            return None
        return "".join(f"{piece}{after}" for piece, after in zip(built, [*between, ""], strict=True))


class _Builder:
    """Makes the segments of a file."""

    def __init__(self, text: str, *, entities: bool) -> None:
        self._text = text
        self._escapes = {"&": "&amp;", "<": "&lt;", ">": "&gt;"} if entities else {}
        self._line_end = line_end_of(text)

    def _layout(self, start: int, end: int) -> _Layout:
        """Return the layout of a text, whose characters are escaped as they were in its source."""
        codes = {html.unescape(code): code for code in ENTITY.findall(self._text, start, end)}
        escapes = self._escapes | {char: code for char, code in codes.items() if len(char) == 1}
        return _Layout(str.maketrans(escapes), self._line_end)

    def _is_before_times(self, end: int) -> bool:
        following = FOLLOWING.match(self._text, end)
        return following is not None and TIMES.search(following[1]) is not None

    def joined(self, cues: Sequence[_Cue]) -> Segment:
        """Return several cues as one segment, with their times in between."""
        text = self._text
        start, end = cues[0][0][0], cues[-1][-1][1]
        shown = [_shown(text, cue) for cue in cues]
        build = partial(
            self._layout(start, end).write_joined,
            num_lines=[len(cue) for cue in cues],
            before_times=[self._is_before_times(cue[-1][1]) for cue in cues],
            shares=[len(one) for one in shown],
            between=[text[one[-1][1] : other[0][0]] for one, other in pairwise(cues)],
        )
        return Segment(start, end, (Text(ENTITY.sub(lambda found: html.unescape(found[0]), " ".join(shown))),), build)

    def segments(self, cue: _Cue) -> Iterator[Segment]:
        """Yield the texts of a cue."""
        for start, end in _texts(self._text, cue):
            shown = self._text[start:end]
            build = partial(
                self._layout(start, end).write,
                num_lines=len(LINE_BREAK.findall(shown)) + 1,
                before_times=self._is_before_times(end),
            )
            yield Segment(start, end, tile(shown, _tags(shown)), build)


def _tags(shown: str) -> list[tuple[int, int, Tag | str]]:
    """Return the tags, line ends and escaped characters of a text, for `tile`."""
    ranges: list[tuple[int, int, Tag | str]] = []
    opened: list[tuple[str, int]] = []
    names: Counter[str] = Counter()  # of the opened ones, so that no search is needed
    for found in IN_TEXT.finditer(shown):
        code, name = found[0], found[2]
        if not code.strip():
            ranges.append((*found.span(), " "))
        elif code[0] == "&":
            ranges.append((*found.span(), html.unescape(code)))
        elif code[0] == "<" and name and found[1] and names[name]:
            last = ""
            while last != name:
                last, place = opened.pop()
                names[last] -= 1
            low, high, tag = ranges[place]
            assert isinstance(tag, Tag)
            ranges[place] = (low, high, Tag(tag.code, "open", place))
            ranges.append((*found.span(), Tag(code, "close", place)))
        else:
            if code[0] == "<" and name and not found[1]:
                opened.append((name, len(ranges)))
                names[name] += 1
            ranges.append((*found.span(), Tag(code, "alone")))
    return ranges
