"""Prepared data as a run sees it: tokenizer, token stores, raw validation and test text; and how a setting names it."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyheads.data.copy_task import copy_pairs
from manyheads.data.corpora.tatoeba import DIGESTS, load_tatoeba
from manyheads.data.folder import read_manifest, refuse_strangers, verify_file
from manyheads.data.lines import stored_lines
from manyheads.data.preparing import (
    FORMAT,
    FORMAT_VERSION,
    SPLITS,
    PairList,
    Progress,
    canonical,
    prepare_corpus,
    text_path,
)
from manyheads.data.settings import DataSettings
from manyheads.data.store import PairStore
from manyheads.errors import ConfigError, DataError, SaveError
from manyheads.text.parsing import ParsingTask
from manyheads.text.parsing_tokenizer import ParsingTokenizer
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

__all__ = ["PreparedData", "open_data", "prepare_corpus"]

COPY_TASK = "copy-task"
EMBEDDED = "embedded:"
TATOEBA = "embedded:tatoeba-en-de"
NOTED = (
    "empty_dropped",
    "empty_kept",
    "bad_utf8_replaced",
    "bad_utf8_skipped",
    "line_breaks_replaced",
    "columns_ignored",
    "control_characters",
    "long_lines",
    "source_unknown",
    "target_unknown",
)


@dataclass(frozen=True)
class PreparedData:
    """A folder written by `prepare_corpus`.

    Attributes:
        path: the folder.
        tokenizer: of both sides.
        train: training pairs as ids.
        valid: validation pairs as ids, or None.
        test: test pairs as ids, or None.
        valid_text: the raw validation pairs, in order; empty if there are none.
        test_text: the raw test pairs, in order; empty if there are none.
        manifest: settings, counts and SHA-256 sums.
        task: what the text of a target is, if not a translation.
    """

    path: Path
    tokenizer: Tokenizer
    train: PairStore
    valid: PairStore | None
    test: PairStore | None
    valid_text: list[tuple[str, str]]
    test_text: list[tuple[str, str]]
    manifest: dict[str, Any]
    task: ParsingTask | None = None

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> PreparedData:
        """Open a folder written by `manyheads prepare`.

        Args:
            path: the folder.
            verify: compare every SHA-256 sum; off, sizes alone.

        Raises: DataError: the folder is missing or damaged, or its parts do not belong together.
        """
        path = Path(path)
        if not path.is_dir():
            raise DataError(f"There is no folder {path} with prepared data; make one with `manyheads prepare`.")
        manifest = read_manifest(path, kind=FORMAT, version=FORMAT_VERSION)
        known = manifest["files"]
        splits = [split for split in SPLITS if split == "train" or f"{split}/manifest.json" in known]
        for name in ("tokenizer.json", *(f"{split}/manifest.json" for split in splits)):
            verify_file(path / name, known.get(name), content=verify)
        if verify:
            refuse_strangers(path, known)
        tokenizer = Tokenizer.load(path / "tokenizer.json")
        task = ParsingTask.from_json(manifest["task"], str(path / "manifest.json")) if "task" in manifest else None
        if task is not None:
            tokenizer = ParsingTokenizer(tokenizer, task)
        stores = {split: PairStore.open(path / split, verify=verify) for split in splits}
        texts: dict[str, list[tuple[str, str]]] = {}
        for split, store in stores.items():
            if store.vocab_size != tokenizer.vocab_size:
                raise DataError(
                    f"{path / split} was made for a vocabulary of {store.vocab_size} pieces, but the tokenizer beside"
                    f" it has {tokenizer.vocab_size}. Prepare the data again."
                )
            if split != "train":
                texts[split] = _read_text(path, split, known, verify, len(store))
        return cls(
            path=path,
            tokenizer=tokenizer,
            train=stores["train"],
            valid=stores.get("valid"),
            test=stores.get("test"),
            valid_text=texts.get("valid", []),
            test_text=texts.get("test", []),
            manifest=manifest,
            task=task,
        )

    @property
    def digest(self) -> str:
        """SHA-256 over the tokenizer, ids and texts; equal exactly where the data is, wherever it lies."""
        return hashlib.sha256(canonical(self.manifest["files"])).hexdigest()

    def describe(self) -> str:
        """A few lines for people: sizes, what was dropped, the tokenizer."""
        case = ", lower case" if self.tokenizer.lowercase else ""
        task = "" if self.task is None else ", for parsing"
        lines = [
            f"data {self.digest[:12]} in {self.path}{task}",
            f"tokenizer {self.tokenizer.kind}, {self.tokenizer.vocab_size} pieces{case}",
        ]
        for split in SPLITS:
            store: PairStore | None = getattr(self, split)
            if store is None:
                continue
            tokens = f"{len(store.source.ids):,} + {len(store.target.ids):,} tokens"
            counts = self.manifest.get("counts", {}).get(split, {})
            noted = [f"{counts[name]:,} {name.replace('_', ' ')}" for name in NOTED if counts.get(name)]
            lines.append(", ".join([f"{split}: {len(store):,} pairs", tokens, *noted]))
        return "\n".join(lines)


def _read_text(folder: Path, split: str, known: dict[str, Any], verify: bool, num_pairs: int) -> list[tuple[str, str]]:
    paths = [text_path(folder, split, side) for side in ("source", "target")]
    for path in paths:
        verify_file(path, known.get(path.name), content=verify)
    source, target = (list(stored_lines(path)) for path in paths)
    if not len(source) == len(target) == num_pairs:
        raise DataError(f"{paths[0]} and {paths[1]} do not hold {num_pairs} lines each. Prepare the data again.")
    return list(zip(source, target, strict=True))


def open_data(
    settings: DataSettings,
    tokenizer_settings: TokenizerSettings,
    seed: int,
    cache_dir: str | Path,
    *,
    progress: Progress | None = None,
    verify: bool = True,
) -> PreparedData:
    """The data that `settings.path` names: a prepared folder, an embedded corpus, or the copy task.

    Args:
        settings: `path`, and `num_train_pairs` for what is prepared here.
        tokenizer_settings: for an embedded corpus and the copy task; a prepared folder brings its own tokenizer.
        seed: of the copy task's sequences.
        cache_dir: an embedded corpus is prepared once into a folder in here and found again by its settings.
        progress: see `prepare_corpus`.
        verify: see `PreparedData.open`.

    Raises:
        ConfigError: there is no embedded corpus of that name, or it has fewer training pairs than asked for.
        DataError: the folder is missing or damaged.
    """
    count = settings.num_train_pairs
    tokenizer = dataclasses.asdict(tokenizer_settings)
    if settings.path == COPY_TASK:
        recipe = {"corpus": COPY_TASK, "seed": seed, "tokenizer": tokenizer, "num_train_pairs": count}
        return _cached(recipe, lambda: copy_pairs(seed, count), tokenizer_settings, Path(cache_dir), progress, verify)
    if settings.path == TATOEBA:
        recipe = {"corpus": TATOEBA, "digests": DIGESTS, "tokenizer": tokenizer, "num_train_pairs": count}
        return _cached(recipe, lambda: _tatoeba(count), tokenizer_settings, Path(cache_dir), progress, verify)
    if settings.path.startswith(EMBEDDED):
        raise ConfigError(f"There is no corpus {settings.path!r}; the embedded one is {TATOEBA}.")
    if not Path(settings.path).exists():
        near = difflib.get_close_matches(settings.path, [COPY_TASK, TATOEBA], 1, 0.7)
        hint = f"did you mean {near[0]}?" if near else f"prepare one with `manyheads prepare`, or use {TATOEBA}."
        raise DataError(f"data.path is {settings.path!r}, but there is no such folder; {hint}")
    if not Path(settings.path).is_dir():
        raise DataError(
            f"data.path is {settings.path!r}, which is no folder; training reads a folder that `manyheads prepare` made"
            " of text files."
        )
    return PreparedData.open(settings.path, verify=verify)


def _tatoeba(num_train_pairs: int) -> dict[str, list[tuple[str, str]]]:
    splits = {split: load_tatoeba(split) for split in SPLITS}
    found = len(splits["train"])
    if num_train_pairs > found:
        raise ConfigError(
            f"data.num_train_pairs is {num_train_pairs}, but {TATOEBA} has {found} training pairs; 0 means all."
        )
    splits["train"] = splits["train"][: num_train_pairs or found]
    return splits


def _cached(
    recipe: dict[str, Any],
    make: Callable[[], dict[str, list[tuple[str, str]]]],
    tokenizer: TokenizerSettings,
    cache_dir: Path,
    progress: Progress | None,
    verify: bool,
) -> PreparedData:
    """The folder of a recipe, prepared now unless an intact one is there."""
    name = recipe["corpus"].removeprefix(EMBEDDED)
    key = hashlib.sha256(canonical({**recipe, "format_version": FORMAT_VERSION})).hexdigest()
    folder = cache_dir / f"{name}-{key[:12]}"
    found = _intact(folder, key, verify)
    if found is not None:
        return found
    splits: dict[str, Any] = {split: PairList(recipe["corpus"], pairs) for split, pairs in make().items()}
    try:
        prepare_corpus(folder, **splits, tokenizer=tokenizer, replace=True, progress=progress, key=key)
    except SaveError:
        found = _intact(folder, key, verify)  # another process may have put the same folder there first
        if found is None:
            raise
        return found
    return PreparedData.open(folder, verify=verify)


def _intact(folder: Path, key: str, verify: bool) -> PreparedData | None:
    try:
        data = PreparedData.open(folder, verify=verify)
    except DataError:
        return None
    return data if data.manifest.get("key") == key else None
