"""Tables of text, CSV and TSV: their rows, and the columns that keys or numbers name.

CSV is as in RFC 4180: a cell that begins with a quotation mark ends at the next one that is not doubled. In TSV a
quotation mark is text, and tabs and line ends always separate; only a cell that a spreadsheet has quoted is read
without its marks: one that is enclosed in marks, where all marks inside are doubled, and there are some.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from manyheads.errors import DataError

MOST_NAMED = 8
MOST_CELL_CHARS = 2**26
"""A quoted cell is at most this long, because a mark that is never closed encloses the rest of the file."""
SHOWN_CHARS = 30
_NAMED = re.compile(r'"?sep=([^"\r\n])"?(?:\r\n|\r|\n|\Z)')
_FIRST_LINE = re.compile(r"[^\r\n]*")
_TO_CLOSING_MARK = re.compile(r'(?:[^"]++|"")*+"')
_QUOTED = re.compile(r'"(?:[^"]++|"")*+"')
_LINE_END = re.compile(r"\r?\n\Z|\r\Z")
_COLUMN_NUMBER = re.compile(r"[1-9][0-9]{0,5}")
_NUMBER = re.compile(r"[-+]?\d+(?:[.,:]\d+)*%?")
# What people write above columns of sentences: kinds of content, languages, and tags of common languages.
_HEADING = (
    r"(?:id|nr|no\.?|key|index|line|source|target|src|tgt|trg|text|sentences?|translations?|label|class|category|comment|"
    r"input|output|original|translated|reference|segment|score|language|lang|"
    r"english|german|deutsch|french|spanish|italian|portuguese|dutch|polish|russian|ukrainian|czech|turkish|arabic|hindi|"
    r"chinese|japanese|korean|vietnamese|indonesian|swedish|danish|norwegian|finnish|greek|hebrew|hungarian|romanian|"
    r"(?:en|de|fr|es|it|pt|nl|pl|ru|uk|cs|sk|sl|hr|sr|bg|ro|hu|tr|el|he|ar|fa|hi|ur|bn|ta|zh|ja|ko|vi|th|id|ms|sv|da|nb|fi|"
    r"et|lv|lt|ca|eng|deu|ger|fra|fre|spa|ita|por|nld|pol|rus|ukr|ces|tur|ara|hin|zho|jpn|kor|vie|swe|dan|nor|fin)"
    r"(?:[-_][a-z]{2,4})?)"
)
_HEADERS = re.compile(rf"{_HEADING}(?:[ _.-]{_HEADING}|_?\d{{1,2}}\b|[ _]?\([^()]{{1,20}}\)){{0,2}}")


def csv_delimiter(text: str, start: int = 0) -> tuple[str, int]:
    """Return the delimiter, and where the table begins.

    A line such as `sep=;` above the table, which Excel reads, names the delimiter. Otherwise it is the comma, the
    semicolon, the tab or |, whichever the first line has most outside of quotation marks.

    Args: start: of the text, behind a byte order mark.
    """
    if named := _NAMED.match(text, start):
        return named[1], named.end()
    line = _FIRST_LINE.match(text, start)
    head = re.sub(r'"[^"]*"', "", line[0] if line else "")
    return max(",;\t|", key=head.count), start


class Cell(NamedTuple):
    """A cell: its characters in the file, where they begin, and whether they stand in quotation marks."""

    raw: str
    start: int
    is_quoted: bool

    @property
    def text(self) -> str:
        """The cell's content."""
        return self.raw[1:-1].replace('""', '"') if self.is_quoted else self.raw


class Row(NamedTuple):
    """A row. line: its first line in the file, from 1. cells: at least one; an empty line has one empty cell."""

    line: int
    cells: list[Cell]

    @property
    def is_blank(self) -> bool:
        """Whether it is an empty line, or one of white space alone."""
        return len(self.cells) == 1 and not self.cells[0].raw.strip()


def read_rows(
    lines: Iterable[str], delimiter: str, *, quotes: bool, line: int = 1, start: int = 0, name: str = ""
) -> Iterator[Row]:
    """Yield the rows of a table; a line is only read when its row is wanted.

    Args:
        lines: with their line ends.
        delimiter: one character.
        quotes: quotation marks enclose cells, as in CSV. Otherwise the rules of TSV hold.
        line: number of the first line.
        start: place of the first line in the file, in characters.
        name: of the file, for messages, with a colon and a space.

    Raises: DataError: text follows a closing quotation mark, a mark is not closed, or a carriage return is outside of
        marks in CSV. The line is named.
    """
    cells: list[Cell] = []
    opened: list[str] = []  # of a quoted cell that is not closed yet
    began = opened_in = line
    size = opened_at = 0
    for number, text in enumerate(lines, line):
        place = 0
        ending = _LINE_END.search(text, max(len(text) - 2, 0))
        end = ending.start() if ending else len(text)
        if not opened and not cells:
            began = number
        while place <= end:
            if quotes and not opened and text.startswith('"', place):
                opened, opened_in, opened_at, size = ['"'], number, start + place, 1
                place += 1
            if opened:
                closing = _TO_CLOSING_MARK.match(text, place)
                opened.append(closing[0] if closing else text[place:])
                size += len(opened[-1])
                if size > MOST_CELL_CHARS:
                    raise DataError(name + _unclosed(opened_in, f"within {MOST_CELL_CHARS:,} characters"))
                if closing is None:
                    break
                place = closing.end()
                if place < end and not text.startswith(delimiter, place):
                    raise DataError(name + _text_behind_mark(text[place:end], "".join(opened), opened_in, number))
                cells.append(Cell("".join(opened), opened_at, True))
                opened = []
            else:
                stop = text.find(delimiter, place, end)
                stop = end if stop < 0 else stop
                raw = text[place:stop]
                if quotes and "\r" in raw:
                    raise DataError(
                        f"{name}line {number} has a carriage return in a row, outside quotation marks. If its lines end"
                        " in carriage returns alone, convert them (tr '\\r' '\\n'); otherwise put the text into"
                        " quotation marks."
                    )
                cells.append(Cell(raw, start + place, not quotes and _is_quoted_in_tsv(raw)))
                place = stop
            place += 1  # the delimiter, or the end of the line
        if not opened:
            yield Row(began, cells)
            cells = []
        start += len(text)
    if opened:
        raise DataError(name + _unclosed(opened_in, "until the end of the file"))


