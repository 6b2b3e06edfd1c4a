"""Opening prepared data: tokenizer, token stores, and the raw validation and test text, by folder or by setting."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from manyheads.data.copy_task import copy_pairs
from manyheads.data.corpora.tatoeba import DIGESTS, load_tatoeba
from manyheads.data.lines import stored_lines
from manyheads.data.manifest import read_manifest, refuse_strangers, verify_file
from manyheads.data.preparing import FORMAT, FORMAT_VERSION, LANGUAGE_TASK, SPLITS, canonical
from manyheads.data.preparing_pairs import CLEANING, PairList, prepare_corpus, text_path
from manyheads.data.progress import Progress
from manyheads.data.settings import CopyTaskSettings, DataSettings
from manyheads.data.store import PairStore
from manyheads.data.token_store import TokenStore
from manyheads.errors import ConfigError, DataError, SaveError
from manyheads.text.languages import LanguagePair
from manyheads.text.parsing import ParsingTask
from manyheads.text.parsing_tokenizer import ParsingTokenizer
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

__all__ = [
    "EMBEDDED",
    "TATOEBA",
    "PreparedData",
    "PreparedFolder",
    "cached_folder",
    "open_data",
    "open_manifest",
    "open_stores",
    "prepare_corpus",
    "prepared_task",
    "read_texts",
    "refuse_missing",
]

COPY_TASK = "copy-task"
EMBEDDED = "embedded:"
TATOEBA = "embedded:tatoeba-en-de"
NOTED = (
    "unknown",
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

Store = TypeVar("Store", PairStore, TokenStore)
Folder = TypeVar("Folder", bound="PreparedFolder")


def prepared_task(path: str | Path) -> str:
    """Return the task of a folder of prepared data: `translation`, `parsing`, `language-modelling`,
    `classification` or `spans`.

    Raises: DataError: it is not a folder of prepared data.
    """
    task = read_manifest(Path(path), kind=FORMAT, version=FORMAT_VERSION).get("task", {"name": "translation"})
    name = task.get("name") if isinstance(task, dict) else None
    if not isinstance(name, str):
        raise DataError(f"{path}/manifest.json is damaged: its task has no name. Prepare the data again.")
    return name


@dataclass(frozen=True, kw_only=True)
class PreparedFolder:
    """The common part of `PreparedData` and `prepared_text.TextData`.

    Attributes:
        path: the folder.
        manifest: settings, counts and SHA-256 sums.
    """

    path: Path
    manifest: dict[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 over the tokenizer, ids and texts; the same for the same data in another folder."""
        files = {name: record for name, record in self.manifest["files"].items() if name != CLEANING}
        return hashlib.sha256(canonical(files)).hexdigest()

    def describe_split(self, split: str, *sizes: str) -> str:
        """Return one line for users: sizes, and the unusual lines that were counted."""
        counts = self.manifest.get("counts", {}).get(split, {})
        noted = [f"{counts[name]:,} {name.replace('_', ' ')}" for name in NOTED if counts.get(name)]
        return f"{split}: " + ", ".join([*sizes, *noted])


