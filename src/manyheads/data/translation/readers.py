"""Sentence pairs from files: two aligned files, tab-separated values, JSON lines, or other formats by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe, read_lines
from manyheads.data.sgm import Segment
from manyheads.data.translation.pair_formats import (
    json_record,
    mended,
    nested_value,
    parquet_pairs,
    preview,
    table_pairs,
)
from manyheads.data.translation.tmx import tmx_pairs
from manyheads.data.translation.unread import refuse_documents
from manyheads.errors import ConfigError, DataError

__all__ = ["PairFiles", "ReadReport", "aligned_lines", "check_segments", "first_suspicious", "read_lines"]

MISSING = object()
FORMS = (".csv", ".tsv", ".jsonl", ".tmx", ".parquet")


@dataclass(frozen=True, kw_only=True)
class PairFiles:
    """The pairs of one split, from files: `source` and `target`, or `tsv`, or `jsonl`, or `pairs`.

    Args:
        source: file of source sentences, one per line.
        target: file of their translations, in the same order.
        tsv: file of `source<TAB>target` lines; further columns are ignored and counted. Or keys name its columns.
        jsonl: file of JSON objects, one per line.
        pairs: a file whose name ends in .csv, .tsv, .jsonl, .tmx (these also with .gz) or .parquet.
        source_key: key or column of the source sentence in JSONL, tables and Parquet; dots lead into nested ones. None:
            `source`, or the first column of a TSV file without such a header.
        target_key: the same of the target sentence.
        languages: of source and target in a TMX file; None: see `tmx.tmx_pairs`.
        on_bad_utf8: `fail`, `replace` bad bytes by U+FFFD, or `skip` the pair; counted.

    Raises: ConfigError: not exactly one of the forms is given, or one of two aligned files is missing.
    """

    source: str | Path | None = None
    target: str | Path | None = None
    tsv: str | Path | None = None
    jsonl: str | Path | None = None
    pairs: str | Path | None = None
    source_key: str | None = None
    target_key: str | None = None
    languages: tuple[str | None, str | None] = (None, None)
    on_bad_utf8: OnBadUtf8 = "fail"

    def __post_init__(self) -> None:
        if (self.source is None) != (self.target is None):
            given, missing = ("source", "target") if self.target is None else ("target", "source")
            raise ConfigError(f"There is a {given} file but no {missing} file; give both aligned files.")
        forms = [name for name in ("source", "tsv", "jsonl", "pairs") if getattr(self, name) is not None]
        if len(forms) != 1:
            found = " and ".join(forms) or "none of them"
            raise ConfigError(
                f"Give the pairs as two aligned files, a TSV file, a JSONL file, or a file of --pairs; given: {found}."
            )
        if self.on_bad_utf8 not in ("fail", "replace", "skip"):
            raise ConfigError(f"on_bad_utf8 is {self.on_bad_utf8!r}; it must be fail, replace or skip.")
        if str(self.source) == "-" and str(self.target) == "-":
            raise ConfigError("Source and target cannot both be standard input; use --tsv - or --jsonl -.")
        if self.pairs is not None and not self._form:
            tables = (".xlsx", ".xls", ".ods")
            remedy = " Save the table as CSV UTF-8." if str(self.pairs).lower().endswith(tables) else ""
            ends = f"the name of a file of pairs ends in {', '.join(FORMS)}.{remedy}"
            raise ConfigError(f"{describe(self.pairs)}: {ends}")

    @property
    def _path(self) -> str | Path:
        """The only file, or the first of two."""
        return next(path for path in (self.source, self.tsv, self.jsonl, self.pairs) if path is not None)

    @property
    def has_keys(self) -> bool:
        """Whether the form has keys or columns, which `source_key` and `target_key` name."""
        return self._form not in ("", ".tmx")

    @property
    def _form(self) -> str:
        """An entry of `FORMS`; empty for two aligned files, and for a name of `pairs` that ends in none of them."""
        if self.pairs is None:
            return "" if self.source is not None else ".tsv" if self.tsv is not None else ".jsonl"
        name = str(self.pairs).lower()
        plain = name if name.endswith(".parquet.gz") else name.removesuffix(".gz")
        return next((form for form in FORMS if plain.endswith(form)), "")

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
        """Yield the pairs in order, including pairs with an empty side, so that positions agree.

        Args: report: counts lines, and lines with bad bytes that were replaced or skipped.

        Raises: DataError: a file cannot be read or decoded (the message gives file, line and byte offset), the line
            counts of aligned files differ (it gives both counts), or a line is not a pair.
        """
        report = report if report is not None else ReadReport()
        for pair in self._pairs(self._path, report):
            report.lines += 1
            if pair is None:
                report.bad_utf8_skipped += 1
            else:
                yield pair

    def _pairs(self, path: str | Path, report: ReadReport) -> Iterator[tuple[str, str] | None]:
        given = (self.source_key, self.target_key)
        keys = (self.source_key or "source", self.target_key or "target")
        match self._form:
            case ".jsonl":
                return _jsonl_pairs(path, keys, self.on_bad_utf8, report)
            case ".csv" | ".tsv":
                return table_pairs(path, given, self.on_bad_utf8, report, is_tsv=self._form == ".tsv")
            case ".tmx":
                return tmx_pairs(path, self.languages, self.on_bad_utf8, report)
            case ".parquet":
                return parquet_pairs(path, keys, report)
        assert self.target is not None
        return aligned_lines(path, self.target, self.on_bad_utf8, report, _is_suspicious)

    def describe(self) -> str:
        """Return the names of the files, for messages and manifests."""
        return " + ".join(describe(path) for path in (self._path, self.target) if path is not None)


def aligned_lines(
    source: str | Path,
    target: str | Path,
    on_bad_utf8: OnBadUtf8,
    report: ReadReport,
    is_suspicious: Callable[[str, str], bool] | None = None,
) -> Iterator[tuple[str, str] | None]:
    """Yield pairs of lines of two files; both are read completely before unequal counts are reported.

    Args: is_suspicious: whether two lines do not look like a pair; the message names the first such pair.
    """
    refuse_documents(source, target)
    counts = [0, 0]
    suspicion = ""
    sides = (decoded_lines(path, on_bad_utf8, report) for path in (source, target))
    for line, other in zip_longest(*sides, fillvalue=MISSING):
        counts[0] += line is not MISSING
        counts[1] += other is not MISSING
        if counts[0] != counts[1]:
            continue
        if line is None or other is None:
            yield None
        elif isinstance(line, str) and isinstance(other, str):
            check_segments(line, other, counts[0], source, target)
            if not suspicion and is_suspicious is not None and is_suspicious(line, other):
                suspicion = f" Line {counts[0]} looks suspicious first: {preview(line)} beside {preview(other)}."
            yield line, other
    if counts[0] != counts[1]:
        hint = suspicion or ("" if is_suspicious is None else " No single pair looks wrong.")
        raise DataError(
            f"The files are not aligned: {describe(source)} has {counts[0]} lines, {describe(target)} has {counts[1]}"
            f' (lines end at "\\n" alone).{hint} Align the files again.'
        )


def first_suspicious(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a sentence about the first pair of lines that do not look like a pair, for files of unequal length."""
    for number, (line, other) in enumerate(pairs, 1):
        if _is_suspicious(line, other):
            return f" Line {number} looks suspicious first: {preview(line)} beside {preview(other)}."
    return " No single pair looks wrong."


