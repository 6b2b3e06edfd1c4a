"""Sentence pairs from tables and Parquet files, and the values of JSON records and nested keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe
from manyheads.errors import DataError, needing_extra
from manyheads.text.tables import (
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
    broken = sum(HALF_PAIR.search(text) is not None for text in texts)
    if broken and on_bad_utf8 == "fail":
        raise DataError(
            f"{where} holds half a surrogate pair (as \\ud800), which is not valid Unicode text."
            " Correct it, or let --on-bad-utf8 replace it."
        )
    if broken and on_bad_utf8 == "skip":
        return None
    report.bad_utf8_replaced += broken
    report.line_breaks_replaced += any("\n" in text for text in texts)
    first, second = (one_line(HALF_PAIR.sub("\ufffd", text)) for text in texts)
    return first, second


def preview(text: str) -> str:
    """Return the beginning of a text, for messages."""
    return repr(text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "…")


def read_table(path: str | Path, on_bad_utf8: OnBadUtf8, report: ReadReport, *, is_tsv: bool) -> Iterator[Row | None]:
    """Yield the rows of a CSV or TSV file; None for a row that is skipped because of bad bytes.

    The delimiter of CSV is that of its first line. A line such as `sep=;` above the table, which Excel reads, names it.

    Raises: DataError: see `text.tables.read_rows`.
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

    Args: keys: see `text.tables.columns_of`; None: `source` and `target`. Without both keys, the first two columns of a
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


def parquet_pairs(path: str | Path, keys: tuple[str, str], report: ReadReport) -> Pairs:
    """Return the pairs of two columns of a Parquet file; dots lead into nested columns, as in `translation.en`.

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
            number = 0
            for batch in file.iter_batches(columns=columns, batch_size=4096):
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
