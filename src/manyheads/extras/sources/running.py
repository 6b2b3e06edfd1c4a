"""The order of the work: fetch, compare with sources.lock, prepare, record the terms."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manyheads.data.lines import Progress
from manyheads.data.manifest import write_manifest
from manyheads.extras.sources.fetching import Fetcher, Lock
from manyheads.extras.sources.finding import Found, find, plan_lines
from manyheads.extras.sources.options import SourceOptions
from manyheads.files.commit import saving, sync
from manyheads.files.verify import MANIFEST

PLAN = "plan"


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
        manifest = prepare(found)(output, replace=replace, progress=progress)
        given = [one for each in wanted.values() for one in each]
        if terms := {one.name: one.entry.terms for one in given if one.entry is not None and one.entry.terms}:
            manifest["terms"] = terms
            _rewrite(output, manifest)
        return {**manifest, "fetched": fetcher.said}

    return run


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