def check_segments(line: str, other: str, number: int, source: str | Path, target: str | Path) -> None:
    """Raises: DataError: these texts of two files of WMT have different places there. number: of the texts, from 1."""
    if isinstance(line, Segment) and isinstance(other, Segment) and line.place != other.place:
        raise DataError(
            f"The files are not aligned: segment {number} of {describe(source)} is {_shown(line)}, that of"
            f" {describe(target)} {_shown(other)}. Give files of the same texts in the same order."
        )


def _shown(segment: Segment) -> str:
    return f"{segment.place[1]!r} of document {segment.place[0]!r}"


def _is_suspicious(source: str, target: str) -> bool:
    """Return whether one side is empty, or much longer than five times the other, as after a shift by one line."""
    short, long = sorted((len(source.strip()), len(target.strip())))
    return (short == 0) != (long == 0) or long > 5 * short + 20


def _jsonl_pairs(
    path: str | Path, keys: tuple[str, str], on_bad_utf8: OnBadUtf8, report: ReadReport
) -> Iterator[tuple[str, str] | None]:
    for number, line in enumerate(decoded_lines(path, on_bad_utf8, report), 1):
        if line is None:
            yield None
        elif not line.strip():
            yield "", ""
        else:
            where = f"{describe(path)}: line {number}"
            record = json_record(line, where)
            yield mended([nested_value(record, key, where) for key in keys], where, on_bad_utf8, report)
