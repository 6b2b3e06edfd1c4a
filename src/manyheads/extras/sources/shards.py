"""Shards: files of records (JSON lines, also .gz and .zst, and Parquet) that are read in order by several processes.

JSON lines are unpacked here and divided into blocks of whole lines, Parquet files into their groups of rows. A block is
parsed by one process, and the results come back in order (`in_order`), so the stream is the same for any number of
processes.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from manyheads.data.lines import (
    CHUNK_BYTES,
    MAX_LINE_BYTES,
    ByteLines,
    OnBadUtf8,
    ReadReport,
    decoded,
    limited,
    read_chunks,
)
from manyheads.data.preparing import in_this_process
from manyheads.data.translation.readers import json_record, jsonl_pairs, preview, whole_text
from manyheads.errors import DataError, ManyHeadsError
from manyheads.extras.tables.pairs import parquet_pairs
from manyheads.files.safe_open import open_regular
from manyheads.installation import needing_extra

PACKED = (".gz", ".zst")
TEXT_KEYS = ("text", "content", "sentence")
BLOCK_BYTES = 2**22  # of lines that are parsed together
BATCH_ROWS = 4096

Pair = tuple[str, str]
T = TypeVar("T")


def in_order(work: Callable[[Any], Iterable[T]], items: Iterable[Any], *, processes: int) -> Iterator[T]:
    """Yield the results of `work` for each item, in the order of the items.

    Each process has one item at a time, so memory does not grow with the number of items.

    Args:
        work: makes any number of results of an item; pickled, if there are several processes.
        items: taken one by one, in this process.
        processes: 1: all work is done in this one, as is that of a single item.

    Raises: what `work` raises. DataError: a process was ended from outside.
    """
    rest = iter(items)
    first = list(islice(rest, min(processes, 2)))
    items = chain(first, rest)
    if len(first) < 2:
        yield from in_this_process(work, items)
        return
    context = multiprocessing.get_context("spawn")  # the same on all systems; fork would copy locks of threads
    lanes: list[tuple[Any, Connection]] = []
    busy = 0
    try:
        for number, item in enumerate(items):
            place = number % processes
            if place == len(lanes):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(work, theirs), daemon=True)
                process.start()
                theirs.close()  # so that reading ends when the process does
                lanes.append((process, ours))
            else:
                yield from _results(lanes[place][1])
            try:
                lanes[place][1].send(item)
            except OSError:
                raise _ended(processes) from None
            busy = number + 1
        for number in range(max(0, busy - processes), busy):
            yield from _results(lanes[number % processes][1])
    except EOFError:
        raise _ended(processes) from None
    finally:
        for process, ours in lanes:
            ours.close()  # a process that waits for an item ends
            process.join(1)
            process.kill()
            process.join()


def _ended(processes: int) -> DataError:
    return DataError(
        f"One of the {processes} processes was ended from outside, perhaps because memory was full; run the command"
        " again with fewer --processes, and it continues."
    )


def _results(connection: Connection) -> Iterator[Any]:
    while (found := connection.recv()) is not None:
        is_result, content = found
        if not is_result:
            raise content
        yield content


def _serve(work: Callable[[Any], Iterable[Any]], connection: Connection) -> None:
    """Do the work of one process until the other end of the connection closes, also by a kill."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process stops the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with suppress(EOFError, OSError):
        while True:
            item = connection.recv()
            try:
                for result in work(item):
                    connection.send((True, result))
            except ManyHeadsError as error:
                connection.send((False, error))
            except Exception:
                connection.send((False, RuntimeError(traceback.format_exc())))
            else:
                connection.send(None)


def plain_name(path: Path) -> str:
    """Return the name of a file in lower case, without the ending of its packing."""
    name = path.name.lower()
    return next((name.removesuffix(end) for end in PACKED if name.endswith(end)), name)


def is_shard(path: Path) -> bool:
    """Tell whether a file is read here, by its name."""
    return plain_name(path).endswith(".jsonl") or path.name.lower().endswith(".parquet")


