"""Sentence pairs from CSV, TMX and Parquet files, and the values of JSON records and nested keys."""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from manyheads.data.byte_lines import read_chunks
from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe
from manyheads.errors import DataError, needing_extra
from manyheads.text.csv_delimiter import csv_delimiter

__all__ = ["csv_pairs", "json_record", "mended", "nested_value", "parquet_pairs", "preview", "tmx_pairs"]

Pairs = Iterator[tuple[str, str] | None]
HALF_PAIR = re.compile("[\ud800-\udfff]")
MOST_NAMED = 8
MOST_SHOWN = 60
NAME_THEM = "Name the columns by --source-key and --target-key."
XML_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
# Elements in a TMX segment whose content is code of a document format, not text.
TMX_CODE = frozenset({"bpt", "ept", "it", "ph", "ut"})


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


def csv_pairs(path: str | Path, keys: tuple[str, str], on_bad_utf8: OnBadUtf8, report: ReadReport) -> Pairs:
    """Return the pairs of two columns of a CSV file; the delimiter is that of its first line.

    The columns are named as in its header. Numbers, from 1, name the columns of a file without a header. A line such as
    `sep=;` above, which Excel reads, names the delimiter.

    Raises: DataError: no such column, a row without them, a quotation mark that is not closed, or carriage returns as
        line ends.
    """
    try:
        yield from _csv_pairs(path, keys, on_bad_utf8, report)
    except csv.Error:
        raise DataError(
            f"{describe(path)} has a carriage return in a row, outside quotation marks. If its lines end in carriage"
            " returns alone, convert them (tr '\\r' '\\n'); otherwise put the text into quotation marks."
        ) from None


def _csv_pairs(path: str | Path, keys: tuple[str, str], on_bad_utf8: OnBadUtf8, report: ReadReport) -> Pairs:
    bad = ended = False

    def lines() -> Iterator[str]:
        nonlocal bad, ended
        for line in decoded_lines(path, on_bad_utf8, report):
            bad |= line is None
            yield "\n" if line is None else line + "\n"
        ended = True

    source = lines()
    first = next(source, "").removeprefix("\ufeff")
    above = 1  # lines of the header
    delimiter, table = csv_delimiter(first)
    if table:  # the line only names the delimiter
        first, above = next(source, ""), 2
    header = [name.strip() for name in next(csv.reader([first], delimiter=delimiter), [])]
    by_number = all(re.fullmatch("[1-9][0-9]{0,5}", key) and key not in header for key in keys)
    if by_number:
        source, above = chain([first] if first else [], source), above - 1
    for key in keys:
        if key not in header and not by_number:
            raise DataError(
                f"{describe(path)} has no column {key!r}; its first line has:"
                f" {', '.join(header[:MOST_NAMED]) or 'none'}. {NAME_THEM} Numbers, from 1, name the columns of a file"
                " without a header."
            )
    places = [int(key) - 1 if by_number else header.index(key) for key in keys]
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(source, delimiter=delimiter)
    began = above + 1
    needed = f"column {max(places) + 1} was asked for" if by_number else f"the first has {len(header)}"
    for row in reader:
        if ended:  # the reader looked for more of this row; its text would be the rest of the file
            raise DataError(
                f"{describe(path)}: the row that begins in line {began} has a quotation mark that is never closed;"
                " close it, or double the mark if it belongs to the text."
            )
        began = reader.line_num + above + 1
        if bad:
            bad = False
            yield None
        elif not row:
            yield "", ""
        elif max(places) >= len(row):
            raise DataError(f"{describe(path)}: line {reader.line_num + above} has {len(row)} columns; {needed}.")
        else:
            texts = [row[place] for place in places]
            report.line_breaks_replaced += any("\n" in text for text in texts)
            yield one_line(texts[0]), one_line(texts[1])


