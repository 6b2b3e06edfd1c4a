"""Markdown: paragraphs, headings, list items and table cells are text; code, HTML, links' targets, math are not.

markdown-it-py reads the blocks and the markup inside them. It does not record the position of inline markup, so its
rules are wrapped here: the characters that a rule consumes are the position. The same parser checks each translation.
A translation must have the same markup as its source and be one block of the same kind. Otherwise its special
characters are escaped. If that does not help, the paragraph keeps its source text.
"""

from __future__ import annotations

import html
import re
from bisect import bisect, bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from manyheads.extras.documents.html import ANNOTATION, TOKEN, VOID, end_of_element, is_kept, with_annotations
from manyheads.extras.documents.parts import LINE_END, Document, Part, Segment, Tag, lay_out, line_end_of, tile, trimmed
from manyheads.installation import needing_extra

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline

# Its first line that is neither empty nor a comment is a key of YAML; otherwise the first `---` is a rule.
FRONT_MATTER = re.compile(
    r"\A\ufeff?---[ \t]*\r?\n(?:[ \t]*(?:#[^\n]*)?\r?\n)*[\w\"'][\w .\"'-]*:\s.*?^(?:---|\.\.\.)[ \t]*(?:\r?\n|\Z)",
    re.DOTALL | re.MULTILINE,
)
# Directives of common extensions (admonitions, tabs, mkdocstrings, GitHub's alerts): their first line is no text.
DIRECTIVE = re.compile(r"(?:!!!|\?\?\?\+?|===|:::)\s|\[![\w-]+\][+-]?[ \t]*(?:\n|\Z)")
# On a line of a paragraph: the beginning of a footnote or a definition, or a fence of a container (`:::`). What follows
# is a separate text.
DEFINITION = re.compile(r"^(?:(?:\[\^[^\]\s]+\]:|:)[ \t]+|:{3,}.*$)", re.MULTILINE)
# Inline markup that CommonMark does not know: math, footnotes, attributes, check boxes at the beginning.
EXTENSIONS = re.compile(
    r"\$\$.+?\$\$|\$(?=\S)[^$\n]*?(?<=\S)\$(?!\d)|\[\^[^\[\]\s]++\](?!:)|\{:?\s*[#.][\w-][^{}\n]*\}", re.DOTALL
)
MOST_BRACKETS = 2_000
"""Number of `[` in a paragraph; markdown-it-py takes time with the square of it. A paragraph with more is left."""
CHECK_BOX = re.compile(r"\[[ xX]\]\s+")
SPECIAL = re.compile(r"[\\`*_\[\]<>$~{}]|&(?=[#\w])")
ESCAPABLE = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
BLOCK_MARKER = re.compile(r"(?=[-+*#>=|:~])|\d+(?=[.)])")

_Range = tuple[int, int, Tag | str]


def read_markdown(text: str) -> Document:
    """Return the segments of a Markdown text (CommonMark with tables and strikethrough).

    Raises: MissingExtraError: markdown-it-py is not installed.
    """
    parser = _parser()
    front = FRONT_MATTER.match(text)
    skipped = front.end() if front else int(text.startswith("\ufeff"))
    lines = _Lines(text, skipped)
    env: dict[str, Any] = {}
    tokens = parser.parse(text[skipped:], env)
    segments: list[Segment] = []
    left: list[int] = []
    crowded = 0
    kept_until = 0  # the end of an HTML element that is not translated, with blocks of Markdown inside
    not_closed: set[str] = set()
    for index, token in enumerate(tokens):
        is_inside = token.map is not None and lines.start(token.map[0]) < kept_until
        if token.type == "html_block" and token.map and not is_inside:
            first, last = map(lines.start, token.map)
            kept_until = _end_of_kept_blocks(text, first, last, not_closed)
        if token.type != "inline" or not token.map or not token.content or is_inside:
            continue
        kind = tokens[index - 1].type.removesuffix("_open")
        places = lines.places(token.content, token.map[0], token.map[1], is_cell=kind in ("td", "th"))
        has_too_many = token.content.count("[") > MOST_BRACKETS
        if places is None or has_too_many:
            left.append(lines.starts[token.map[0]])
            crowded += has_too_many
            continue
        segments += _segments(lines, token.content, places, kind, env)
    told = f"paragraphs with more than {MOST_BRACKETS:,} [, not translated: {crowded:,}; divide them with empty lines"
    return Document(text, tuple(segments), tuple(left), (told,) if crowded else ())


