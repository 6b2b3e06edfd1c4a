"""Translation of a document: only its text changes, everything else stays as it is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from manyheads.cli.lines.output import LineWriter, is_resumable, telling_what_is_kept
from manyheads.cli.process import echo
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import option
from manyheads.data.lines import GivenItems, ReadReport, describe, phase_progress, read_chunks
from manyheads.distributed.sharded_lines import model_identity, run_lines
from manyheads.errors import ConfigError, DataError
from manyheads.extras.documents.formats import FORMATS, decode, format_of, read_document
from manyheads.extras.documents.sentence_ends import split_sentences
from manyheads.text.sides import language_tag

if TYPE_CHECKING:
    from manyheads.decoding.translator import Translator
    from manyheads.extras.documents.parts import Document
    from manyheads.extras.documents.terms import ForcedTerms, Terms
    from manyheads.extras.documents.translating import DocumentReport, Unit

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