@dataclass(frozen=True)
class Lines:
    """Some lines of a JSONL file. first: number of the first one. offset: its place in the file, in bytes."""

    path: Path
    content: bytes
    first: int = 1
    offset: int = 0

    def texts(self, on_bad_utf8: OnBadUtf8, report: ReadReport) -> Iterator[str | None]:
        """Yield the lines; None for one that is skipped."""
        lines = ByteLines(io.BytesIO(self.content).read, lambda seconds: True)
        lines.given = self.first - 1
        return decoded(lines, str(self.path), on_bad_utf8, report, self.offset)


@dataclass(frozen=True)
class Rows:
    """A group of rows of a Parquet file. group: its number. first: number of rows before it."""

    path: Path
    group: int
    first: int


@dataclass(frozen=True)
class End:
    """The end of a file."""


Block = Lines | Rows | End


def blocks_of_shard(path: Path) -> Iterator[Block]:
    """Yield the blocks of a shard, and its end. Raises: DataError: it cannot be read."""
    yield from _groups(path) if path.name.lower().endswith(".parquet") else _blocks_of_lines(path)
    yield End()


def _blocks_of_lines(path: Path) -> Iterator[Lines]:
    kept: list[bytes] = []
    size, first, offset = 0, 1, 0
    for chunk in _unpacked(path) if path.name.lower().endswith(".zst") else read_chunks(path):
        end = chunk.rfind(b"\n") + 1
        kept.append(chunk)
        size += len(chunk)
        if (size >= BLOCK_BYTES and end) or size > MAX_LINE_BYTES + CHUNK_BYTES:
            end = end or len(chunk)
            content = b"".join([*kept[:-1], chunk[:end]])
            yield Lines(path, content, first, offset)
            first, offset = first + content.count(b"\n"), offset + len(content)
            kept, size = [chunk[end:]], len(chunk) - end
    if size:
        yield Lines(path, b"".join(kept), first, offset)


def _unpacked(path: Path) -> Iterator[bytes]:
    """Yield the content of a zstd file. Raises: DataError: it is damaged, or expands beyond the limit of inputs."""
    with needing_extra("zstd files need the package pyarrow", "parquet"):
        import pyarrow
    try:
        with open_regular(path) as file, pyarrow.CompressedInputStream(file, "zstd") as stream:
            read = limited(stream.read, str(path), "unpacks to")
            while chunk := read(CHUNK_BYTES):
                yield chunk
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not an intact zstd file: {_reason(error)}. Copy or pack it once more.") from error


def _groups(path: Path) -> Iterator[Rows]:
    with _parquet(path) as file:
        first = 0
        for group in range(file.metadata.num_row_groups):
            yield Rows(path, group, first)
            first += file.metadata.row_group(group).num_rows


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    with needing_extra("Parquet files need the package pyarrow", "parquet"):
        import pyarrow
        import pyarrow.parquet
    try:
        with open_regular(path) as content, pyarrow.parquet.ParquetFile(content) as file:
            yield file
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not an intact Parquet file: {_reason(error)}.") from error


def _reason(error: BaseException) -> str:
    first = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
    return str(first).rstrip(".")


@dataclass(frozen=True)
class ParsedPairs:
    """Parses blocks of records to pairs; see `in_order`. keys: of source and target."""

    keys: tuple[str, str]
    on_bad_utf8: OnBadUtf8

    def __call__(self, block: Block) -> Iterator[tuple[list[Pair | None], ReadReport]]:
        """Yield the pairs of a block, None for each that is skipped, and counts."""
        report = ReadReport()
        if isinstance(block, Lines):
            lines = block.texts(self.on_bad_utf8, report)
            yield list(jsonl_pairs(lines, block.path, self.keys, self.on_bad_utf8, report, block.first)), report
        elif isinstance(block, Rows):
            some: list[Pair | None] = []
            for pair in parquet_pairs(block.path, self.keys, report, [block.group], block.first):
                some.append(pair)
                if len(some) == BATCH_ROWS:
                    yield some, report
                    some, report = [], ReadReport()
            yield some, report