@dataclass(frozen=True, kw_only=True)
class PreparedData(PreparedFolder):
    """A folder written by `prepare_corpus`.

    Attributes:
        tokenizer: of both sides.
        train: training pairs as ids.
        valid: validation pairs as ids, or None.
        test: test pairs as ids, or None.
        valid_text: the raw validation pairs, in order; empty if there are none.
        test_text: the raw test pairs, in order; empty if there are none.
        task: the conversion of targets that are trees; None for translation.
    """

    tokenizer: Tokenizer
    train: PairStore
    valid: PairStore | None = None
    test: PairStore | None = None
    valid_text: list[tuple[str, str]]
    test_text: list[tuple[str, str]]
    task: ParsingTask | None

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> PreparedData:
        """Open a folder written by `manyheads prepare`.

        Args:
            path: the folder.
            verify: compare every SHA-256 sum; otherwise compare sizes only.

        Raises: DataError: the folder is missing or damaged, or its parts do not belong together.
        """
        path = Path(path)
        manifest = open_manifest(path, "manyheads prepare", verify)
        name = prepared_task(path)
        if name == LANGUAGE_TASK:
            raise DataError(f"{path} holds a text for language models; pairs are needed here: `manyheads prepare`.")
        if name == "classification":
            raise DataError(f"{path} holds labelled texts for classifiers; pairs are needed here: `manyheads prepare`.")
        if name == "spans":
            raise DataError(
                f"{path} holds trees for a chart parser; pairs are needed here: `manyheads prepare --task parsing`."
            )
        tokenizer, task = Tokenizer.load(path / "tokenizer.json"), None
        if name != "translation":
            task = ParsingTask.from_json(manifest["task"], str(path / "manifest.json"))
            tokenizer = ParsingTokenizer(tokenizer, task)
        stores = open_stores(PairStore, path, manifest, tokenizer.vocab_size, verify)
        texts = {
            split: read_texts(path, split, ("source", "target"), manifest, len(stores[split]), verify)
            for split in stores.keys() - {"train"}
        }
        return cls(
            path=path,
            manifest=manifest,
            tokenizer=tokenizer,
            **stores,
            valid_text=texts.get("valid", []),
            test_text=texts.get("test", []),
            task=task,
        )

    @property
    def languages(self) -> tuple[LanguagePair, ...]:
        """Source and target language, if they are recorded."""
        return tuple((source, target) for source, target in self.manifest.get("languages", []))

    def describe(self) -> str:
        """Return a few lines for users: sizes, what was left out, the tokenizer."""
        case = ", lower case" if self.tokenizer.lowercase else ""
        task = "" if self.task is None else ", for parsing"
        lines = [
            f"data {self.digest[:12]} in {self.path}{task}",
            f"tokenizer {self.tokenizer.kind}, {self.tokenizer.vocab_size} pieces{case}",
        ]
        for split in SPLITS:
            store: PairStore | None = getattr(self, split)
            if store is not None:
                tokens = f"{len(store.source.ids):,} + {len(store.target.ids):,} tokens"
                lines.append(self.describe_split(split, f"{len(store):,} pairs", tokens))
        return "\n".join(lines)


def open_manifest(path: Path, command: str, verify: bool) -> dict[str, Any]:
    """Return the manifest of a folder of prepared data, after checking the tokenizer and the stores' manifests.

    Args:
        path: the folder.
        command: the command that makes such a folder.
        verify: compare SHA-256 sums, and refuse files that the manifest does not list.

    Raises: DataError: the folder is missing or damaged.
    """
    if not path.is_dir():
        raise DataError(f"There is no folder {path} with prepared data; make one with `{command}`.")
    manifest = read_manifest(path, kind=FORMAT, version=FORMAT_VERSION)
    known = manifest["files"]
    for name in ("tokenizer.json", *(f"{split}/manifest.json" for split in _splits(manifest))):
        verify_file(path / name, known.get(name), content=verify)
    if verify:
        refuse_strangers(path, known)
    return manifest


def _splits(manifest: dict[str, Any]) -> list[str]:
    return [split for split in SPLITS if split == "train" or f"{split}/manifest.json" in manifest["files"]]


def open_stores(
    store: type[Store], path: Path, manifest: dict[str, Any], vocab_size: int, verify: bool
) -> dict[str, Store]:
    """Return split -> its store.

    Raises: DataError: a store is damaged, or belongs to a vocabulary of another size.
    """
    stores = {split: store.open(path / split, verify=verify) for split in _splits(manifest)}
    for split, opened in stores.items():
        if opened.vocab_size != vocab_size:
            raise DataError(
                f"{path / split} was made for a vocabulary of {opened.vocab_size} ids, but the tokenizer of this folder"
                f" has {vocab_size}. Prepare the data again."
            )
    return stores


def read_texts(
    folder: Path, split: str, sides: tuple[str, str], manifest: dict[str, Any], count: int, verify: bool
) -> list[tuple[str, str]]:
    """Return the raw text of a split, whose two sides are files of `count` lines.

    Raises: DataError: a file is missing or damaged, or has another number of lines.
    """
    paths = [text_path(folder, split, side) for side in sides]
    for path in paths:
        verify_file(path, manifest["files"].get(path.name), content=verify)
    first, second = (list(stored_lines(path)) for path in paths)
    if not len(first) == len(second) == count:
        raise DataError(f"{paths[0]} and {paths[1]} do not hold {count} lines each. Prepare the data again.")
    return list(zip(first, second, strict=True))


