"""The formats of documents, by name and by the ending of a file's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Literal

from manyheads.documents.parts import Document
from manyheads.errors import ConfigError, DataError

__all__ = ["FORMATS", "FormatName", "decode", "format_of", "read_document"]

FormatName = Literal["text", "markdown", "html", "srt", "vtt", "csv", "tsv", "jsonl"]


@dataclass(frozen=True)
class _Format:
    """suffixes: of files that are read in this format without being asked. has_columns: needs the names of columns."""

    suffixes: tuple[str, ...]
    read: Callable[..., Document]
    has_columns: bool = False


def _plain(text: str) -> Document:
    from manyheads.documents.plain import read_plain

    return read_plain(text)


def _markdown(text: str) -> Document:
    from manyheads.documents.markdown import read_markdown

    return read_markdown(text)


def _html(text: str) -> Document:
    from manyheads.documents.html import read_html

    return read_html(text)


def _subtitles(text: str, *, entities: bool) -> Document:
    from manyheads.documents.subtitles import read_subtitles

    return read_subtitles(text, entities=entities)


def _csv(text: str, columns: Sequence[str], *, delimiter: str | None = None) -> Document:
    from manyheads.documents.columns import read_csv

    return read_csv(text, columns, delimiter=delimiter)


def _jsonl(text: str, columns: Sequence[str]) -> Document:
    from manyheads.documents.columns import read_jsonl

    return read_jsonl(text, columns)


FORMATS: dict[str, _Format] = {
    "text": _Format((), _plain),  # a .txt file is translated line by line, unless this format is asked for
    "markdown": _Format((".md", ".markdown"), _markdown),
    "html": _Format((".html", ".htm", ".xhtml"), _html),
    "srt": _Format((".srt",), partial(_subtitles, entities=False)),
    "vtt": _Format((".vtt",), partial(_subtitles, entities=True)),
    "csv": _Format((".csv",), _csv, has_columns=True),
    "tsv": _Format((".tsv",), partial(_csv, delimiter="\t"), has_columns=True),
    "jsonl": _Format((".jsonl", ".ndjson"), _jsonl, has_columns=True),
}


def format_of(path: str) -> str | None:
    """Return the format of a file by its name; None if the name does not tell."""
    suffix = PurePath(path).suffix.lower()
    return next((name for name, one in FORMATS.items() if suffix in one.suffixes), None)


def decode(data: bytes, name: str) -> str:
    """Return the text of a document; a byte order mark stays.

    Raises: DataError: it is not UTF-8; file, line and byte offset are named.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{name}: line {line}, byte {error.start}, is not UTF-8; convert the file: iconv -f latin1 -t UTF-8."
        ) from None


def read_document(text: str, name: str, format_name: str, columns: Sequence[str] = ()) -> Document:
    """Return the segments of a document.

    Args:
        text: the whole file.
        name: of the file, for messages.
        format_name: a key of `FORMATS`.
        columns: of CSV and TSV, columns; of JSONL, keys.

    Raises: ConfigError: columns are missing, unknown, or given for a format without them. DataError: the file is
        damaged. MissingExtraError: the format needs a package that is not installed.
    """
    chosen = FORMATS[format_name]
    if columns and not chosen.has_columns:
        raise ConfigError(f"--column {columns[0]} is for csv, tsv and jsonl; {name} is read as {format_name}.")
    try:
        return chosen.read(text, columns) if chosen.has_columns else chosen.read(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
