"""Sentence pairs from files: two aligned files, tab-separated values, JSON lines, tables, Parquet, or other formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path, PurePath
from typing import Any

from manyheads.catalogue import HOOKS, load
from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe, read_lines
from manyheads.errors import ConfigError, DataError

__all__ = ["PairFiles", "ReadReport", "aligned_lines", "check_segments", "first_suspicious", "read_lines"]

Pairs = Iterator[tuple[str, str] | None]
HALF_PAIR = re.compile("[\ud800-\udfff]")
MOST_NAMED = 8
MOST_SHOWN = 60
KEYS = "--source-key and --target-key"


def nested_value(
    record: Mapping[str, Any], key: str, where: str, *, null: str | None = None, whole: bool = False
) -> str:
    """Return the text that a key leads to; dots lead into nested objects, unless the whole key is there.

    Args: null: the text of a value that is None; None: there must be none. whole: the value may be a whole number.

    Raises: DataError: there is no such key, or its value is not a text.
    """
    found: Any = record
    for name in [key] if key in record else key.split("."):
        if found is None and null is not None:
            return null
        if not isinstance(found, Mapping) or name not in found:
            names = ", ".join(sorted(map(str, found))[:MOST_NAMED]) if isinstance(found, Mapping) else "none"
            raise DataError(f"{where} has no key {key!r}; its keys are: {names or 'none'}. Name the keys of your file.")
        found = found[name]
    if found is None and null is not None:
        return null
    if whole and type(found) is int:
        return str(found)
    if not isinstance(found, str):
        raise DataError(f"{where}: the value of {key!r} is not text: {preview(str(found))}.")
    return found


def json_record(line: str, where: str) -> dict[str, Any]:
    """Return the JSON object in a line. Raises: DataError: the line holds no JSON object."""
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}.") from None
    if not isinstance(record, dict):
        raise DataError(f"{where} is not a JSON object: {preview(line)}.")
    return record


def mended(texts: list[str], where: str, on_bad_utf8: OnBadUtf8, report: ReadReport) -> tuple[str, str] | None:
    """Return two texts of a JSON object as lines: line breaks become spaces, and half surrogate pairs U+FFFD.

    Returns: None for a pair that is skipped because of half a surrogate pair.
    Raises: DataError: there is one, and `on_bad_utf8` is `fail`.
    """
    whole = [whole_text(text, where, on_bad_utf8, report) for text in texts]
    if None in whole:
        return None
    report.line_breaks_replaced += any("\n" in text for text in texts)
    first, second = (one_line(text or "") for text in whole)
    return first, second


def whole_text(text: str, where: str, on_bad_utf8: OnBadUtf8, report: ReadReport) -> str | None:
    """Return a text of a JSON object without half surrogate pairs; None: it is skipped because of one.

    Raises: DataError: there is one, and `on_bad_utf8` is `fail`.
    """
    if HALF_PAIR.search(text) is None:
        return text
    if on_bad_utf8 == "fail":
        raise DataError(
            f"{where} holds half a surrogate pair (as \\ud800), which is not valid Unicode text."
            " Correct it, or let --on-bad-utf8 replace it."
        )
    if on_bad_utf8 == "skip":
        return None
    report.bad_utf8_replaced += 1
    return HALF_PAIR.sub("\ufffd", text)


def preview(text: str) -> str:
    """Return the beginning of a text, for messages."""
    return repr(text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "…")


def one_line(text: str) -> str:
    """Replace line breaks by spaces, because every sentence must fit in a line."""
    return text.replace("\r\n", " ").replace("\n", " ")


# Known formats without a reader: line by line, their keys, times and code would be translated. Endings that also
# name a language, such as `.rar` and `.smi`, are left out where lines are more likely.
_UNREAD = {
    "subtitles in another format": "ass ssa sbv sub ttml dfxp lrc",
    "a catalogue of messages": "po pot xlf xliff sdlxliff mqxliff resx resw strings stringsdict xcstrings arb ftl",
    "a translation memory or glossary": "tmx tbx",
    "code": "py js cjs mjs jsx tsx java php",
    "JSON": "json json5 jsonc geojson ipynb webmanifest",
    "XML": "xml svg rss atom xsl xslt plist dita docbook opf ncx fb2",
    "a file of settings": "yaml yml toml ini properties cfg",
    "markup of another kind": "rst adoc asciidoc tex latex textile mediawiki mdx",
    "an office document": "docx doc odt rtf pages pptx ppt odp xlsx xls ods numbers",
    "a book or a printed page": "pdf epub mobi azw3 djvu",
}
# Of these no ending is also the name of a language, as `arb` and `lrc` are, so files of lines do not bear them.
_NEVER_LINES = ("a translation memory or glossary", "JSON", "XML", "an office document", "a book or a printed page")


def unread_format(name: str) -> str | None:
    """Return what a file of this name is, if it is in a known format without a reader; before `.gz`."""
    ending = PurePath(name.lower().removesuffix(".gz")).suffix[1:]
    return next((what for what, endings in _UNREAD.items() if ending in endings.split()), None)


def refuse_documents(*paths: str | Path) -> None:
    """Check that files, whose lines are to be read as sentences, are no documents by their names.

    Raises: DataError: one is.
    """
    for path in paths:
        what = unread_format(str(path))
        if what in _NEVER_LINES:
            raise DataError(
                f"{describe(path)} is {what}, and its lines are no sentences; convert it to a file with one sentence a"
                " line, or rename it if it is one."
            )


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
        languages: of source and target in a TMX file; None: see `extras.tmx.reader`.
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
        pairs: Pairs
        match self._form:
            case ".jsonl":
                lines = decoded_lines(path, self.on_bad_utf8, report)
                return jsonl_pairs(lines, path, keys, self.on_bad_utf8, report)
            case ".csv" | ".tsv":
                read = load(HOOKS["pairs in a table"])
                pairs = read(path, given, self.on_bad_utf8, report, is_tsv=self._form == ".tsv")
                return pairs
            case ".tmx":
                pairs = load(HOOKS["tmx"])(path, self.languages, self.on_bad_utf8, report)
                return pairs
            case ".parquet":
                pairs = load(HOOKS["pairs in parquet"])(path, keys, report)
                return pairs
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
    one, two = getattr(line, "place", None), getattr(other, "place", None)  # document and number, of segments alone
    if one is not None and two is not None and one != two:
        mine, its = (f"{segment!r} of document {document!r}" for document, segment in (one, two))
        raise DataError(
            f"The files are not aligned: segment {number} of {describe(source)} is {mine}, that of"
            f" {describe(target)} {its}. Give files of the same texts in the same order."
        )


def _is_suspicious(source: str, target: str) -> bool:
    """Return whether one side is empty, or much longer than five times the other, as after a shift by one line."""
    short, long = sorted((len(source.strip()), len(target.strip())))
    return (short == 0) != (long == 0) or long > 5 * short + 20


def jsonl_pairs(
    lines: Iterable[str | None],
    path: str | Path,
    keys: tuple[str, str],
    on_bad_utf8: OnBadUtf8,
    report: ReadReport,
    first: int = 1,
) -> Iterator[tuple[str, str] | None]:
    """Yield the pairs of lines of a JSONL file; None for one that is skipped. first: number of the first line."""
    for number, line in enumerate(lines, first):
        if line is None:
            yield None
        elif not line.strip():
            yield "", ""
        else:
            where = f"{describe(path)}: line {number}"
            record = json_record(line, where)
            yield mended([nested_value(record, key, where) for key in keys], where, on_bad_utf8, report)
