"""Opening prepared pairs: tokenizer, token stores, and the raw validation and test text, by folder or by setting.

The copy task (the target equals the source) is the smallest test of whether a translation model learns: The Annotated
Transformer (Rush 2018), "A First Example". Differs: sequences have different lengths, and validation and test sequences
never occur in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.data.corpora import DIGESTS, load_tatoeba
from manyheads.data.prepared_folder import (
    EMBEDDED,
    TATOEBA,
    PreparedFolder,
    cached_folder,
    open_manifest,
    open_stores,
    prepared_task,
    read_texts,
    refuse_missing,
)
from manyheads.data.preparing import LANGUAGE_TASK, SPLITS
from manyheads.data.sampler import mix
from manyheads.data.settings import CopyTaskSettings, DataSettings
from manyheads.data.store import PairStore
from manyheads.data.translation.preparing import SIDES, PairList, prepare_corpus
from manyheads.errors import ConfigError, DataError
from manyheads.seeding import derive_seed
from manyheads.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.text.settings import TokenizerSettings
    from manyheads.text.sides import LanguagePair

__all__ = ["PreparedData", "TATOEBA", "open_data", "prepare_corpus"]

NUM_TRAIN, NUM_VALID, NUM_TEST = 20_000, 200, 500
MOST_TRAIN = 10_000_000


def copy_pairs(
    seed: int, num_train_pairs: int = 0, settings: CopyTaskSettings | None = None
) -> dict[str, list[tuple[str, str]]]:
    """Return pairs of equal texts for `train`, `valid` and `test`: sequences of the words `w1`, `w2` ...; none twice.

    Args:
        seed: determines the texts. Test and validation pairs do not depend on the number of training pairs.
        num_train_pairs: 0 means 20,000.
        settings: number of words, and lengths; None: the defaults.

    Raises: ConfigError: num_train_pairs is above ten million, or there are too few different texts.
    """
    task = settings or CopyTaskSettings()
    num_train = num_train_pairs or NUM_TRAIN
    if num_train > MOST_TRAIN:
        raise ConfigError(f"data.num_train_pairs is {num_train}; it must be at most {MOST_TRAIN} for the copy task.")
    wanted = NUM_TEST + NUM_VALID + num_train
    if 2 * wanted > task.num_texts:  # random texts are drawn until enough of them are new
        raise ConfigError(
            f"data.copy_task has {task.num_texts:,} different texts (num_symbols {task.num_symbols}, shortest"
            f" {task.shortest}, longest {task.longest}), but {2 * wanted:,} are needed for {num_train:,} training"
            f" pairs, {NUM_VALID} and {NUM_TEST} others; raise num_symbols or longest, or lower data.num_train_pairs."
        )
    base = np.uint64(derive_seed(seed, "copy-task"))
    known: dict[str, None] = {}  # an ordered set
    start = 0
    while len(known) < wanted:
        rows = np.arange(start, start + wanted, dtype=np.uint64)
        draws = mix(rows + base)[:, None] + np.arange(task.longest + 1, dtype=np.uint64)
        numbers = mix(draws.astype(np.uint64))
        lengths = task.shortest + numbers[:, 0] % np.uint64(task.longest - task.shortest + 1)
        symbols = 1 + numbers[:, 1:] % np.uint64(task.num_symbols)
        for length, row in zip(lengths.tolist(), symbols.tolist(), strict=True):
            known[" ".join(f"w{symbol}" for symbol in row[:length])] = None
        start += wanted
    texts = [(text, text) for text in known][:wanted]
    held_out = NUM_TEST + NUM_VALID
    return {"train": texts[held_out:], "valid": texts[NUM_TEST:held_out], "test": texts[:NUM_TEST]}


COPY_TASK = "copy-task"
_LANGUAGES: dict[str, list[LanguagePair]] = {TATOEBA: [("en", "de")]}
_NO_PAIRS = {
    LANGUAGE_TASK: "a text for language models",
    "classification": "labelled texts for classifiers",
    "spans": "trees for a chart parser",
}


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
    """

    tokenizer: Tokenizer
    train: PairStore
    valid: PairStore | None = None
    test: PairStore | None = None
    valid_text: list[tuple[str, str]]
    test_text: list[tuple[str, str]]

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
        if name in _NO_PAIRS:
            command = "manyheads prepare --task parsing" if name == "spans" else "manyheads prepare"
            raise DataError(f"{path} holds {_NO_PAIRS[name]}; pairs are needed here: `{command}`.")
        tokenizer = Tokenizer.load(path / "tokenizer.json")
        if name != "translation":
            from manyheads.text.of_folder import tokenizer_of_task

            tokenizer = tokenizer_of_task(tokenizer, manifest["task"], str(path / "manifest.json"))
        stores = open_stores(PairStore, path, manifest, verify, tokenizer.vocab_size)
        texts = read_texts(path, SIDES, manifest, stores, verify)
        return cls(
            path=path,
            manifest=manifest,
            tokenizer=tokenizer,
            **stores,
            valid_text=texts.get("valid", []),
            test_text=texts.get("test", []),
        )

    @property
    def task(self) -> str:
        """The name of the task."""
        return str(self.manifest.get("task", {"name": "translation"})["name"])

    @property
    def languages(self) -> tuple[LanguagePair, ...]:
        """Source and target language, if they are recorded."""
        return tuple((source, target) for source, target in self.manifest.get("languages", []))

    def describe(self) -> str:
        """Return a few lines for users: sizes, what was left out, the tokenizer."""
        return self.describe_splits(
            "" if self.task == "translation" else f", for {self.task}",
            lambda _, store: (f"{len(store):,} pairs", f"{len(store.source.ids):,} + {len(store.target.ids):,} tokens"),
        )


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
            prepare_corpus(
                folder,
                **splits,
                tokenizer=tokenizer_settings,
                languages=_LANGUAGES.get(name, ()),
                replace=True,
                progress=progress,
                key=key,
            )

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
