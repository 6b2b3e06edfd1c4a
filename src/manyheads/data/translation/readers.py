"""Sentence pairs from files: two aligned files, tab-separated values, JSON lines, tables, Parquet, or other formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path, PurePath
from typing import Any

from manyheads.catalogue import HOOKS, load
from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe, read_lines
from manyheads.extras.sgm.segments import Segment
from manyheads.errors import ConfigError, DataError
from manyheads.installation import needing_extra
from manyheads.extras.tables.cells import (
    Columns,
    Row,
    check_width,
    columns_of,
    csv_delimiter,
    is_header,
    named,
    numbers_only,
    read_rows,
    width,
)

__all__ = ["PairFiles", "ReadReport", "aligned_lines", "check_segments", "first_suspicious", "read_lines"]

Pairs = Iterator[tuple[str, str] | None]
HALF_PAIR = re.compile("[\ud800-\udfff]")
MOST_NAMED = 8
MOST_SHOWN = 60
LOOKED_AT = 100  # rows that show whether a column has numbers only
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


def read_table(path: str | Path, on_bad_utf8: OnBadUtf8, report: ReadReport, *, is_tsv: bool) -> Iterator[Row | None]:
    """Yield the rows of a CSV or TSV file; None for a row that is skipped because of bad bytes.

    The delimiter of CSV is that of its first line. A line such as `sep=;` above the table, which Excel reads, names it.

    Raises: DataError: see `extras.tables.cells.read_rows`.
    """
    is_bad = False

    def lines() -> Iterator[str]:
        nonlocal is_bad
        for line in decoded_lines(path, on_bad_utf8, report):
            is_bad |= line is None
            yield (line or "") + "\n"

    source = lines()
    first = next(source, "")
    delimiter, above = csv_delimiter(first)
    if above:  # the line only names the delimiter
        first = next(source, "")
    elif is_tsv:
        delimiter = "\t"
    quotes, name = not is_tsv or delimiter != "\t", f"{describe(path)}: "
    given = chain([first] if first else [], source)
    for row in read_rows(given, delimiter, quotes=quotes, line=2 if above else 1, name=name):
        yield None if is_bad else row
        is_bad = False


def table_pairs(
    path: str | Path,
    keys: tuple[str | None, str | None],
    on_bad_utf8: OnBadUtf8,
    report: ReadReport,
    *,
    is_tsv: bool,
) -> Pairs:
    """Return the pairs of two columns of a CSV or TSV file.

    Args: keys: see `extras.tables.cells.columns_of`; None: `source` and `target`. Without both keys, the first two columns of a
        TSV file that has no such header are the pairs.

    Raises: DataError: no such column; a row without them, or with more columns than the header; in TSV without keys a
        header, or a column of numbers; and see `read_table`.
    """
    rows = read_table(path, on_bad_utf8, report, is_tsv=is_tsv)
    head = list(islice(rows, 1 if any(keys) else LOOKED_AT))
    name, filled = f"{describe(path)}: ", [row for row in head if row is not None and not row.is_blank]
    first = filled[0] if filled else Row(1, [])
    names = [cell.text.strip() for cell in first.cells]
    is_bare = is_tsv and not any(keys) and not {"source", "target"} <= {*names}
    if is_bare:
        columns = Columns((0, 1), False)
        _check_bare(filled, name)
    else:
        columns = columns_of([keys[0] or "source", keys[1] or "target"], first, KEYS, name)
        report.headers_kept += not columns.has_header and is_header(names[place] for place in columns.places)
    is_strict = columns.has_header or not is_tsv
    for row in chain(head, rows):
        if row is None:
            yield None
        elif row.is_blank:
            yield "", ""
        elif row is not first or not columns.has_header:
            yield _pair_of(row, columns, first if is_strict else None, name, report)
            report.columns_ignored += is_bare and len(row.cells) > 2


def _pair_of(row: Row, columns: Columns, first: Row | None, name: str, report: ReadReport) -> tuple[str, str]:
    """Return a row's pair. first: the row that must have as many columns; None: a row may have more."""
    if max(columns.places) >= len(row.cells):
        needed = f"column {max(columns.places) + 1} was asked for"
        if columns.has_header and first is not None:
            needed = f"the first has {len(first.cells)}"
        elif len(row.cells) == 1 and columns.places == (0, 1):
            raise DataError(
                f"{name}line {row.line} has no tab: {preview(row.cells[0].raw)}; expected source<TAB>target."
            )
        raise DataError(f"{name}line {row.line} has {width(row)}; {needed}.")
    if first is not None:
        check_width(row, first, name)
    texts = [row.cells[place].text for place in columns.places]
    report.line_breaks_replaced += any("\n" in text for text in texts)
    return one_line(texts[0]), one_line(texts[1])


