"""HTML: the text of elements; tags, attributes, comments, scripts, styles and code are copied.

A parsed tree cannot be written as the same bytes that were read. So this module divides the file into tags and text, as
the tokenizer of the HTML standard does, and replaces only the text.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from manyheads.extras.documents.parts import LINE_END, Document, Part, Segment, Tag, lay_out, line_end_of, tile

TOKEN = re.compile(
    r"<!--.*?(?:-->|\Z)"  # a comment
    r"|<[!?][^>]*(?:>|\Z)"  # a doctype, a processing instruction; without an end it reaches to the end of the file
    # Possessive: what is read once is not divided in another way, so a tag without an end takes linear time.
    r"|<(?P<close>/?)(?P<name>[a-zA-Z][^\s/<>]*+)(?P<attributes>(?:[^<>\"']++|\"[^\"]*+\"|'[^']*+')*+)>",
    re.DOTALL,
)
# Elements whose content is no running text: kept whole; in a sentence they stand for a word.
KEPT_WORDS = frozenset({"code", "kbd", "samp", "var", "math", "svg"})
KEPT = frozenset(
    {
        "script", "style", "pre", "textarea", "template", "object", "iframe", "noembed", "noframes", "xmp", "canvas",
        "select",
    }
)  # fmt: skip
ANNOTATIONS = frozenset({"rt", "rp", "rtc"})  # how the text before them is read; no part of the sentence
VOID = frozenset({"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"})
ATTRIBUTE = re.compile(r"""([^\s"'<>/=]++)(?:\s*+=\s*+(?:"([^"]*+)"|'([^']*+)'|([^\s"'>]*+)))?+""")
_BLOCKS = frozenset(
    {
        "address", "article", "aside", "blockquote", "center", "dd", "details", "dialog", "div", "dl", "dt", "fieldset",
        "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main",
        "menu", "nav", "ol", "p", "pre", "section", "summary", "table", "td", "th", "tr", "ul", "body", "html",
    }
)  # fmt: skip
# Elements that end a sentence. All others, unknown ones too, stand inside one.
SEPARATE = (
    _BLOCKS
    | KEPT
    | frozenset(
        {
            "area", "audio", "base", "br", "button", "caption", "col", "colgroup", "datalist", "dir", "embed", "frame",
            "frameset", "head", "hgroup", "legend", "link", "listing", "map", "marquee", "meta", "noscript", "optgroup",
            "option", "param", "plaintext", "search", "source", "tbody", "tfoot", "thead", "title", "track", "video",
        }
    )
)  # fmt: skip
_ROWS = frozenset({"tr", "thead", "tbody", "tfoot"})
# Elements that may lack an end tag -> tags that then end them, and elements in which those tags do not.
ENDED_BY = {
    "p": (_BLOCKS, frozenset[str]()),
    "li": (frozenset({"li"}), frozenset({"ul", "ol", "menu"})),
    **dict.fromkeys(("dt", "dd"), (frozenset({"dt", "dd"}), frozenset({"dl"}))),
    **dict.fromkeys(("td", "th"), (_ROWS | {"td", "th"}, frozenset({"table"}))),
    "tr": (_ROWS, frozenset({"table"})),
    **dict.fromkeys(ANNOTATIONS, (ANNOTATIONS | {"rb"}, frozenset({"ruby"}))),
}
_BLANK = " \t\r\n\f"
SPACE = re.compile(r"[ \t\r\n\f]+")

_Range = tuple[int, int, Tag]
ANNOTATION = re.compile(r"</?r(?:tc?|p)\b", re.IGNORECASE)


def read_html(text: str) -> Document:
    """Return the segments of an HTML text: each stretch of text and inline elements between two block tags."""
    segments: list[Segment] = []
    inline: list[_Range] = []
    start = place = int(text.startswith("\ufeff"))
    line_end = line_end_of(text)

    def end_segment(end: int) -> None:
        segments.extend(_segment(text, start, end, inline, line_end))
        inline.clear()

    while found := TOKEN.search(text, place):
        name = (found["name"] or "").lower()
        end = found.end()
        stays = is_kept(found)
        if stays and name not in VOID and not found[0].endswith("/>"):
            end = end_of_element(text, name, end)
        if name == "ruby" and found["close"]:
            inline.append(with_annotations(text, found.start(), end, inline))
        elif name in ANNOTATIONS:
            inline.append((found.start(), end, Tag(text[found.start() : end], "alone")))
        elif name in KEPT_WORDS or (stays and name not in SEPARATE):
            inline.append((found.start(), end, Tag(text[found.start() : end], "word")))
        elif name not in SEPARATE:
            kind = "alone" if not name or name in VOID else "close" if found["close"] else "open"
            inline.append((found.start(), end, Tag(found[0], kind)))  # type: ignore[arg-type]
        else:
            end_segment(found.start())
            start = end
        place = end
    end_segment(len(text))
    return Document(text, tuple(segments))


def is_kept(tag: re.Match[str]) -> bool:
    """Whether the name or the attributes of an opening tag, a match of TOKEN, say that its content stays."""
    name = (tag["name"] or "").lower()
    if tag["close"] or name in KEPT or name in KEPT_WORDS or name in ANNOTATIONS:
        return not tag["close"]
    values: dict[str, str] = {}
    for found in ATTRIBUTE.finditer(tag["attributes"] or ""):  # of an attribute that is given twice, the first counts
        values.setdefault(found[1].lower(), (found[2] or found[3] or found[4] or "").lower())
    return values.get("translate", "").strip() == "no" or "notranslate" in values.get("class", "").split()


def with_annotations(text: str, start: int, end: int, inline: list[Any]) -> _Range:
    """Return the end tag of a `ruby` element as one tag with the annotations before it, which leave the list.

    Args: inline: places and tags (or text) in order.
    """
    while inline and isinstance(tag := inline[-1][2], Tag) and tag.kind == "alone" and ANNOTATION.match(tag.code):
        if text[inline[-1][1] : start].strip():
            break
        start = inline.pop()[0]
    return start, end, Tag(text[start:end], "close")


def end_of_element(text: str, name: str, place: int) -> int:
    """Return the place where an element ends whose content begins at `place`."""
    if name in ENDED_BY:
        return _end_without_tag(text, name, place)
    depth = 1
    for found in re.compile(rf"<(/?){re.escape(name)}(?=[\s/>])[^>]*(?:>|\Z)", re.IGNORECASE).finditer(text, place):
        depth += -1 if found[1] else name not in KEPT
        if depth == 0:
            return found.end()
    return len(text)


def _end_without_tag(text: str, name: str, place: int) -> int:
    """Return the place where an element ends that may lack an end tag."""
    closers, containers = ENDED_BY[name]
    depth = 0
    for found in TOKEN.finditer(text, place):
        other = (found["name"] or "").lower()
        if other in closers and not depth:
            return found.end() if found["close"] and other == name else found.start()
        if other in containers:
            depth += -1 if found["close"] else 1
            if depth < 0:
                return found.start()
    return len(text)


def _segment(text: str, start: int, end: int, inline: Sequence[_Range], line_end: str) -> list[Segment]:
    """Return the segment of a stretch, without white space and unpaired tags at its ends; none if it has no text."""
    pairs, first, last = _pairs(inline), 0, len(inline) - 1
    while True:
        while start < end and text[start] in _BLANK:
            start += 1
        while start < end and text[end - 1] in _BLANK:
            end -= 1
        if first <= last and inline[first][0] == start and inline[first][2].kind != "word" and first not in pairs:
            start, first = inline[first][1], first + 1
        elif first <= last and inline[last][1] == end and inline[last][2].kind != "word" and last not in pairs:
            end, last = inline[last][0], last - 1
        else:
            break
    if start >= end:
        return []
    ranges: list[tuple[int, int, Tag | str]] = []
    done = start
    for index in range(first, last + 1):
        low, high, tag = inline[index]
        ranges += _text(text, done, low)
        if tag.kind in ("open", "close"):
            tag = Tag(tag.code, tag.kind, pairs[index]) if index in pairs else Tag(tag.code, "alone")
        ranges.append((low, high, tag))
        done = high
    ranges += _text(text, done, end)
    parts = tile(text[start:end], [(low - start, high - start, tag) for low, high, tag in ranges])
    lines = LINE_END.split(text[start:end])
    codes = Counter(part.code.strip() for part in parts if isinstance(part, Tag))
    build = partial(_build, lines=lines, line_end=line_end, codes=codes)
    return [Segment(start, end, parts, build)]


def _pairs(tags: Sequence[_Range]) -> dict[int, int]:
    """Return index of a tag -> number of its pair, for tags that have both an opening and a closing tag."""
    opened: list[tuple[str, int]] = []
    waiting: Counter[str] = Counter()  # names in `opened`
    found: dict[int, int] = {}
    for index, (_, _, tag) in enumerate(tags):
        if tag.kind not in ("open", "close"):
            continue
        name = re.sub(r"^</?([^\s/>]*+).*", r"\1", _tag_of(tag), flags=re.DOTALL).lower()
        if tag.kind == "open":
            opened.append((name, index))
            waiting[name] += 1
            continue
        while waiting[name]:
            other, first = opened.pop()
            waiting[other] -= 1
            if other == name:
                found[first] = found[index] = first
                break
    return found


def _tag_of(tag: Tag) -> str:
    """Return the code of a tag without the annotations that stand before a closing one."""
    return tag.code[tag.code.rfind("</") :] if tag.kind == "close" else tag.code


def _text(text: str, start: int, end: int) -> list[tuple[int, int, str]]:
    """Return a stretch of text as a range with entities decoded and white space joined."""
    shown = text[start:end]
    decoded = SPACE.sub(" ", html.unescape(shown))
    return [(start, end, decoded)] if decoded != shown else []


def _build(parts: Sequence[Part], *, lines: Sequence[str], line_end: str, codes: Counter[str]) -> str | None:
    if Counter(part.code.strip() for part in parts if isinstance(part, Tag) and not part.is_text) != codes:
        return None
    return lay_out(parts, partial(html.escape, quote=False), lines, line_end, prefix_characters=" \t")
