"""Columns of CSV and TSV files, and keys of JSONL files: the lines of their values are text, the rest is copied."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial

from manyheads.documents.parts import Document, Part, Segment, Text, plain
from manyheads.errors import ConfigError, DataError
from manyheads.text.csv_delimiter import csv_delimiter

__all__ = ["read_csv", "read_jsonl"]

LINE = re.compile(r"[^\r\n]+")
JSON_LINE = re.compile(r"(?:\\[nr])+|((?:[^\\]|\\[^nr])+)")  # line breaks, or a line
_Field = tuple[int, int]
MOST_NAMED = 8


def read_csv(text: str, columns: Sequence[str], *, delimiter: str | None = None) -> Document:
    """Return the lines of the values of some columns, without the header line.

    Args:
        columns: names in the first line. Or numbers from 1; then the first line is a row like the others.
        delimiter: the character between values. None: comma, semicolon, tab or |, whichever the first line has most. A
            line such as `sep=;` above it, which Excel reads, names the delimiter and is copied.

    Raises: ConfigError: no column is named, or there is no such column. DataError: a quoted value has no end.
    """
    start = int(text.startswith("\ufeff"))
    found, table = csv_delimiter(text, start)
    if delimiter is None or table > start:  # a line above the table names it
        delimiter, start = found, table
    rows = _rows(text, start, delimiter)
    if not rows:
        return Document(text, ())
    header = [_value(text, field) for field in rows[0]]
    if not columns:
        raise ConfigError(
            f"name the columns to translate with --column, or give --format lines. The first line has these columns:"
            f" {_named(header)}."
        )
    by_number = all(name.isdecimal() for name in columns) and not any(name in header for name in columns)
    chosen = [_column(name, header, by_number) for name in columns]
    segments: list[Segment] = []
    for row in rows[0 if by_number else 1 :]:
        for column in sorted(set(chosen)):
            if column < len(row):
                segments += _csv_lines(text, row[column], delimiter)
    return Document(text, tuple(segments))


def _csv_lines(text: str, field: _Field, delimiter: str) -> Iterator[Segment]:
    """Yield the lines of a value."""
    low, high = field
    quoted = low < high and text[low] == '"'
    for line in LINE.finditer(text, low + quoted, high - quoted):
        value = line[0].replace('""', '"') if quoted else line[0]
        if value.strip():
            build = partial(_build_csv, delimiter=delimiter, quoted=quoted, like=value)
            yield Segment(*line.span(), (Text(value.strip()),), build)


def _column(name: str, header: Sequence[str], by_number: bool) -> int:
    names = [one.strip() for one in header]
    if by_number:
        if not 1 <= int(name) <= len(header):
            raise ConfigError(
                f"--column {name}: there is no such column; the first line has the columns 1 to {len(header)}."
            )
        return int(name) - 1
    if name not in names:
        raise ConfigError(f"--column {name}: there is no such column; the first line has the columns {_named(names)}.")
    return names.index(name)


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(name if len(name) <= 30 else f"{name[:30]}…" for name in names[:MOST_NAMED])
    return shown + ", ..." * (len(names) > MOST_NAMED)


def _rows(text: str, start: int, delimiter: str) -> list[list[_Field]]:
    """Return the place of every value of every row (RFC 4180)."""
    pattern = re.compile(rf'("(?:[^"]|"")*"|(?!")[^{re.escape(delimiter)}\r\n]*)({re.escape(delimiter)}|\r\n|\r|\n|\Z)')
    rows: list[list[_Field]] = [[]]
    place = start
    while place < len(text):
        found = pattern.match(text, place)
        if found is None:
            line = text.count("\n", 0, place) + 1
            raise DataError(f"line {line}: a quotation mark is not closed, or text follows the closing one.")
        rows[-1].append(found.span(1))
        place = found.end()
        if found[2] != delimiter:
            rows.append([])
    return [row for row in rows if row]


def _value(text: str, field: _Field) -> str:
    shown = text[field[0] : field[1]]
    return shown[1:-1].replace('""', '"') if shown[:1] == '"' and len(shown) > 1 else shown


def _build_csv(parts: Sequence[Part], *, delimiter: str, quoted: bool, like: str) -> str:
    text = _with_spaces_of(like, plain(parts))
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
            "name the keys to translate with --column, for example --column text, or give --format lines."
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
        raise DataError(f"line {number} has no key {key!r}; its keys are: {_named(sorted(record))}.") from None
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