def open_data(
    settings: DataSettings,
    tokenizer_settings: TokenizerSettings,
    seed: int,
    cache_dir: str | Path,
    *,
    progress: Progress | None = None,
) -> PreparedData:
    """Return the data that `settings.path` names: a prepared folder, an embedded corpus, or the copy task.

    Args:
        settings: `path`, and `num_train_pairs` for data that is prepared here.
        tokenizer_settings: for an embedded corpus and the copy task; a prepared folder contains its own tokenizer.
        seed: of the copy task's sequences.
        cache_dir: an embedded corpus is prepared once, in a folder below this one, and found again by its settings.
        progress: see `prepare_corpus`.

    Raises:
        ConfigError: there is no embedded corpus of that name, or it has fewer training pairs than requested.
        DataError: the folder is missing or damaged.
    """
    name, count = settings.path, settings.num_train_pairs
    generated: dict[str, tuple[dict[str, Any], Callable[[], dict[str, list[tuple[str, str]]]]]] = {
        COPY_TASK: (_copy_identity(settings, seed), lambda: copy_pairs(seed, count, settings.copy_task)),
        TATOEBA: ({"digests": DIGESTS}, lambda: _tatoeba(count)),
    }
    if name in generated:
        identity, pairs = generated[name]
        recipe = {"corpus": name, **identity, "tokenizer": asdict(tokenizer_settings), "num_train_pairs": count}

        def make(folder: Path, key: str) -> None:
            splits: dict[str, Any] = {split: PairList(name, known) for split, known in pairs().items()}
            prepare_corpus(folder, **splits, tokenizer=tokenizer_settings, replace=True, progress=progress, key=key)

        return cached_folder(recipe, Path(cache_dir), make, PreparedData.open)
    if name.startswith(EMBEDDED):
        raise ConfigError(f"There is no corpus {name!r}; the embedded one is {TATOEBA}.")
    refuse_missing(name, [COPY_TASK, TATOEBA], "manyheads prepare")
    return PreparedData.open(name)


def _copy_identity(settings: DataSettings, seed: int) -> dict[str, Any]:
    """Return what determines the copy task's texts. Default settings are left out, so that old folders are found."""
    task = settings.copy_task
    return {"seed": seed} if task == CopyTaskSettings() else {"seed": seed, "copy_task": asdict(task)}


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
    """Check that a path is a folder.

    Args:
        path: the value of `data.path`.
        names: its other possible values; the last one is recommended.
        command: the command that makes such a folder.

    Raises: DataError: the path does not exist, or is not a folder.
    """
    if not Path(path).exists():
        near = difflib.get_close_matches(path, names, 1, 0.7)
        hint = f"did you mean {near[0]}?" if near else f"prepare one with `{command}`, or use {names[-1]}."
        raise DataError(f"data.path is {path!r}, but there is no such folder; {hint}")
    if not Path(path).is_dir():
        raise DataError(
            f"data.path is {path!r}, which is not a folder; training reads a folder that `{command}` made from files."
        )


def cached_folder(
    recipe: dict[str, Any], cache_dir: Path, make: Callable[[Path, str], Any], open_folder: Callable[[Path], Folder]
) -> Folder:
    """Return the folder of a recipe; prepare it first unless a complete one exists.

    Args:
        recipe: everything that determines the content, with the name of an embedded corpus under `corpus`.
        cache_dir: the folder above.
        make: prepares a folder, replacing an older one; also given a key that identifies the recipe.
        open_folder: opens a folder, and raises DataError if it is damaged.
    """
    name = recipe["corpus"].removeprefix(EMBEDDED)
    key = hashlib.sha256(canonical({**recipe, "format_version": FORMAT_VERSION})).hexdigest()
    folder = cache_dir / f"{name}-{key[:12]}"

    def complete() -> Folder | None:
        try:
            data = open_folder(folder)
        except DataError:
            return None
        return data if data.manifest.get("key") == key else None

    found = complete()
    if found is None:
        try:
            make(folder, key)
        except SaveError:
            if complete() is None:  # another process can have written the same folder first
                raise
        found = open_folder(folder)
    return found
