"""Columns of CSV and TSV files, and keys of JSONL files: the lines of their values are text, the rest is copied."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

from manyheads.errors import ConfigError, DataError
from manyheads.extras.documents.parts import Document, Part, Segment, Text, plain
from manyheads.extras.tables.cells import Cell, check_width, columns_of, csv_delimiter, is_header, named, read_rows

LINE = re.compile(r"[^\r\n]+")
JSON_LINE = re.compile(r"(?:\\[nr])+|((?:[^\\]|\\[^nr])+)")  # line breaks, or a line


def read_csv(text: str, columns: Sequence[str], *, delimiter: str | None = None) -> Document:
    """Return the lines of the values of some columns, without the header line; see `tables.cells` for rows and columns.

    Args:
        columns: names in the first line. Or numbers from 1; then the first line is a row like the others.
        delimiter: the character between values; with the tab, the rules of TSV hold. None: comma, semicolon, tab or |,
            whichever the first line has most. A line such as `sep=;` above it, which Excel reads, names the delimiter
            and is copied.

    Raises: ConfigError: no column is named. DataError: there is no such column, or quotation marks are malformed.
    """
    begin = int(text.startswith("\ufeff"))
    found, start = csv_delimiter(text, begin)
    if delimiter is None or start > begin:  # a line above the table names it
        delimiter, is_tsv = found, delimiter == found == "\t"
    else:
        is_tsv = True
    # A file without line feeds is from an old Mac.
    lines = io.StringIO(text[start:], newline="\n" if "\n" in text else "\r")
    rows = read_rows(lines, delimiter, quotes=not is_tsv, line=1 + (start > begin), start=start)
    first = next((row for row in rows if not row.is_blank), None)
    if first is None:
        return Document(text, ())
    if not columns:
        raise ConfigError(
            f"name the columns to translate; the first line has {named([cell.text for cell in first.cells])}.",
            in_command="Name them by --column, or translate all as lines by --format lines.",
        )
    chosen = columns_of(columns, first, "--column")
    places = sorted({*chosen.places})
    notes = []
    if not chosen.has_header and is_header(first.cells[place].text for place in places):
        notes.append(f"line {first.line} looks like a header, and is translated; name the column, and it stays")
    segments: list[Segment] = []
    short = 0
    for row in rows if chosen.has_header else chain([first], rows):
        if chosen.has_header or not is_tsv:
            check_width(row, first)
        short += not row.is_blank and places[-1] >= len(row.cells)
        for place in places:
            if place < len(row.cells):
                segments += _csv_lines(row.cells[place], delimiter, is_tsv)
    if short:
        notes.append(f"rows without a column that is translated: {short:,}")
    return Document(text, tuple(segments), notes=tuple(notes))


def _csv_lines(cell: Cell, delimiter: str, is_tsv: bool) -> Iterator[Segment]:
    """Yield the lines of a value."""
    for line in LINE.finditer(cell.raw, cell.is_quoted, len(cell.raw) - cell.is_quoted):
        value = line[0].replace('""', '"') if cell.is_quoted else line[0]
        if value.strip():
            build = partial(_build_csv, delimiter=delimiter, quoted=cell.is_quoted, is_tsv=is_tsv, like=value)
            yield Segment(cell.start + line.start(), cell.start + line.end(), (Text(value.strip()),), build)


def _build_csv(parts: Sequence[Part], *, delimiter: str, quoted: bool, is_tsv: bool, like: str) -> str:
    text = _with_spaces_of(like, plain(parts))
    if is_tsv:  # tabs and line ends always separate, and marks are text unless they are doubled in marks
        text = re.sub(r"[\t\r\n]", " ", text)
        return text.replace('"', '""') if quoted else text
    escaped = text.replace('"', '""')
    must_quote = not quoted and (delimiter in text or any(char in text for char in '"\r\n'))
    return f'"{escaped}"' if must_quote else escaped


def read_jsonl(text: str, keys: Sequence[str]) -> Document:
    """Return the lines of the values of some keys of each line's object.

    Args: keys: names; `translation.en` is the key `en` in the object `translation`. A value is a text or a list of
        texts.

    Raises: ConfigError: no key is named. DataError: a line is not one JSON object, lacks a key, or its value is no
        text or contains half a surrogate pair.
    """
    if not keys:
        raise ConfigError(
            "name the keys to translate, for example text.",
            in_command="Name them by --column, or translate all as lines by --format lines.",
        )
    segments: list[Segment] = []
    ascii_only = text.isascii() and "\\u" in text
    start = int(text.startswith("\ufeff"))
    for number, line in enumerate(text[start:].split("\n"), 1):
        if line.strip():
            found = [place for key in keys for place in _places(line, key, number)]
            for low, high in sorted(set(found)):  # a key can be named twice
                value = json.loads(line[low:high], strict=False)
                try:
                    value.encode()
                except UnicodeEncodeError as error:
                    raise DataError(
                        f"line {number}: a text contains half a surrogate pair (U+{ord(value[error.start]):04X}),"
                        " which is not a character; repair the file."
                    ) from None
                for piece in JSON_LINE.finditer(line, low + 1, high - 1):
                    shown = json.loads(f'"{piece[1] or ""}"', strict=False)
                    if shown.strip():
                        build = partial(_build_json, ascii_only=ascii_only, like=shown)
                        place, end = start + piece.start(), start + piece.end()
                        segments.append(Segment(place, end, (Text(shown.strip()),), build))
        start += len(line) + 1
    return Document(text, tuple(segments))


def _places(line: str, key: str, number: int) -> list[tuple[int, int]]:
    """Return the places of the texts under a key."""
    try:
        begin = _skip(line, 0)
        low, high = _find(line, begin, key.split("."))
        if line[_DECODER.raw_decode(line, begin)[1] :].strip():
            raise DataError(f"line {number}: text follows the object; put each object on a line of its own.")
        if line[low] == '"':
            return [(low, high)]
        if line[low] == "[":
            return _texts(line, low)
    except (ValueError, IndexError, RecursionError) as error:
        raise DataError(f"line {number} is not a JSON object: {error}.") from None
    except KeyError:
        try:
            record = json.loads(line, strict=False)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise DataError(f"line {number} is not a JSON object.") from None
        raise DataError(f"line {number} has no key {key!r}; its keys are: {named(sorted(record))}.") from None
    except TypeError:
        pass
    raise DataError(f"line {number}: the value of {key!r} is neither a text nor a list of texts.")


_DECODER = json.JSONDecoder(strict=False)


def _find(line: str, place: int, names: Sequence[str]) -> tuple[int, int]:
    """Return the place of a nested value, by its names, below the value at `place`."""
    if not names:
        return place, _DECODER.raw_decode(line, place)[1]
    if line[place] != "{":
        raise KeyError(names[0])
    found = None
    place = _skip(line, place + 1)
    while line[place] != "}":
        name, place = _DECODER.raw_decode(line, place)
        place = _skip(line, _skip(line, place) + 1)  # the colon
        if name == ".".join(names):  # the name of one key, whether or not it has a dot
            found = _find(line, place, ())
        elif name == names[0]:
            found = _find(line, place, names[1:])
        place = _skip(line, _DECODER.raw_decode(line, place)[1])
        if line[place] == ",":
            place = _skip(line, place + 1)
    if found is None:
        raise KeyError(names[0])
    return found


def _texts(line: str, place: int) -> list[tuple[int, int]]:
    found = []
    place = _skip(line, place + 1)
    while line[place] != "]":
        value, end = _DECODER.raw_decode(line, place)
        if not isinstance(value, str):
            raise TypeError
        found.append((place, end))
        place = _skip(line, end)
        if line[place] == ",":
            place = _skip(line, place + 1)
    return found


def _skip(line: str, place: int) -> int:
    while line[place] in " \t\r":
        place += 1
    return place


def _build_json(parts: Sequence[Part], *, ascii_only: bool, like: str) -> str:
    return json.dumps(_with_spaces_of(like, plain(parts)), ensure_ascii=ascii_only)[1:-1]


def _with_spaces_of(like: str, text: str) -> str:
    """Return the text with the white space around the source's line."""
    return like[: len(like) - len(like.lstrip())] + text + like[len(like.rstrip()) :]
