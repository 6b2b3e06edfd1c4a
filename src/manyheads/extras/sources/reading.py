"""Reading of what was found: pairs of several sources one after the other, and texts, also from records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.data.language.texts import TextFiles
from manyheads.data.lines import OnBadUtf8, ReadReport
from manyheads.data.translation.readers import PairFiles
from manyheads.extras.sources.finding import PAIR_FORMS, Found
from manyheads.extras.sources.shards import ShardPairs, first_record, is_shard, plain_name, shard_texts

if TYPE_CHECKING:
    from manyheads.data.translation.preparing import Pairs


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
    found: Sequence[Found],
    keys: tuple[str | None, str | None],
    languages: Any,
    *,
    on_bad_utf8: OnBadUtf8 = "fail",
    processes: int = 1,
) -> ChainedPairs:
    """Return the pairs of the sources of a split.

    Args: keys: of source and target, where they are named. languages: of both sides, or (None, None). processes: that
        read shards.
    Raises: ConfigError: see `PairFiles`.
    """
    parts: list[Pairs] = []
    for one in found:
        files = list(one.files)
        shards: list[Path] = []
        while files:
            path = files.pop(0)
            if is_shard(path):
                shards.append(path)
                if files and is_shard(files[0]):
                    continue
                chosen = keys if any(keys) else _keys_of(shards, languages)
                both = (chosen[0] or "source", chosen[1] or "target")
                parts.append(ShardPairs(tuple(shards), both, on_bad_utf8, processes))
                shards = []
            elif plain_name(path).endswith(PAIR_FORMS):
                given = {"source_key": keys[0], "target_key": keys[1]}
                parts.append(PairFiles(pairs=path, **given, languages=languages, on_bad_utf8=on_bad_utf8))
            else:
                parts.append(PairFiles(source=path, target=files.pop(0), on_bad_utf8=on_bad_utf8))
    return ChainedPairs(parts, " + ".join(one.origin for one in found))


def _keys_of(shards: Sequence[Path], languages: tuple[str | None, str | None]) -> tuple[str | None, str | None]:
    """Return the keys of records that have one for each language, as data sets of the hub do; otherwise none."""
    source, target = languages
    if source is None or target is None:
        return None, None
    record = next(filter(None, map(first_record, shards)), {})  # the first ones may be empty
    inner = record.get("translation")
    if isinstance(inner, dict) and {source, target} <= inner.keys():
        return f"translation.{source}", f"translation.{target}"
    return (source, target) if {source, target} <= record.keys() else (None, None)


@dataclass(frozen=True, kw_only=True)
class SourceTexts(TextFiles):
    """Texts of sources: files of text, and shards of records with a text.

    Args: name: for the manifest. processes: that read shards.
    """

    name: str = ""
    processes: int = 1

    def read(self, *, as_bytes: bool, report: ReadReport | None = None) -> Iterator[tuple[bytes, bool]]:
        report = report if report is not None else ReadReport()
        for are_shards, paths in groupby(map(Path, self.paths), is_shard):
            if are_shards:
                yield from shard_texts(list(paths), self.on_bad_utf8, report, self.processes)
            else:
                others = TextFiles(paths=list(paths), on_bad_utf8=self.on_bad_utf8)
                yield from others.read(as_bytes=as_bytes, report=report)

    def describe(self) -> str:
        return self.name