def tmx_pairs(path: str | Path, languages: tuple[str | None, str | None]) -> Pairs:
    """Return the segments of the translation units of a TMX file in two languages.

    Args: languages: as in BCP 47; None: of a file in two languages, `srclang` of its header is the source, the other
        language the target.

    A unit without one of the languages gives a pair with an empty side. Units before the first one by which both
    languages are known are left out.

    Raises: DataError: the file is not TMX, or has other or more languages.
    """
    source = target = None
    usual = "*all*"
    seen: set[str] = set()
    parser: ElementTree.XMLPullParser[Any] = ElementTree.XMLPullParser(("start", "end"))
    body = None
    try:
        for chunk in read_chunks(path):
            _feed(parser, chunk)
            events: Iterator[Any] = parser.read_events()
            for event, element in events:
                name = element.tag.rpartition("}")[2]
                if event == "start":
                    body = element if name == "body" else body
                    if name == "header":
                        usual = element.get("srclang", "*all*")
                    continue
                if name != "tu":
                    continue
                texts = _unit_texts(element)
                if body is not None:
                    body.clear()  # so that a large file does not stay in memory
                if not texts.keys() <= seen:
                    seen |= texts.keys()
                    source, target = _languages(languages, usual, seen, path)
                if source is not None and target is not None:
                    yield _of_language(texts, source), _of_language(texts, target)
        parser.close()
    except ElementTree.ParseError as error:
        raise DataError(f"{describe(path)} is not a TMX file: {error}.") from None
    if not seen:
        raise DataError(f"{describe(path)} has no translation units; is it a TMX file?")


def _feed(parser: ElementTree.XMLPullParser[Any], chunk: bytes) -> None:
    """Give bytes to the parser. Raises: ParseError: also for an encoding that is unknown, or unknown to the parser."""
    try:
        parser.feed(chunk)
    except (LookupError, ValueError) as error:
        raise ElementTree.ParseError(f"{error}; convert it to UTF-8, and name this in its first line") from None


def _unit_texts(unit: ElementTree.Element) -> dict[str, str]:
    """Return language, in lower case -> text."""
    texts = {}
    for variant in unit:
        segment = next((one for one in variant if one.tag.rpartition("}")[2] == "seg"), None)
        language = variant.get(XML_LANGUAGE) or variant.get("lang") or ""
        if segment is not None and language:
            texts[language.lower()] = one_line(_segment_text(segment)).strip()
    return texts


def _languages(
    given: tuple[str | None, str | None], usual: str, seen: set[str], path: str | Path
) -> tuple[str | None, str | None]:
    """Return both languages, as far as they are known from the units so far; usual: `srclang` of the header."""
    if len(seen) < 2:
        return None, None
    name, languages = describe(path), ", ".join(sorted(seen))
    source, target = given
    for one in given:
        if one is not None and not any(_matches(language, one) for language in seen):
            raise DataError(f"{name} has no {one}; its languages are {languages}.")
    if source is None and target is None:
        if usual == "*all*":
            raise DataError(
                f"{name} does not say which of its languages is the source ({languages}); give --source-lang and"
                " --target-lang."
            )
        source = usual
    if source is not None and target is not None:
        return source, target
    known = source or target or ""
    others = sorted(one for one in seen if not _matches(one, known))
    if len(others) != 1:
        raise DataError(f"{name} has the languages {languages}; choose two by --source-lang and --target-lang.")
    return (source, others[0]) if source is not None else (others[0], target)


def _matches(found: str, wanted: str) -> bool:
    """Return whether a language is the wanted one or a variety of it, as en-gb is of en."""
    found, wanted = found.lower().replace("_", "-"), wanted.lower().replace("_", "-")
    return found == wanted or found.startswith(wanted + "-") or wanted.startswith(found + "-")


def _of_language(texts: Mapping[str, str], language: str) -> str:
    exact = texts.get(language.lower())
    return exact if exact is not None else next((texts[one] for one in texts if _matches(one, language)), "")


def _segment_text(segment: ElementTree.Element) -> str:
    parts = [segment.text or ""]
    for child in segment:
        if child.tag.rpartition("}")[2] not in TMX_CODE:
            parts.append(_segment_text(child))
        parts.append(child.tail or "")
    return "".join(parts)


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
                    f"{describe(path)} has no column {missing!r}; it has: {', '.join(names[:MOST_NAMED])}. " + NAME_THEM
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
