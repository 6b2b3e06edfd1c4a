"""The segments of WMT's .sgm files: `<srcset>`, `<refset>` or `<tstset>` with `<doc>` and `<seg id>`.

SGML is not XML: tags may be in capitals, attributes without quotation marks, and `&` and `<` stand in text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

from manyheads.errors import DataError

_TAG = re.compile(r"<(seg|doc|srcset|refset|tstset)\b([^<>]*)>", re.IGNORECASE)
_END = re.compile(r"</seg\s*>|<seg\b", re.IGNORECASE)
_ATTRIBUTE = re.compile(r"""(?<![\w-])([\w-]++)\s*+=\s*+(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_MOST_TAG_CHARS = 10_000


class Segment(str):
    """The text of a segment. place: its document and its id there."""

    place: tuple[str, str] = ("", "")


def sgm_segments(lines: Iterable[tuple[str, bool]], name: str) -> Iterator[Segment | None]:
    """Yield the text of each segment, in one line; None for one with a bad line.

    Args: lines: each with whether it is bad. name: of the file, for messages.

    Raises: DataError: a segment is not closed, the file has no segment, or it has several translations of a document.
    """
    text: list[str] | None = None  # of the segment
    begun_in = count = 0
    is_bad, begun, document, kind, system = False, "", "", "", ""
    known: dict[str, int] = {}  # kind and system -> the first line
    place = ("", "")
    for number, (line, bad) in enumerate(lines, 1):
        line, begun = begun + line, ""
        is_bad |= bad
        at = 0
        while at < len(line):
            if text is not None:
                end = _END.search(line, at)
                text.append(line[at : end.start()] if end else line[at:])
                if end is None:
                    break
                if end[0][1] != "/":
                    raise DataError(f"{name}: line {begun_in} begins a segment that is not closed by </seg>; close it.")
                segment = Segment(_ENTITY.sub(_character, " ".join(filter(None, map(str.strip, text)))))
                segment.place = place
                yield None if is_bad else segment
                text, at = None, end.end()
                continue
            if (tag := _TAG.search(line, at)) is None:
                if line.rfind("<") > line.rfind(">") and len(line) < _MOST_TAG_CHARS:
                    begun = line[at:] + " "  # a tag that goes on in the next line
                break
            at, element = tag.end(), tag[1].lower()
            given = {one[1].lower(): one[2] or one[3] or one[4] or "" for one in _ATTRIBUTE.finditer(tag[2])}
            if element == "seg":
                count += 1
                text, begun_in, is_bad = [], number, bad
                place = (document, given.get("id", str(count)))
                known.setdefault(f"<{kind}> {system}".strip(), number)
                if len(known) > 1:
                    shown = ", ".join(f"{group} from line {first}" for group, first in known.items())
                    raise DataError(f"{name} has more than one text of each document ({shown}); keep one in a file.")
            elif element == "doc":
                document, count = given.get("docid", ""), 0
                system = given.get("sysid", system)
            else:
                kind, system = element, given.get("sysid", given.get("refid", ""))
    if text is not None:
        raise DataError(f"{name}: line {begun_in} begins a segment that is not closed by </seg>; is the file complete?")
    if not known:
        raise DataError(f"{name} has no segments (<seg>), which a file of WMT has; give lines of text another name.")


def _character(entity: re.Match[str]) -> str:
    return html.unescape(entity[0]) or entity[0]