def _check_bare(rows: Sequence[Row], name: str) -> None:
    """Raises: DataError: the first two columns of a TSV file do not look like text."""
    if not rows or len(rows[0].cells) < 2:
        return
    first = [cell.text.strip() for cell in rows[0].cells]
    if is_header(first[:2]):
        raise DataError(
            f"{name}line {rows[0].line} looks like a header: {named(first)}. Name the columns by {KEYS}; if it is a"
            " pair, give --source-key 1 --target-key 2."
        )
    numbers = [
        numbers_only(row.cells[place].raw for row in rows if place < len(row.cells)) for place in range(len(first))
    ]
    if any(numbers[:2]):
        place = numbers.index(True)
        texts = [str(place + 1) for place, is_number in enumerate(numbers) if not is_number]
        source, target = texts[:2] if len(texts) > 1 else ("N", "M")
        raise DataError(
            f"{name}column {place + 1} has numbers only ({preview(first[place])} in line {rows[0].line}), as ids have."
            f" Name the columns of the texts, perhaps --source-key {source} --target-key {target}; if the numbers are"
            " texts, --source-key 1 --target-key 2."
        )


def parquet_pairs(
    path: str | Path, keys: tuple[str, str], report: ReadReport, groups: Sequence[int] | None = None, first: int = 0
) -> Pairs:
    """Return the pairs of two columns of a Parquet file; dots lead into nested columns, as in `translation.en`.

    Args: groups: of rows, which are read alone; None: all. first: number of rows before them, for messages.

    Raises: DataError: it is no Parquet file, or has no such columns of text. MissingExtraError: pyarrow is not
        installed.
    """
    with needing_extra("Parquet files need the package pyarrow", "parquet"):
        import pyarrow
        import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = sorted({next((one for one in (key, key.split(".")[0]) if one in names), "") for key in keys})
            if "" in columns:
                missing = next(key for key in keys if key not in names and key.split(".")[0] not in names)
                raise DataError(
                    f"{describe(path)} has no column {missing!r}; it has: {named(names)}. Name the columns by {KEYS}."
                )
            number = first
            for batch in file.iter_batches(columns=columns, batch_size=4096, row_groups=groups):
                for record in batch.to_pylist():
                    number += 1
                    where = f"{describe(path)}: row {number}"
                    texts = [nested_value(record, key, where, null="") for key in keys]
                    report.line_breaks_replaced += any("\n" in text for text in texts)
                    yield one_line(texts[0]), one_line(texts[1])
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {describe(path)} as a Parquet file: {str(error).splitlines()[0]}.") from None


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
        match self._form:
            case ".jsonl":
                lines = decoded_lines(path, self.on_bad_utf8, report)
                return jsonl_pairs(lines, path, keys, self.on_bad_utf8, report)
            case ".csv" | ".tsv":
                return table_pairs(path, given, self.on_bad_utf8, report, is_tsv=self._form == ".tsv")
            case ".tmx":
                pairs: Pairs = load(HOOKS["tmx"])(path, self.languages, self.on_bad_utf8, report)
                return pairs
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
