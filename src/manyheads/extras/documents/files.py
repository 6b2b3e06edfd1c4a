"""Translation of a document: only its text changes, everything else stays as it is; resumable.

Formats by name and by the ending of a file's name, and the plainest one: paragraphs of text.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from manyheads.cli.lines.output import LineWriter, is_resumable, telling_what_is_kept
from manyheads.cli.process import echo
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import option
from manyheads.data.lines import GivenItems, ReadReport, describe, phase_progress, read_chunks
from manyheads.data.translation.readers import unread_format
from manyheads.distributed.sharded_lines import model_identity, run_lines
from manyheads.errors import ConfigError, DataError
from manyheads.extras.documents.parts import LINE_END, Document, Part, Segment, Text, lay_out, line_end_of, trimmed
from manyheads.extras.documents.sentence_ends import split_sentences
from manyheads.text.sides import language_tag

if TYPE_CHECKING:
    from manyheads.decoding.translator import Translator
    from manyheads.extras.documents.terms import ForcedTerms, Terms
    from manyheads.extras.documents.translating import DocumentReport, Unit


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


SENTENCES_AT_ONCE = 64  # at most this many sentences are lost if the command is interrupted
MAX_DOCUMENT_BYTES = 64 * 2**20
"""Largest size of a document.

A book has one or two million bytes; an analysed document needs ten times its size in memory.
"""


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    """Options for documents, of which only the text is translated."""

    format: Literal["auto", "lines", "text", "markdown", "html", "srt", "vtt", "csv", "tsv", "jsonl"] = option(
        "Format of INPUT: lines, or a document whose text is translated sentence by sentence; auto: by the ending of "
        f"its name ({', '.join(suffix for one in FORMATS.values() for suffix in one.suffixes)}), otherwise lines.",
        default="auto",
    )
    column: tuple[str, ...] = option(
        "Columns of csv and tsv (names, or numbers from 1), or keys of jsonl (a.b is nested).",
        default=(),
        metavar="NAME ...",
    )
    terms: str | None = option(
        "File of terminology with lines source<TAB>target. If the source of a term occurs as a word, "
        "its target is forced in the translation; missing ones are counted.",
        default=None,
        metavar="FILE",
    )
    source_lang: str | None = option(
        "Language of the document (BCP 47), for splitting it into sentences.",
        metavar="TAG",
        default_is="the model's; without one, general rules",
    )

    def read_terms(self) -> ForcedTerms | None:
        """Return the terms; None: there is no --terms. Raises: DataError: the file cannot be read, or has none."""
        from manyheads.extras.documents.terms import ForcedTerms, Terms

        return None if self.terms is None else ForcedTerms(Terms.read(self.terms))

    def read_input(self, path: str, output: str) -> InputDocument | None:
        """Return the document of a command; None: its input is lines.

        Raises: ConfigError: an option that does not fit the format, a known format that is not read, or an output that
            is a folder. DataError: the file or the terms cannot be read or are damaged. MissingExtraError: the format
            needs a package that is not installed.
        """
        found = format_of(path) if self.format == "auto" else self.format
        if found is None or found == "lines":
            for option_name, value in (
                ("--column", self.column),
                ("--source-lang", self.source_lang),
            ):
                if value:
                    raise ConfigError(
                        f"{option_name} is for documents; name the format of the input by --format, for example text."
                    )
            return None
        if self.source_lang is not None:
            language_tag(self.source_lang, "--source-lang")
        if output != "-" and Path(output).is_dir():
            raise ConfigError(f"--output {output} is a folder; name a file in it.")
        name = describe(path)
        document = read_document(decode(_bytes_of(path, name), name), name, found, self.column)
        for note in document.notes:
            echo(f"manyheads: {name}: {note}", file=sys.stderr)
        from manyheads.extras.documents.terms import Terms

        return InputDocument(document, Terms() if self.terms is None else Terms.read(self.terms), self, name, path)


@dataclass(frozen=True)
class InputDocument:
    """A document that was read and can be translated.

    terms: to be forced. name: for messages. path: of the file; `-` is standard input.
    """

    document: Document
    terms: Terms
    options: DocumentOptions
    name: str
    path: str

    def translate(
        self,
        translator: Translator,
        model: str,
        output: str,
        overrides: dict[str, Any],
        *,
        lines_at_once: int,
        others: Mapping[str, Any],
    ) -> None:
        """Write the translated document.

        If the output is a file, blocks of finished sentences are kept beside it until it is complete. After an
        interruption, the same command continues from there.

        Args:
            model: its name on the command line.
            output: a file; `-` is standard output.
            overrides: fields of `DecodingSettings`.
            lines_at_once: maximum number of sentences that are translated together.
            others: see `TranslateOptions.identity`.

        Raises: as `Translator.translate`. SaveError: the output cannot be written.
        """
        from manyheads.extras.documents.translating import DocumentTranslation, UnitTranslator

        units = UnitTranslator(translator, self.terms, overrides)
        language = self.options.source_lang or (translator.languages[0][0] if translator.languages else None)
        translation = DocumentTranslation(
            self.document, partial(split_sentences, language=language), units.fits, keep_words=units.keep_words
        )
        size = min(lines_at_once, SENTENCES_AT_ONCE)
        total = len(translation.units)
        records: list[str] = []
        reports: list[DocumentReport] = []

        def write(lines: list[str]) -> None:
            """Keep the records of a block; with the last one, write the document."""
            records.extend(lines)
            if len(records) == total:
                text, report = translation.finish(records)
                _write(output, text)
                reports.append(report)

        with showing_if_long() as progress:

            def work(first: int, block: list[Unit]) -> list[str]:
                on_progress = phase_progress(progress, "translating sentences", total, first)
                # The search counts as half of the work: after it some sentences are searched again, and words are
                # aligned.
                found = units.translate(block, on_progress=lambda done: on_progress(done // 2))
                on_progress(len(block))
                return found

            source = GivenItems(translation.units, size, [self.path], ReadReport())
            identity = {  # what determines the translations
                "command": "translate document",
                "model": model_identity(model),
                **others,
                "settings": asdict(translator.options(**overrides)),
                "format": asdict(self.options),
                "terms": [asdict(term) for term in self.terms],
                "language": language,
                "size": size,
                "precision": translator.precision,
                "target_lang": translator.target_lang,
            }
            resumable = is_resumable(output, self.path)
            with telling_what_is_kept(output, resumable):
                run_lines(source, work, write, output=output, identity=identity, resumable=resumable and total > 0)
        if total == 0:
            write([])
        for report in reports:
            for number, line in enumerate(report.describe()):
                echo(f"manyheads: {self.name}: {line}" if number == 0 else f"  {line}", file=sys.stderr)


def _bytes_of(path: str, name: str) -> bytes:
    chunks: list[bytes] = []
    size = 0
    for chunk in read_chunks(path, expected="a document"):
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_DOCUMENT_BYTES:
            raise DataError(
                f"{name} has more than {MAX_DOCUMENT_BYTES:,} bytes, and a document is read as a whole. Split it, or"
                " translate it line by line: --format lines."
            )
    return b"".join(chunks)


def _write(output: str, text: str) -> None:
    if output == "-":
        with LineWriter("-") as writer:
            writer.write_text(text)
        return
    from manyheads.files.commit import write_output

    write_output(Path(output), text.encode())