class _Lines:
    """The lines of a text, and the position of the content of a block in them."""

    def __init__(self, text: str, skipped: int) -> None:
        self.text = text
        ends = [found.end() for found in LINE_END.finditer(text, skipped)]
        self.starts = [skipped, *ends]
        self._ends = [*ends, len(text)]
        self.line_end = line_end_of(text)
        self._cell = (0, 0)  # line and end of the last table cell

    def start(self, number: int) -> int:
        """Return the place where a line begins, from 0; behind the last one, the end of the text."""
        return self.starts[number] if number < len(self.starts) else len(self.text)

    def places(self, content: str, first: int, last: int, *, is_cell: bool) -> list[int] | None:
        """Return the place of each character of a content, and of its end; None if the lines lack the content."""
        found: list[int] = []
        number = first
        for line in content.split("\n"):
            if number >= last:
                return None
            begin = self.starts[number]
            whole = self.text[begin : self._ends[number]]
            shown = whole.rstrip("\r\n")
            if is_cell:
                after = self._cell[1] if self._cell[0] == number else 0
                written = line if shown.find(line, after) >= 0 else line.replace("|", "\\|")
                place = shown.find(written, after)
                if place < 0:
                    return None
                self._cell = (number, place + len(written))
                if written != line:  # a bar in a cell is written with a backslash, which is not part of the content
                    ends = [found.end() for found in re.finditer(r"\\?[^\\]|\\", written)]
                    if len(ends) != len(line):
                        return None
                    return [begin + place + end for end in [0, *ends]]
            elif "\n" in content:
                place = len(shown.rstrip()) - len(line.rstrip())
                place = place if shown[place : place + len(line)] == line else shown.rfind(line)
            else:
                place = shown.find(line)
            if place < 0:
                return None
            found += range(begin + place, begin + place + len(line) + 1)
            number += 1
        return found


def _segments(lines: _Lines, content: str, places: list[int], kind: str, env: dict[str, Any]) -> list[Segment]:
    """Return the segments of a block: one, or one for each stretch between hard line breaks, footnotes or
    definitions."""
    first = 0
    while DIRECTIVE.match(content, first):
        next_line = content.find("\n", first)
        if next_line < 0:
            return []
        first = next_line + 1
        while content[first : first + 1] == " ":
            first += 1
    if first:  # what follows a directive is parsed as the block that it is
        content, places = content[first:], places[first:]
    ranges, breaks = _ranges(content, env)
    segments = []
    begin = 0
    starts = [one[0] for one in ranges]
    definitions = []
    for found in DEFINITION.finditer(content) if kind == "paragraph" else ():
        before = bisect(starts, found.start())
        if not before or ranges[before - 1][1] <= found.start():  # not inside math
            definitions.append(found.span())
    for stop, after in [*sorted([*breaks, *definitions]), (len(content), len(content))]:
        start, end = trimmed(content, begin, stop)
        if start < end:
            inside = ranges[bisect_left(starts, start) : bisect_left(starts, end)]
            tags = [
                (low - start, high - start, _as_written(tag, content[low:high], lines.text, places[low:high]))
                for low, high, tag in inside
                if high <= end
            ]
            parts = tile(content[start:end], tags)
            source_lines = LINE_END.split(lines.text[places[start] : places[end - 1] + 1])
            build = partial(
                _build,
                codes=_codes(parts),
                source_lines=source_lines,
                line_end=lines.line_end,
                kind="cell" if kind in ("td", "th") else "paragraph" if kind == "paragraph" else "line",
                env=env,
            )
            segments.append(Segment(places[start], places[end - 1] + 1, _balanced(parts), build))
        begin = after
    return segments


def _as_written(tag: Tag | str, content: str, text: str, places: list[int]) -> Tag | str:
    """Return a tag that goes over lines with the bytes between them: line ends, indents and `>`."""
    if isinstance(tag, str) or "\n" not in content:
        return tag
    return replace(tag, code=text[places[0] : places[-1] + 1])


def _build(
    parts: Sequence[Part],
    *,
    codes: Counter[str],
    source_lines: list[str],
    line_end: str,
    kind: str,
    env: dict[str, Any],
) -> str | None:
    """Return the Markdown of a translation, with the fewest escapes that keep the structure."""
    for escape in (str, _escaped):
        built = lay_out(parts, partial(_in_cell, escape) if kind == "cell" else escape, source_lines, line_end)
        plain = _without_prefixes(built)
        if kind == "paragraph" and not _is_paragraph(plain):
            marker = BLOCK_MARKER.match(built)
            if marker is None:
                continue
            built = f"{built[: marker.end()]}\\{built[marker.end() :]}"
            plain = _without_prefixes(built)
            if not _is_paragraph(plain):
                continue
        ranges, breaks = _ranges(plain.replace("\\|", "|") if kind == "cell" else plain, env)
        if not breaks and _codes([tag for _, _, tag in ranges if isinstance(tag, Tag)]) == codes:
            return built
    return None


