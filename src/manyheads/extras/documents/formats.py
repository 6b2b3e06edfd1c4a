"""The formats of documents, by name and by the ending of a file's name, and the plainest one: paragraphs of text."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from manyheads.data.translation.readers import unread_format
from manyheads.errors import ConfigError, DataError
from manyheads.extras.documents.parts import LINE_END, Document, Part, Segment, Text, lay_out, line_end_of, trimmed


@dataclass(frozen=True)
class _Format:
    """A format.

    Attributes:
        suffixes: of files that are read in this format by default.
        reader: `module.function` in this package, imported when a document is read.
        options: for the reader.
        has_columns: needs the names of columns.
    """

    suffixes: tuple[str, ...]
    reader: str
    options: Mapping[str, Any] = field(default_factory=dict)
    has_columns: bool = False

    def read(self, text: str, columns: Sequence[str]) -> Document:
        """Return the segments of a document."""
        module, _, name = self.reader.partition(".")
        read = getattr(importlib.import_module(f"manyheads.extras.documents.{module}"), name)
        document: Document = read(text, *([columns] if self.has_columns else []), **self.options)
        return document


FORMATS: dict[str, _Format] = {
    # A .txt file is translated line by line, unless this format is asked for.
    "text": _Format((), "formats.read_plain"),
    "markdown": _Format((".md", ".markdown"), "markdown.read_markdown"),
    "html": _Format((".html", ".htm", ".xhtml"), "html.read_html"),
    "srt": _Format((".srt",), "subtitles.read_subtitles", {"entities": False}),
    "vtt": _Format((".vtt",), "subtitles.read_subtitles", {"entities": True}),
    "csv": _Format((".csv",), "columns.read_csv", has_columns=True),
    "tsv": _Format((".tsv",), "columns.read_csv", {"delimiter": "\t"}, has_columns=True),
    "jsonl": _Format((".jsonl", ".ndjson"), "columns.read_jsonl", has_columns=True),
}


def format_of(path: str) -> str | None:
    """Return the format of a file by its name, before `.gz`; None if no format has this ending.

    Raises: ConfigError: it is known to be a format that is not read.
    """
    name = path.lower().removesuffix(".gz")
    suffix = PurePath(name).suffix
    if what := unread_format(name):
        read = ", ".join(one for each in FORMATS.values() for one in each.suffixes)
        raise ConfigError(
            f"{path} is {what} ({suffix}), which is not read; documents are {read}. Convert it.",
            in_command="Or insist on translating each of its lines, with everything in it: --format lines.",
        )
    return next((name for name, one in FORMATS.items() if suffix in one.suffixes), None)


def decode(data: bytes, name: str) -> str:
    """Return the text of a document; a byte order mark stays.

    Raises: DataError: it is not UTF-8; file, line and byte offset are named.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        usual = "UTF-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "WINDOWS-1252"
        raise DataError(
            f"{name}: line {line}, byte {error.start}, is not UTF-8; convert the file:"
            f" iconv -f {usual} -t UTF-8 FILE > NEW."
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
        raise ConfigError(
            f"column {columns[0]} is given, but columns are of csv, tsv and jsonl only, and {name} is read as"
            f" {format_name}; leave it out.",
            in_command="Or give another --format.",
        )
    try:
        return chosen.read(text, columns)
    except (ConfigError, DataError) as error:
        raise type(error)(f"{name}: {error}", in_command=error.in_command) from None


PARAGRAPH = re.compile(r"(?<![^\r\n\ufeff])[^\r\n]*\S[^\r\n]*(?:(?:\r\n|\r|\n)[^\r\n]*\S[^\r\n]*)*")
ITEM = re.compile(r"\s*(?:[-*+•]|\d{1,2}[.)])\s")  # of a list


def read_plain(text: str) -> Document:
    """Return the paragraphs of a text.

    The lines of a paragraph are joined if they look wrapped, that is, if at every line end the next word does not fit
    into the width of the paragraph. Otherwise, and if several begin as items of a list, each line is a segment by
    itself, as in a poem.
    """
    segments: list[Segment] = []
    for paragraph in PARAGRAPH.finditer(text, int(text.startswith("\ufeff"))):
        if _is_wrapped(LINE_END.split(paragraph[0])):
            segments.append(_segment(text, *paragraph.span()))
            continue
        start = paragraph.start()
        for line_end in [*LINE_END.finditer(paragraph[0]), None]:
            end = paragraph.end() if line_end is None else paragraph.start() + line_end.start()
            segments.append(_segment(text, start, end))
            start = end if line_end is None else paragraph.start() + line_end.end()
    return Document(text, tuple(segments))


def _is_wrapped(lines: Sequence[str]) -> bool:
    if len(lines) == 1:
        return True
    if sum(ITEM.match(line) is not None for line in lines) > 1:  # one alone can be a date: `12. Mai`
        return False
    width = max(len(line.rstrip()) for line in lines)
    return all(len(line.rstrip()) + 1 + len(after.split()[0]) > width for line, after in pairwise(lines))


def _segment(text: str, start: int, end: int) -> Segment:
    start, end = trimmed(text, start, end)
    shown = text[start:end]
    joined = " ".join(line.strip(" \t") for line in LINE_END.split(shown))
    build: Callable[[Sequence[Part]], str] = partial(
        lay_out, escape=str, lines=LINE_END.split(shown), line_end=line_end_of(shown), prefix_characters=" \t"
    )
    return Segment(start, end, (Text(joined),), build)
