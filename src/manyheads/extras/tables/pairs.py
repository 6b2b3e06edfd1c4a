"""Sentence pairs from tables: CSV, TSV and Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe
from manyheads.data.translation.readers import KEYS, Pairs, nested_value, one_line, preview
from manyheads.errors import DataError
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
from manyheads.installation import needing_extra

LOOKED_AT = 100  # rows that show whether a column has numbers only


def read_table(path: str | Path, on_bad_utf8: OnBadUtf8, report: ReadReport, *, is_tsv: bool) -> Iterator[Row | None]:
    """Yield the rows of a CSV or TSV file; None for a row that is skipped because of bad bytes.

    The delimiter of CSV is that of its first line. A line such as `sep=;` above the table, which Excel reads, names it.

    Raises: DataError: see `cells.read_rows`.
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

    Args: keys: see `cells.columns_of`; None: `source` and `target`. Without both keys, the first two columns of a TSV
        file that has no such header are the pairs.

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
