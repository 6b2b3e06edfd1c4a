"""Prepared data as a run sees it: tokenizer, token stores, raw validation and test text; and how a setting names it."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from manyheads.data.copy_task import copy_pairs
from manyheads.data.corpora.tatoeba import DIGESTS, load_tatoeba
from manyheads.data.lines import stored_lines
from manyheads.data.manifest import read_manifest, refuse_strangers, verify_file
from manyheads.data.preparing import FORMAT, FORMAT_VERSION, LANGUAGE_TASK, SPLITS, canonical
from manyheads.data.preparing_pairs import PairList, prepare_corpus, text_path
from manyheads.data.progress import Progress
from manyheads.data.settings import DataSettings
from manyheads.data.store import PairStore
from manyheads.errors import ConfigError, DataError, SaveError
from manyheads.text.parsing import ParsingTask
from manyheads.text.parsing_tokenizer import ParsingTokenizer
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

__all__ = [
    "EMBEDDED",
    "TATOEBA",
    "PreparedData",
    "cached_folder",
    "open_data",
    "prepare_corpus",
    "prepared_task",
    "refuse_missing",
]

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


def prepared_task(path: str | Path) -> str:
    """The task of a folder of prepared data: `translation`, `parsing` or `language-modelling`.

    Raises: DataError: it is no folder of prepared data.
    """
    task = read_manifest(Path(path), kind=FORMAT, version=FORMAT_VERSION).get("task", {"name": "translation"})
    name = task.get("name") if isinstance(task, dict) else None
    if not isinstance(name, str):
        raise DataError(f"{path}/manifest.json is damaged: its task has no name. Prepare the data again.")
    return name


class _Prepared(Protocol):
    @property
    def manifest(self) -> dict[str, Any]: ...


T = TypeVar("T", bound=_Prepared)


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
        if prepared_task(path) == LANGUAGE_TASK:
            raise DataError(f"{path} holds a text for language models; pairs are needed here: `manyheads prepare`.")
        tokenizer = Tokenizer.load(path / "tokenizer.json")
        task = None
        if prepared_task(path) != "translation":
            task = ParsingTask.from_json(manifest["task"], str(path / "manifest.json"))
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
    refuse_missing(settings.path, [COPY_TASK, TATOEBA], "manyheads prepare")
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


def refuse_missing(path: str, names: Sequence[str], command: str) -> None:
    """Refuse a path that is no folder.

    Args:
        path: what `data.path` says.
        names: what else it may say; the last is recommended.
        command: what makes such a folder.

    Raises: DataError: there is nothing of that name, or it is no folder.
    """
    if not Path(path).exists():
        near = difflib.get_close_matches(path, names, 1, 0.7)
        hint = f"did you mean {near[0]}?" if near else f"prepare one with `{command}`, or use {names[-1]}."
        raise DataError(f"data.path is {path!r}, but there is no such folder; {hint}")
    if not Path(path).is_dir():
        raise DataError(
            f"data.path is {path!r}, which is no folder; training reads a folder that `{command}` made of text files."
        )


def cached_folder(
    recipe: dict[str, Any], cache_dir: Path, make: Callable[[Path, str], Any], open_folder: Callable[[Path], T]
) -> T:
    """The folder of a recipe, prepared now unless an intact one is there.

    Args:
        recipe: `corpus`, an embedded one's name, and all else that decides what comes out.
        cache_dir: where the folder is.
        make: prepares a folder, replacing an older one, with a key to know it by.
        open_folder: opens it, and raises DataError where it is damaged.
    """
    name = recipe["corpus"].removeprefix(EMBEDDED)
    key = hashlib.sha256(canonical({**recipe, "format_version": FORMAT_VERSION})).hexdigest()
    folder = cache_dir / f"{name}-{key[:12]}"

    def intact() -> T | None:
        try:
            data = open_folder(folder)
        except DataError:
            return None
        return data if data.manifest.get("key") == key else None

    found = intact()
    if found is not None:
        return found
    try:
        make(folder, key)
    except SaveError:
        found = intact()  # another process may have put the same folder there first
        if found is None:
            raise
        return found
    return open_folder(folder)


def _cached(
    recipe: dict[str, Any],
    splits: Callable[[], dict[str, list[tuple[str, str]]]],
    tokenizer: TokenizerSettings,
    cache_dir: Path,
    progress: Progress | None,
    verify: bool,
) -> PreparedData:
    def make(folder: Path, key: str) -> None:
        pairs: dict[str, Any] = {split: PairList(recipe["corpus"], known) for split, known in splits().items()}
        prepare_corpus(folder, **pairs, tokenizer=tokenizer, replace=True, progress=progress, key=key)

    return cached_folder(recipe, cache_dir, make, lambda folder: PreparedData.open(folder, verify=verify))
