"""Labelled texts from files: a TSV file, a JSONL file, or a file of texts and one of labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe
from manyheads.data.pair_formats import nested_value, one_line
from manyheads.errors import ConfigError, DataError

__all__ = ["Labelled", "LabelledFiles", "LabelledList", "LabelledReport", "LabelledTexts"]

_MISSING = object()
_PREVIEW = 60
_FORMS = ("tsv", "jsonl", "texts")


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
        tsv: file of `label<TAB>text` lines; further tabs belong to the text.
        jsonl: file of JSON objects, one per line.
        texts: file of texts, one per line.
        labels: file of their labels, in the same order.
        text_key: key of the text in JSONL; dots lead into nested objects.
        label_key: key of the label, a text or a whole number.
        on_bad_utf8: `fail`, `replace` bad bytes by U+FFFD, or `skip` the line; counted.
        on_empty: a line without text or without label: `fail`, or `skip` it; counted.

    Raises: ConfigError: not exactly one of the forms is given, or one of two aligned files is missing.
    """

    tsv: str | None = None
    jsonl: str | None = None
    texts: str | None = None
    labels: str | None = None
    text_key: str = "text"
    label_key: str = "label"
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
        for number, row in enumerate(self._rows(report), 1):
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

    def _rows(self, report: ReadReport) -> Iterator[tuple[str, str] | None]:
        if self.tsv is not None:
            return self._tsv_rows(self.tsv, report)
        if self.jsonl is not None:
            return self._jsonl_rows(self.jsonl, report)
        assert self.texts is not None
        assert self.labels is not None
        return self._aligned_rows(self.texts, self.labels, report)

    def _tsv_rows(self, path: str, report: ReadReport) -> Iterator[tuple[str, str] | None]:
        for number, line in enumerate(decoded_lines(path, self.on_bad_utf8, report), 1):
            if line is None:
                yield None
                continue
            label, tab, text = line.partition("\t")
            if line.strip() and not tab:
                shown = line if len(line) <= _PREVIEW else line[:_PREVIEW] + "…"
                raise DataError(f"{describe(path)}: line {number} has no tab: {shown!r}; expected label<TAB>text.")
            yield label, text.replace("\t", " ")

    def _jsonl_rows(self, path: str, report: ReadReport) -> Iterator[tuple[str, str] | None]:
        for number, line in enumerate(decoded_lines(path, self.on_bad_utf8, report), 1):
            if line is None:
                yield None
                continue
            if not line.strip():
                yield "", ""
                continue
            where = f"{describe(path)}: line {number}"
            label, text = _json_values(line, (self.label_key, self.text_key), where)
            if any("\ud800" <= char <= "\udfff" for char in label + text):
                if self.on_bad_utf8 == "fail":
                    raise DataError(
                        f"{where} holds half a surrogate pair (as \\ud800), which is not valid Unicode text."
                        " Correct it, or let --on-bad-utf8 replace it."
                    )
                if self.on_bad_utf8 == "skip":
                    yield None
                    continue
                report.bad_utf8_replaced += 1
                label, text = (
                    one.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for one in (label, text)
                )
            report.line_breaks_replaced += "\n" in label or "\n" in text
            yield one_line(label), one_line(text)

    def _aligned_rows(self, texts: str, labels: str, report: ReadReport) -> Iterator[tuple[str, str] | None]:
        counts = [0, 0]
        sides = (decoded_lines(path, self.on_bad_utf8, report) for path in (texts, labels))
        for text, label in zip_longest(*sides, fillvalue=_MISSING):
            counts[0] += text is not _MISSING
            counts[1] += label is not _MISSING
            if counts[0] != counts[1]:
                continue
            yield (label, text) if isinstance(text, str) and isinstance(label, str) else None
        if counts[0] != counts[1]:
            raise DataError(
                f"{describe(texts)} has {counts[0]:,} lines, but {describe(labels)} has {counts[1]:,}"
                ' (lines end at "\\n" alone); each text needs one label, line by line.'
            )


def _json_values(line: str, keys: tuple[str, str], where: str) -> list[str]:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}.") from None
    if not isinstance(record, dict):
        raise DataError(f"{where} is not a JSON object.")
    label = record.get(keys[0])
    if type(label) is int:
        record = {**record, keys[0]: str(label)}
    return [nested_value(record, key, where) for key in keys]
