"""Reading of what was found: pairs of several sources one after the other, and texts, also from records.

The order of the work: fetch, compare with sources.lock and with a first pass, prepare, record the terms.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.data.language.texts import TextFiles
from manyheads.data.lines import OnBadUtf8, ReadReport
from manyheads.data.preparing import ABOUT, MARK, num_finished, parts_folder, write_manifest
from manyheads.data.translation.readers import PairFiles
from manyheads.errors import DataError, ManyHeadsError
from manyheads.extras.sources.fetching import Fetcher, Lock
from manyheads.extras.sources.finding import PAIR_FORMS, Found, find
from manyheads.extras.sources.names import plan_lines
from manyheads.extras.sources.shards import ShardPairs, first_record, is_shard, plain_name, shard_texts
from manyheads.files.commit import make_folder, remove_folder, saving, sync, write_text
from manyheads.files.verify import MANIFEST, read_object

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.data.translation.preparing import Pairs
    from manyheads.extras.sources.options import SourceOptions


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


PLAN = "plan"
SHARDS = "shards.json"
BOTH = "{} takes the part from the training data; leave it out where --valid-from is given."


def preparing(
    sources: SourceOptions,
    languages: tuple[str | None, str | None],
    prepare: Callable[[dict[str, list[Found]]], Callable[..., dict[str, Any]]],
    *,
    is_pairs: bool,
) -> Callable[..., dict[str, Any]]:
    """Return the function that fetches the sources of a command and then prepares them, see `catalogue.Task`.

    Args: languages: of source and target. prepare: makes the function that prepares, from the files of each split.
    Raises: ConfigError: see `SourceOptions.wanted`.
    """
    wanted = sources.wanted()

    def run(output: Path, *, replace: bool, progress: Progress) -> dict[str, Any]:
        lock = Lock.beside(output, sources.update)
        if sources.dry_run:
            return {PLAN: plan_lines([one for each in wanted.values() for one in each], lock)}
        fetcher = Fetcher(lock, progress, sources.most_bytes, languages)
        try:
            found = {split: [find(one, fetcher, is_pairs=is_pairs) for one in each] for split, each in wanted.items()}
        finally:
            if not sources.update:
                lock.save()
        lock.save()
        with _as_in_first_pass(output, found):
            manifest = prepare(found)(output, replace=replace, progress=progress)
        given = [one for each in wanted.values() for one in each]
        if terms := {one.name: one.entry.terms for one in given if one.entry is not None and one.entry.terms}:
            manifest["terms"] = terms
            _rewrite(output, manifest)
        return {**manifest, "fetched": fetcher.said}

    return run


@contextmanager
def _as_in_first_pass(output: Path, found: dict[str, list[Found]]) -> Iterator[None]:
    """Record the shards until the end of the block, and compare them with those of a command that was killed.

    Raises: DataError: a shard of the same source has vanished or changed since then.
    """
    now = {
        one.origin: {str(path): _facts(path) for path in shards}
        for each in found.values()
        for one in each
        if (shards := [path for path in one.files if is_shard(path)])
    }
    folder = parts_folder(output)
    path, is_ours = folder / SHARDS, not folder.exists()
    again = f"Put it back, or remove {folder} to begin again with the shards that are there."
    for origin, before in (read_object(path) if path.is_file() else {}).items():
        for name, facts in before.items() if origin in now else ():
            if name not in now[origin]:
                raise DataError(
                    f"{name} has vanished since an earlier command read it, which was not finished. {again}"
                )
            if now[origin][name] != facts:
                raise DataError(f"{name} has changed since an earlier command read it, which was not finished. {again}")
    if now and (is_ours or (folder / MARK).is_file()):
        make_folder(folder)
        write_text(folder / MARK, ABOUT)
        write_text(path, json.dumps(now))
    try:
        yield
    except ManyHeadsError:  # a mistake in the input is mended before the next command
        with suppress(ManyHeadsError):
            if is_ours and path.is_file() and not num_finished(folder):
                remove_folder(folder)
        raise


def _facts(shard: Path) -> list[int]:
    """Return what tells a file from another of its name. Raises: DataError: it cannot be read."""
    try:
        status = shard.stat()
    except OSError as error:
        raise DataError(
            f"{shard} has vanished since its folder was listed, or is a link to nothing: {error.strerror or error}. Put"
            " it back, or remove the link."
        ) from None
    return [status.st_size, status.st_mtime_ns]


def _rewrite(folder: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest of prepared data in one step."""
    with tempfile.TemporaryDirectory(dir=folder.absolute().parent) as aside, saving(folder, 0):
        write_manifest(Path(aside), manifest)
        sync(Path(aside) / MANIFEST)
        (Path(aside) / MANIFEST).replace(folder / MANIFEST)
        sync(folder)


def plan_text(lines: Sequence[str]) -> str:
    """Return what a dry run prints."""
    return "\n".join([*lines, "nothing was fetched: this was a dry run"])
