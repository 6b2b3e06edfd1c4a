"""Reading of what was found: pairs of several sources one after the other, and texts, also from records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyheads.data.language.texts import TextFiles
from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines
from manyheads.data.translation.preparing import Pairs
from manyheads.data.translation.readers import PairFiles, json_record
from manyheads.errors import DataError, needing_extra
from manyheads.extras.sources.finding import PAIR_FORMS, Found

RECORDS = (".jsonl", ".jsonl.gz", ".parquet")
_KEYS = ("text", "content", "sentence")


@dataclass(frozen=True)
class ChainedPairs:
    """The pairs of several inputs, with a description for the manifest."""

    parts: Sequence[Pairs]
    name: str

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
        for part in self.parts:
            yield from part.read(report)

    def describe(self) -> str:
        return self.name


def pairs_of(
    found: Sequence[Found], keys: tuple[str | None, str | None], languages: Any, **shared: Any
) -> ChainedPairs:
    """Return the pairs of the sources of a split.

    Args: keys: of source and target, where they are named. languages: of both sides, or (None, None).
    Raises: ConfigError: see `PairFiles`.
    """
    parts: list[Pairs] = []
    for one in found:
        files = list(one.files)
        while files:
            path = files.pop(0)
            if path.name.lower().removesuffix(".gz").endswith(PAIR_FORMS):
                chosen = keys if any(keys) else _keys_of(path, languages)
                given: dict[str, Any] = {"pairs": path, "source_key": chosen[0], "target_key": chosen[1]}
            else:
                given = {"source": path, "target": files.pop(0)}
            parts.append(PairFiles(**given, languages=languages, **shared))
    return ChainedPairs(parts, " + ".join(one.origin for one in found))


def _keys_of(path: Path, languages: tuple[str | None, str | None]) -> tuple[str | None, str | None]:
    """Return the keys of records that have one for each language, as data sets of the hub do; otherwise none."""
    source, target = languages
    if source is None or target is None:
        return None, None
    record = _first_record(path)
    inner = record.get("translation")
    if isinstance(inner, dict) and {source, target} <= inner.keys():
        return f"translation.{source}", f"translation.{target}"
    return (source, target) if {source, target} <= record.keys() else (None, None)


def _first_record(path: Path) -> dict[str, Any]:
    name = path.name.lower()
    if name.endswith(".parquet"):
        return next(_rows(path), {})
    if name.endswith((".jsonl", ".jsonl.gz")):
        first = next(iter(decoded_lines(path, "replace", ReadReport())), None)
        return json_record(first, str(path)) if first and first.strip() else {}
    return {}


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a Parquet file. Raises: DataError: it is damaged. MissingExtraError: pyarrow is missing."""
    with needing_extra("Parquet files need the package pyarrow", "parquet"):
        import pyarrow
        import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not an intact Parquet file: {error}.") from error


@dataclass(frozen=True, kw_only=True)
class SourceTexts(TextFiles):
    """Texts of sources: files of text, and records with a text. name: for the manifest."""

    name: str = ""

    def read(self, *, as_bytes: bool, report: ReadReport | None = None) -> Iterator[tuple[bytes, bool]]:
        for path in map(Path, self.paths):
            if not path.name.lower().endswith(RECORDS):
                yield from TextFiles(paths=[path], on_bad_utf8=self.on_bad_utf8).read(as_bytes=as_bytes, report=report)
                continue
            text = b""
            for text in _texts(path, self.on_bad_utf8, report or ReadReport()):
                yield text, False
            yield b"", True

    def describe(self) -> str:
        return self.name


def _texts(path: Path, on_bad_utf8: OnBadUtf8, report: ReadReport) -> Iterator[bytes]:
    """Yield the text of each record, with a line break at its end. Raises: DataError: a record has none."""
    if path.name.lower().endswith(".parquet"):
        records = _rows(path)
    else:
        lines = enumerate(decoded_lines(path, on_bad_utf8, report), 1)
        records = (json_record(line, f"{path}: line {number}") for number, line in lines if line and line.strip())
    for number, record in enumerate(records, 1):
        key = next((key for key in _KEYS if isinstance(record.get(key), str)), None)
        if key is None:
            shown = json.dumps(sorted(map(str, record)))
            raise DataError(f"{path}: record {number} has no text under {', '.join(_KEYS)}; its keys are {shown}.")
        text = record[key]
        yield (text if text.endswith("\n") else text + "\n").encode("utf-8", "surrogatepass")
