"""Tables of text: the rows of CSV and TSV, the columns that keys or numbers name, and the pairs of two columns.

CSV is as in RFC 4180: a cell that begins with a quotation mark ends at the next one that is not doubled. In TSV a
quotation mark is text, and tabs and line ends always separate; only a cell that a spreadsheet has quoted is read
without its marks: one that is enclosed in marks, where all marks inside are doubled, and there are some.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe
from manyheads.data.translation.readers import KEYS, Pairs, nested_value, one_line, preview
from manyheads.errors import DataError
from manyheads.installation import needing_extra

MOST_NAMED = 8
MOST_CELL_CHARS = 2**26
"""A quoted cell is at most this long, because a mark that is never closed encloses the rest of the file."""
SHOWN_CHARS = 30
LOOKED_AT = 100  # rows that show whether a column has numbers only
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


def read_table(path: str | Path, on_bad_utf8: OnBadUtf8, report: ReadReport, *, is_tsv: bool) -> Iterator[Row | None]:
    """Yield the rows of a CSV or TSV file; None for a row that is skipped because of bad bytes.

    The delimiter of CSV is that of its first line. A line such as `sep=;` above the table, which Excel reads, names it.

    Raises: DataError: see `read_rows`.
    """
    is_bad = False

    def lines() -> Iterator[str]:
        nonlocal is_bad
        for line in decoded_lines(path, on_bad_utf8, report):
            is_bad |= line is None
            yield (line or "") + "\n"

    source = lines()
    first = next(source, "")
    delimiter, above = csv_delimiter(first)
    if above:  # the line only names the delimiter
        first = next(source, "")
    elif is_tsv:
        delimiter = "\t"
    quotes, name = not is_tsv or delimiter != "\t", f"{describe(path)}: "
    given = chain([first] if first else [], source)
    for row in read_rows(given, delimiter, quotes=quotes, line=2 if above else 1, name=name):
        yield None if is_bad else row
        is_bad = False


def table_pairs(
    path: str | Path,
    keys: tuple[str | None, str | None],
    on_bad_utf8: OnBadUtf8,
    report: ReadReport,
    *,
    is_tsv: bool,
) -> Pairs:
    """Return the pairs of two columns of a CSV or TSV file.

    Args: keys: see `columns_of`; None: `source` and `target`. Without both keys, the first two columns of a TSV
        file that has no such header are the pairs.

    Raises: DataError: no such column; a row without them, or with more columns than the header; in TSV without keys a
        header, or a column of numbers; and see `read_table`.
    """
    rows = read_table(path, on_bad_utf8, report, is_tsv=is_tsv)
    head = list(islice(rows, 1 if any(keys) else LOOKED_AT))
    name, filled = f"{describe(path)}: ", [row for row in head if row is not None and not row.is_blank]
    first = filled[0] if filled else Row(1, [])
    names = [cell.text.strip() for cell in first.cells]
    is_bare = is_tsv and not any(keys) and not {"source", "target"} <= {*names}
    if is_bare:
        columns = Columns((0, 1), False)
        _check_bare(filled, name)
    else:
        columns = columns_of([keys[0] or "source", keys[1] or "target"], first, KEYS, name)
        report.headers_kept += not columns.has_header and is_header(names[place] for place in columns.places)
    is_strict = columns.has_header or not is_tsv
    for row in chain(head, rows):
        if row is None:
            yield None
        elif row.is_blank:
            yield "", ""
        elif row is not first or not columns.has_header:
            yield _pair_of(row, columns, first if is_strict else None, name, report)
            report.columns_ignored += is_bare and len(row.cells) > 2


def _pair_of(row: Row, columns: Columns, first: Row | None, name: str, report: ReadReport) -> tuple[str, str]:
    """Return a row's pair. first: the row that must have as many columns; None: a row may have more."""
    if max(columns.places) >= len(row.cells):
        needed = f"column {max(columns.places) + 1} was asked for"
        if columns.has_header and first is not None:
            needed = f"the first has {len(first.cells)}"
        elif len(row.cells) == 1 and columns.places == (0, 1):
            raise DataError(
                f"{name}line {row.line} has no tab: {preview(row.cells[0].raw)}; expected source<TAB>target."
            )
        raise DataError(f"{name}line {row.line} has {width(row)}; {needed}.")
    if first is not None:
        check_width(row, first, name)
    texts = [row.cells[place].text for place in columns.places]
    report.line_breaks_replaced += any("\n" in text for text in texts)
    return one_line(texts[0]), one_line(texts[1])


def _check_bare(rows: Sequence[Row], name: str) -> None:
    """Raises: DataError: the first two columns of a TSV file do not look like text."""
    if not rows or len(rows[0].cells) < 2:
        return
    first = [cell.text.strip() for cell in rows[0].cells]
    if is_header(first[:2]):
        raise DataError(
            f"{name}line {rows[0].line} looks like a header: {named(first)}. Name the columns by {KEYS}; if it is a"
            " pair, give --source-key 1 --target-key 2."
        )
    numbers = [
        numbers_only(row.cells[place].raw for row in rows if place < len(row.cells)) for place in range(len(first))
    ]
    if any(numbers[:2]):
        place = numbers.index(True)
        texts = [str(place + 1) for place, is_number in enumerate(numbers) if not is_number]
        source, target = texts[:2] if len(texts) > 1 else ("N", "M")
        raise DataError(
            f"{name}column {place + 1} has numbers only ({preview(first[place])} in line {rows[0].line}), as ids have."
            f" Name the columns of the texts, perhaps --source-key {source} --target-key {target}; if the numbers are"
            " texts, --source-key 1 --target-key 2."
        )


def parquet_pairs(
    path: str | Path, keys: tuple[str, str], report: ReadReport, groups: Sequence[int] | None = None, first: int = 0
) -> Pairs:
    """Return the pairs of two columns of a Parquet file; dots lead into nested columns, as in `translation.en`.

    Args: groups: of rows, which are read alone; None: all. first: number of rows before them, for messages.

    Raises: DataError: it is no Parquet file, or has no such columns of text. MissingExtraError: pyarrow is not
        installed.
    """
    with needing_extra("Parquet files need the package pyarrow", "parquet"):
        import pyarrow
        import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = sorted({next((one for one in (key, key.split(".")[0]) if one in names), "") for key in keys})
            if "" in columns:
                missing = next(key for key in keys if key not in names and key.split(".")[0] not in names)
                raise DataError(
                    f"{describe(path)} has no column {missing!r}; it has: {named(names)}. Name the columns by {KEYS}."
                )
            number = first
            for batch in file.iter_batches(columns=columns, batch_size=4096, row_groups=groups):
                for record in batch.to_pylist():
                    number += 1
                    where = f"{describe(path)}: row {number}"
                    texts = [nested_value(record, key, where, null="") for key in keys]
                    report.line_breaks_replaced += any("\n" in text for text in texts)
                    yield one_line(texts[0]), one_line(texts[1])
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {describe(path)} as a Parquet file: {str(error).splitlines()[0]}.") from None
