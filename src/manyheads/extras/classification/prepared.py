"""Opening prepared labelled texts: tokenizer, labels, stores, and the raw validation and test texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manyheads.config.checks import check_labels
from manyheads.data.corpora.tatoeba import DIGESTS, load_tatoeba
from manyheads.data.prepared_folder import (
    PreparedFolder,
    cached_folder,
    open_manifest,
    open_stores,
    prepared_task,
    read_texts,
    refuse_missing,
)
from manyheads.data.preparing import SPLITS
from manyheads.data.progress import Progress
from manyheads.errors import ConfigError, DataError
from manyheads.extras.classification.labelled_files import Labelled, LabelledList
from manyheads.extras.classification.labelled_settings import TATOEBA_LANGUAGES, LabelledSettings
from manyheads.extras.classification.labelled_store import LabelledStore
from manyheads.extras.classification.preparing import LABELLED_TASK, SIDES, prepare_labelled
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

__all__ = ["LabelledData", "describe_balance", "languages_of", "open_labelled"]

_COMMAND = "manyheads prepare --task classification"


@dataclass(frozen=True, kw_only=True)
class LabelledData(PreparedFolder):
    """A folder written by `prepare_labelled`.

    Attributes:
        tokenizer: of the texts.
        labels: in the order of their ids.
        train: training texts as ids.
        valid: validation texts as ids, or None.
        test: test texts as ids, or None.
        texts: split -> its raw rows, in order, of valid and test.
    """

    tokenizer: Tokenizer
    labels: tuple[str, ...]
    train: LabelledStore
    valid: LabelledStore | None = None
    test: LabelledStore | None = None
    texts: Mapping[str, list[Labelled]]

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> LabelledData:
        """Open a folder written by `manyheads prepare --task classification`.

        Args: verify: compare every SHA-256 sum; otherwise compare sizes only.

        Raises: DataError: the folder is missing or damaged, of another task, or its parts do not belong together.
        """
        path = Path(path)
        manifest = open_manifest(path, _COMMAND, verify)
        if (name := prepared_task(path)) != LABELLED_TASK:
            raise DataError(f"{path} is prepared for {name}; labelled texts are needed here: `{_COMMAND}`.")
        labels = manifest["task"].get("labels")
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels) or len(labels) < 2:
            raise DataError(f"{path}/manifest.json is damaged: it lists no labels. Prepare the data again.")
        tokenizer = Tokenizer.load(path / "tokenizer.json")
        stores = open_stores(LabelledStore, path, manifest, verify)
        for split, store in stores.items():
            if store.vocab_size != max(tokenizer.vocab_size, len(labels)) or store.label.max(initial=0) >= len(labels):
                raise DataError(f"{path / split} does not fit the tokenizer and labels. Prepare the data again.")
        try:
            check_labels(labels)
        except ConfigError as error:
            raise DataError(f"{path}/manifest.json is damaged: {error} Prepare the data again.") from None
        rows = read_texts(path, SIDES, manifest, stores, verify)
        texts = {split: [Labelled(*row) for row in some] for split, some in rows.items()}
        return cls(path=path, manifest=manifest, tokenizer=tokenizer, labels=tuple(labels), texts=texts, **stores)

    def describe(self) -> str:
        """Return a few lines for users: sizes, what was left out, the tokenizer, and the balance of the labels."""
        splits = self.describe_splits(
            f", {len(self.labels)} labels",
            lambda _, store: (f"{len(store):,} texts", f"{len(store.text.ids):,} tokens"),
        )
        return f"{splits}\n{self.balance()}"

    def balance(self) -> str:
        """Return a line on the training labels: the count of each, and the accuracy of always predicting the most
        frequent one."""
        counts = self.manifest.get("label_counts", {}).get("train", {})
        return describe_balance({label: int(counts.get(label, 0)) for label in self.labels})


def describe_balance(counts: Mapping[str, int]) -> str:
    """Return a line on the labels of a data set. counts: label -> texts."""
    ordered = sorted(counts, key=lambda label: (-counts[label], label))
    total, first, last = max(1, sum(counts.values())), ordered[0], ordered[-1]
    shown = ", ".join(f"{label} {counts[label]:,}" for label in ordered[:12])
    shown += f", ... {last} {counts[last]:,}" if len(ordered) > 12 else ""
    line = f"labels {shown}; always answering {first} would be right in {100 * counts[first] / total:.1f}%"
    if counts[last] and counts[first] >= 3 * counts[last]:
        ratio = counts[first] / counts[last]
        line += f". The classes are imbalanced, {ratio:.1f} to 1: macro F1 tells more than accuracy"
    return line


def open_labelled(
    settings: LabelledSettings,
    tokenizer: TokenizerSettings,
    cache_dir: str | Path,
    *,
    progress: Progress | None = None,
) -> LabelledData:
    """Return the data that `settings.path` names: a prepared folder, or the embedded sentences with their languages.

    Args:
        tokenizer: for the embedded corpus; a prepared folder contains its own tokenizer.
        cache_dir: the embedded corpus is prepared once, in a folder below this one.

    Raises: ConfigError: there is no embedded corpus of that name. DataError: the folder is missing or damaged.
    """
    name = settings.path
    if name == TATOEBA_LANGUAGES:
        recipe = {"corpus": name, "digests": DIGESTS, "tokenizer": asdict(tokenizer)}

        def make(folder: Path, key: str) -> None:
            train, valid, test = (LabelledList(f"{name} {split}", languages_of(split)) for split in SPLITS)
            more: dict[str, Any] = {"tokenizer": tokenizer, "replace": True, "progress": progress, "key": key}
            prepare_labelled(folder, train=train, valid=valid, test=test, **more)

        return cached_folder(recipe, Path(cache_dir), make, LabelledData.open)
    if name.startswith("embedded:"):
        raise ConfigError(f"There is no labelled corpus {name!r}; the embedded one is {TATOEBA_LANGUAGES}.")
    refuse_missing(name, [TATOEBA_LANGUAGES], _COMMAND)
    return LabelledData.open(name)


def languages_of(split: str) -> list[Labelled]:
    """Return the sentences of a split of the embedded pairs, each once, labelled with their language."""
    pairs = load_tatoeba(split)
    rows = dict.fromkeys((label, text) for pair in pairs for label, text in zip(("en", "de"), pair, strict=True))
    return [Labelled(label, text) for label, text in rows]