def _is_quoted_in_tsv(raw: str) -> bool:
    return raw.startswith('"') and '""' in raw[1:-1] and _QUOTED.fullmatch(raw) is not None


def _unclosed(line: int, where: str) -> str:
    return (
        f"line {line} opens a quotation mark that is never closed {where}; close it, or double the mark, and enclose"
        ' the cell in marks, if it belongs to the text ("5"" disk").'
    )


def _text_behind_mark(behind: str, cell: str, opened_in: int, line: int) -> str:
    shown = behind if len(behind) <= SHOWN_CHARS else behind[:SHOWN_CHARS] + "…"
    if cell.endswith('\\"'):
        remedy = 'a mark inside a cell is doubled, not written with a backslash: sed \'s/\\\\"/""/g\' FILE > NEW'
    elif opened_in < line:
        remedy = f"the cell begins in line {opened_in}; close its mark there, or double the marks of its text"
    else:
        remedy = 'double the marks that belong to the text, as in "He said ""no""."'
    return f"line {line}: the text {shown!r} follows a closing quotation mark; {remedy}."


@dataclass(frozen=True)
class Columns:
    """The chosen columns of a table. places: from 0. has_header: the first row has their names, and is no text."""

    places: tuple[int, ...]
    has_header: bool


def columns_of(keys: Sequence[str], first: Row, option: str, name: str = "") -> Columns:
    """Return the columns that keys name.

    A key is the name of a column in the first row. Numbers, from 1, name the columns of a table without a header; they
    are names if the first row has numbers alone, and these among them.

    Args: first: the first row. option: that gives the keys, for messages. name: see `read_rows`.

    Raises: DataError: there is no such column, or two have the name.
    """
    names = [cell.text.strip() for cell in first.cells]
    numbered = all(map(str.isdecimal, names)) and {*keys} <= {*names}
    if not numbered and all(map(_COLUMN_NUMBER.fullmatch, keys)):
        places = tuple(int(key) - 1 for key in keys)
        if max(places) >= len(names):
            raise DataError(f"{name}line {first.line} has {width(first)}; column {max(places) + 1} was asked for.")
        return Columns(places, False)
    for key in keys:
        if names.count(key) != 1:
            verb, found = ("are", f"{names.count(key)} columns") if key in names else ("is", "no column")
            raise DataError(
                f"{name}there {verb} {found} {key!r}; the first line has: {named(names)}. Numbers, from 1, name"
                " the columns of a file without a header.",
                in_command=f"Name the columns by {option}.",
            )
    return Columns(tuple(map(names.index, keys)), True)


def width(row: Row) -> str:
    """Return the number of columns of a row, for messages."""
    return f"{len(row.cells)} column{'s' * (len(row.cells) != 1)}"


def check_width(row: Row, first: Row, name: str = "") -> None:
    """Raises: DataError: the row has text in more columns than the first row; it may be in the wrong columns."""
    if any(cell.raw.strip() for cell in row.cells[len(first.cells) :]):
        raise DataError(
            f"{name}line {row.line} has {width(row)}, but the first has {len(first.cells)}, so text may stand in the"
            " wrong column; enclose cells that contain the delimiter in quotation marks, or take it out."
        )


def named(names: Sequence[str]) -> str:
    """Return the first names of columns, for messages."""
    shown = ", ".join(name if len(name) <= SHOWN_CHARS else f"{name[:SHOWN_CHARS]}…" for name in names[:MOST_NAMED])
    return (shown or "none") + ", ..." * (len(names) > MOST_NAMED)


def is_header(texts: Iterable[str]) -> bool:
    """Return whether these cells of a first row look like the names of columns, such as `en` and `German`."""
    return all(_HEADERS.fullmatch(text.strip().casefold()) for text in texts)


def numbers_only(texts: Iterable[str]) -> bool:
    """Return whether the cells that are not empty hold numbers, as ids and scores do."""
    filled = [text.strip() for text in texts if text.strip()]
    return bool(filled) and all(map(_NUMBER.fullmatch, filled))