@dataclass(frozen=True)
class ShardPairs:
    """The pairs of shards, in order. keys: of source and target."""

    paths: Sequence[Path]
    keys: tuple[str, str]
    on_bad_utf8: OnBadUtf8 = "fail"
    processes: int = 1

    def read(self, report: ReadReport | None = None) -> Iterator[Pair]:
        """See `PairFiles.read`."""
        report = report if report is not None else ReadReport()
        blocks = (block for path in self.paths for block in blocks_of_shard(path))
        for pairs, found in in_order(ParsedPairs(self.keys, self.on_bad_utf8), blocks, processes=self.processes):
            add_counts(report, found)
            for pair in pairs:
                report.lines += 1
                if pair is None:
                    report.bad_utf8_skipped += 1
                else:
                    yield pair

    def describe(self) -> str:
        return " + ".join(map(str, self.paths))


def add_counts(report: ReadReport, others: ReadReport) -> None:
    """Add the counts of a block."""
    for item in fields(report):
        setattr(report, item.name, getattr(report, item.name) + getattr(others, item.name))


@dataclass(frozen=True)
class ParsedTexts:
    """Parses blocks of records to text; see `in_order`."""

    on_bad_utf8: OnBadUtf8

    def __call__(self, block: Block) -> Iterator[tuple[bytes, bool, ReadReport]]:
        """Yield the texts of records, each with a line break at its end; whether a file ends; and counts.

        Raises: DataError: a record has no text.
        """
        report = ReadReport()
        if isinstance(block, Lines):
            yield b"".join(_texts_of_lines(block, self.on_bad_utf8, report)), False, report
        elif isinstance(block, Rows):
            for text in _texts_of_rows(block):
                yield text, False, ReadReport()
        else:
            yield b"", True, report


def _texts_of_lines(block: Lines, on_bad_utf8: OnBadUtf8, report: ReadReport) -> Iterator[bytes]:
    for number, line in enumerate(block.texts(on_bad_utf8, report), block.first):
        if line is None:
            report.bad_utf8_skipped += 1
        elif line.strip():
            where = f"{block.path}: line {number}"
            text = _text_of(json_record(line, where), where)
            whole = whole_text(text, where, on_bad_utf8, report)
            report.bad_utf8_skipped += whole is None
            yield (whole or "").encode()


def _texts_of_rows(block: Rows) -> Iterator[bytes]:
    with _parquet(block.path) as file:
        names = [key for key in TEXT_KEYS if key in file.schema_arrow.names]
        if not names:
            raise DataError(_no_text(str(block.path), file.schema_arrow.names))
        number = block.first
        for batch in file.iter_batches(BATCH_ROWS, row_groups=[block.group], columns=names):
            records = batch.to_pylist()
            rows = enumerate(records, number + 1)
            yield "".join(_text_of(one, f"{block.path}: row {row}") for row, one in rows).encode()
            number += len(records)


def _text_of(record: dict[str, Any], where: str) -> str:
    text = next((record[key] for key in TEXT_KEYS if isinstance(record.get(key), str)), None)
    if text is None:
        if key := next((key for key in TEXT_KEYS if key in record), None):
            raise DataError(f"{where}: the value of {key!r} is not text: {preview(str(record[key]))}.")
        raise DataError(_no_text(where, record))
    return text if text.endswith("\n") else f"{text}\n"


def _no_text(where: str, names: Iterable[object]) -> str:
    return f"{where} has no text under {', '.join(TEXT_KEYS)}; its keys are {json.dumps(sorted(map(str, names)))}."


def shard_texts(
    paths: Sequence[Path], on_bad_utf8: OnBadUtf8, report: ReadReport, processes: int
) -> Iterator[tuple[bytes, bool]]:
    """Yield the texts of shards in blocks, and whether a file ends with each; see `Text.read`."""
    blocks = (block for path in paths for block in blocks_of_shard(path))
    for content, ends, found in in_order(ParsedTexts(on_bad_utf8), blocks, processes=processes):
        add_counts(report, found)
        yield content, ends


def first_record(path: Path) -> dict[str, Any]:
    """Return the first record of a shard; empty if there is none."""
    if path.name.lower().endswith(".parquet"):
        with _parquet(path) as file:
            return next((record for batch in file.iter_batches(1) for record in batch.to_pylist()), {})
    for block in blocks_of_shard(path):
        for line in block.texts("replace", ReadReport()) if isinstance(block, Lines) else ():
            if line and line.strip():
                return json_record(line, str(path))
    return {}
