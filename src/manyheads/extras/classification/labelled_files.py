"""Labelled texts from files: a TSV file, a JSONL file, or a file of texts and one of labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe
from manyheads.data.translation.readers import aligned_lines, json_record, mended, nested_value, preview
from manyheads.errors import ConfigError, DataError
from manyheads.extras.tables.cells import Columns, check_width, columns_of, is_header, named, width
from manyheads.extras.tables.pairs import read_table

_FORMS = ("tsv", "jsonl", "texts")
_KEYS = "--label-key and --text-key"


class Labelled(NamedTuple):
    """A label and a text. line: number of its line in the file, from 1; 0: it is of no file."""

    label: str
    text: str
    line: int = 0


@dataclass
class LabelledReport(ReadReport):
    """See `ReadReport`. empty_dropped: lines without text or label that were left out."""

    empty_dropped: int = 0


class LabelledTexts(Protocol):
    """The input of a split."""

    def read(self, report: LabelledReport) -> Iterator[Labelled]: ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class LabelledList:
    """Labelled texts in memory, with a name for the manifest."""

    name: str
    rows: list[Labelled]

    def read(self, report: LabelledReport) -> Iterator[Labelled]:
        report.lines += len(self.rows)
        yield from self.rows

    def describe(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class LabelledFiles:
    """The labelled texts of one split: `tsv`, or `jsonl`, or `texts` and `labels`.

    Args:
        tsv: file of `label<TAB>text` lines; further tabs belong to the text. Or keys name its columns.
        jsonl: file of JSON objects, one per line.
        texts: file of texts, one per line.
        labels: file of their labels, in the same order.
        text_key: key of the text in JSONL, or column in TSV; dots lead into nested objects. None: `text`.
        label_key: key of the label, a text or a whole number. None: `label`.
        on_bad_utf8: `fail`, `replace` bad bytes by U+FFFD, or `skip` the line; counted.
        on_empty: a line without text or without label: `fail`, or `skip` it; counted.

    Raises: ConfigError: not exactly one of the forms is given, or one of two aligned files is missing.
    """

    tsv: str | None = None
    jsonl: str | None = None
    texts: str | None = None
    labels: str | None = None
    text_key: str | None = None
    label_key: str | None = None
    on_bad_utf8: OnBadUtf8 = "fail"
    on_empty: str = "fail"

    def __post_init__(self) -> None:
        if (self.texts is None) != (self.labels is None):
            given, missing = ("texts", "labels") if self.labels is None else ("labels", "texts")
            raise ConfigError(f"There is a file of {given} but none of {missing}; give both, line by line.")
        forms = [name for name in _FORMS if getattr(self, name) is not None]
        if len(forms) != 1:
            found = " and ".join(forms) or "none of them"
            raise ConfigError(f"Give labelled texts as a TSV file, a JSONL file, or texts and labels; given: {found}.")
        if self.texts == self.labels == "-":
            raise ConfigError("Texts and labels cannot both be standard input; use a TSV file.")

    @property
    def has_keys(self) -> bool:
        """Whether the form has keys or columns, which `text_key` and `label_key` name."""
        return self.texts is None

    def describe(self) -> str:
        """Return the names of the files."""
        return " + ".join(
            describe(path) for path in (self.tsv, self.jsonl, self.texts, self.labels) if path is not None
        )

    def read(self, report: LabelledReport) -> Iterator[Labelled]:
        """Yield the rows in order.

        Raises: DataError: a file cannot be read or decoded, the numbers of lines of texts and labels differ, a line has
            another form, or its text or label is empty and `on_empty` is `fail`.
        """
        for number, row in self._rows(report):
            report.lines += 1
            if row is None:
                report.bad_utf8_skipped += 1
                continue
            label, text = row[0].strip(), row[1]
            if label and text.strip():
                yield Labelled(label, text, number)
                continue
            if self.on_empty == "fail":
                what = "no text" if label else "no label"
                where = describe(str((self.labels if not label else None) or self.texts or self.tsv or self.jsonl))
                raise DataError(
                    f"{where}: line {number} has {what}; correct it, or leave out such lines by --on-empty skip."
                )
            report.empty_dropped += 1

    def _rows(self, report: ReadReport) -> Iterator[tuple[int, tuple[str, str] | None]]:
        """Yield the line, and label and text; None for a line that is skipped."""
        if self.tsv is not None:
            return self._tsv_rows(self.tsv, report)
        if self.jsonl is not None:
            return enumerate(self._jsonl_rows(self.jsonl, report), 1)
        assert self.texts is not None
        assert self.labels is not None
        pairs = aligned_lines(self.texts, self.labels, self.on_bad_utf8, report)
        return enumerate((None if pair is None else (pair[1], pair[0]) for pair in pairs), 1)

    def _tsv_rows(self, path: str, report: ReadReport) -> Iterator[tuple[int, tuple[str, str] | None]]:
        name, columns, first = f"{describe(path)}: ", None, None
        is_bare = self.label_key is None and self.text_key is None
        for row in read_table(path, self.on_bad_utf8, report, is_tsv=True):
            if row is None or row.is_blank:
                yield (0, None) if row is None else (row.line, ("", ""))
                continue
            texts = [cell.text for cell in row.cells]
            if columns is None:  # the first row
                if not is_bare:
                    columns = columns_of([self.label_key or "label", self.text_key or "text"], row, _KEYS, name)
                    report.headers_kept += not columns.has_header and is_header(texts)
                    if columns.has_header:
                        first = row
                        continue
                elif len(texts) > 1 and is_header(texts):
                    raise DataError(
                        f"{name}line {row.line} looks like a header: {named(texts)}. Name the columns by {_KEYS}; if it"
                        " is a label and a text, give --label-key 1 --text-key 2."
                    )
                else:
                    columns = Columns((0, 1), False)
            if max(columns.places) >= len(texts):
                shown = f"no tab: {preview(texts[0])}" if len(texts) == 1 else f"only {width(row)}"
                raise DataError(f"{name}line {row.line} has {shown}; expected label<TAB>text.")
            if first is not None:
                check_width(row, first, name)
            yield row.line, (texts[columns.places[0]], " ".join(texts[1:]) if is_bare else texts[columns.places[1]])

    def _jsonl_rows(self, path: str, report: ReadReport) -> Iterator[tuple[str, str] | None]:
        for number, line in enumerate(decoded_lines(path, self.on_bad_utf8, report), 1):
            if line is None:
                yield None
                continue
            if not line.strip():
                yield "", ""
                continue
            where = f"{describe(path)}: line {number}"
            record = json_record(line, where)
            values = [
                nested_value(record, self.label_key or "label", where, whole=True),
                nested_value(record, self.text_key or "text", where),
            ]
            yield mended(values, where, self.on_bad_utf8, report)