def _without_prefixes(built: str) -> str:
    first, *rest = LINE_END.split(built)
    return "\n".join([first, *(line.lstrip(" \t>") for line in rest)])


def _is_paragraph(text: str) -> bool:
    return [token.type for token in _parser().parse(text)] == ["paragraph_open", "inline", "paragraph_close"]


def _codes(parts: Sequence[Part]) -> Counter[str]:
    tags = [part for part in parts if isinstance(part, Tag) and not part.is_text]
    return Counter(_one_line(_without_prefixes(tag.code)) for tag in tags)


def _escaped(text: str) -> str:
    return SPECIAL.sub(r"\\\g<0>", text)


def _in_cell(escape: Callable[[str], str], text: str) -> str:
    return escape(text).replace("|", "\\|")


def _balanced(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Turn tags whose other half is missing (cut off by a hard line break, or HTML that is never closed) into single
    ones."""
    pairs = Counter(part.pair for part in parts if isinstance(part, Tag) and part.kind in ("open", "close"))
    return tuple(
        Tag(part.code, "alone") if isinstance(part, Tag) and part.pair >= 0 and pairs[part.pair] != 2 else part
        for part in parts
    )


@cache
def _parser() -> MarkdownIt:
    """A parser of blocks, whose inline rules record the places of what they match in `env["recorder"]`."""
    with needing_extra("Markdown needs the package markdown-it-py", "documents"):
        from markdown_it import MarkdownIt
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    parser.core.ruler.disable(["inline", "text_join"], True)
    parser.inline.ruler.before("escape", "extensions", _extension)
    for rule in list(parser.inline.ruler.__rules__):
        if rule.name not in ("text", "linkify"):
            parser.inline.ruler.at(rule.name, partial(_recorded, rule.name, rule.fn))
    return parser


@dataclass
class _Recorder:
    """Matches of the rules in one inline content: ranges, and the place of each delimiter of emphasis by its token."""

    content: str
    ranges: list[_Range] = field(default_factory=list)
    breaks: list[tuple[int, int]] = field(default_factory=list)
    delimiters: dict[int, int] = field(default_factory=dict)
    num_pairs: int = 0
    open_html: list[tuple[str, int]] = field(default_factory=list)
    waiting: Counter[str] = field(default_factory=Counter)  # names in open_html
    not_closed: set[str] = field(default_factory=set)  # names of kept elements without an end


def _ranges(content: str, env: dict[str, Any]) -> tuple[list[_Range], list[tuple[int, int]]]:
    """Return markup and escaped characters of a content with their places, in order, and the hard line breaks."""
    from markdown_it.rules_inline import StateInline

    parser = _parser()
    recorder = _Recorder(content)
    state = StateInline(content, parser, {**env, "recorder": recorder}, [])
    if box := CHECK_BOX.match(content):
        recorder.ranges.append((0, box.end(), Tag(box[0], "alone")))
        state.pos = box.end()
    parser.inline.tokenize(state)
    for rule in parser.inline.ruler2.getRules(""):
        rule(state)
    _record_emphasis(state, recorder)
    return sorted(recorder.ranges, key=lambda one: one[:2]), sorted(recorder.breaks)


def _record_emphasis(state: StateInline, recorder: _Recorder) -> None:
    open_pairs: list[int] = []
    for token in state.tokens:
        if token.type not in ("em_open", "em_close", "strong_open", "strong_close", "s_open", "s_close"):
            continue
        place, size = recorder.delimiters[id(token)], len(token.markup)
        if token.nesting == 1:
            open_pairs.append(recorder.num_pairs)
            recorder.num_pairs += 1
            # Of two stars that open, the parser makes the inner one the tag; of two that close, the outer one.
            start = place - (token.type == "strong_open")
            recorder.ranges.append((start, start + size, Tag(token.markup, "open", open_pairs[-1])))
        else:
            recorder.ranges.append((place, place + size, Tag(token.markup, "close", open_pairs.pop())))


def _extension(state: StateInline, silent: bool) -> bool:
    found = EXTENSIONS.match(state.src, state.pos)
    if found is None:
        return False
    if not silent:
        state.push("text", "", 0).content = found[0]
    state.pos = found.end()
    return True


def _recorded(name: str, rule: Callable[[StateInline, bool], bool], state: StateInline, silent: bool) -> bool:
    """Run a rule and record what it matched."""
    recorder = state.env.get("recorder")
    # The text of an image is parsed in a state of its own.
    if silent or recorder is None or state.src is not recorder.content:
        return rule(state, silent)
    start, first = state.pos, len(state.tokens) + bool(state.pending)
    is_link = name == "link" and state.src[start] == "["
    label_end = state.md.helpers.parseLinkLabel(state, start, True) if is_link else 0
    if not rule(state, silent):
        return False
    end = state.pos
    source = state.src[start:end]
    if name in ("emphasis", "strikethrough"):
        place = end
        for token in reversed(state.tokens[first:]):
            place -= len(token.content)
            recorder.delimiters[id(token)] = place
    elif name in ("backticks", "image", "autolink"):
        # Backticks that are not closed are text.
        if name != "backticks" or state.tokens[first:]:
            recorder.ranges.append((start, end, Tag(_one_line(source), "word")))
    elif name == "extensions":
        recorder.ranges.append((start, end, Tag(_one_line(source), "word" if source[0] == "$" else "alone")))
    elif name == "link":
        recorder.num_pairs += 1
        close = state.src[label_end:end]
        if close in ("]", "][]"):  # the text is also the name of the reference; it must not be lost
            close = f"][{state.src[start + 1 : label_end]}]"
        recorder.ranges.append((start, start + 1, Tag("[", "open", recorder.num_pairs - 1)))
        recorder.ranges.append((label_end, end, Tag(_one_line(close), "close", recorder.num_pairs - 1)))
    elif name == "html_inline":
        state.pos = _end_of_kept(state.src, start, end, recorder)
        if state.pos > end:
            tag = Tag(_one_line(state.src[start : state.pos]), "alone" if ANNOTATION.match(source) else "word")
        else:
            tag = _html_tag(source, recorder)
            if source[:6].lower() == "</ruby":
                start, _, whole = with_annotations(state.src, start, end, recorder.ranges)
                tag = replace(tag, code=_one_line(whole.code))
        recorder.ranges.append((start, state.pos, tag))
    elif name == "entity":
        recorder.ranges.append((start, end, html.unescape(source)))
    elif name == "escape" and source[1] == "\n":
        recorder.breaks.append((start, end))
    elif name == "escape":
        recorder.ranges.append((start, end, source[1:] if source[1] in ESCAPABLE else source))
    elif name == "newline":
        text_end = start
        while state.src[text_end - 1 : text_end] == " ":
            text_end -= 1
        if start - text_end >= 2:
            recorder.breaks.append((text_end, end))
        else:
            recorder.ranges.append((start, end, " "))
    return True


def _one_line(code: str) -> str:
    """Markup that goes over several lines: a line break in it means a space."""
    return re.sub(r"(?<!\s)\s++", lambda found: " " if "\n" in found[0] else found[0], code) if "\n" in code else code


def _end_of_kept_blocks(text: str, place: int, end: int, not_closed: set[str]) -> int:
    """Return where the last element ends that begins in a block of HTML and is not translated; without one, 0."""
    last = 0
    while place < end and (found := TOKEN.search(text, place, end)):
        place, name = found.end(), (found["name"] or "").lower()
        if is_kept(found) and name not in VOID and name not in not_closed and not found[0].endswith("/>"):
            close = end_of_element(text, name, place)
            if text.startswith("</", text.rfind("<", place, close)) and text[close - 1] == ">":
                last = place = close
            else:
                not_closed.add(name)
    return last


def _end_of_kept(content: str, start: int, end: int, recorder: _Recorder) -> int:
    """Return the end of the element whose tag is given if its content is not translated; otherwise that of the tag."""
    found = TOKEN.fullmatch(content, start, end)
    name = (found["name"] or "").lower() if found else ""
    if not found or found["close"] or name in VOID or name in recorder.not_closed or found[0].endswith("/>"):
        return end
    if is_kept(found):
        close = end_of_element(content, name, end)
        if content.startswith("</", content.rfind("<", end, close)) and content[close - 1] == ">":
            return close
        recorder.not_closed.add(name)
    return end


def _html_tag(source: str, recorder: _Recorder) -> Tag:
    found = re.match(r"<(/?)([a-zA-Z][\w-]*+)[^>]*+>", source)
    code = _one_line(source)
    if found is None or source.endswith("/>"):
        return Tag(code, "alone")
    name = found[2].lower()
    if not found[1]:
        recorder.open_html.append((name, recorder.num_pairs))
        recorder.waiting[name] += 1
        recorder.num_pairs += 1
        return Tag(code, "open", recorder.num_pairs - 1)
    while recorder.waiting[name]:
        other, pair = recorder.open_html.pop()
        recorder.waiting[other] -= 1
        if other == name:
            return Tag(code, "close", pair)
    return Tag(code, "alone")
