"""A language model's data as a run sees it: vocabulary and token stores; and how a setting names it."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyheads.data.corpora.novel import NOVEL_DIGEST, load_novel
from manyheads.data.manifest import read_manifest, refuse_strangers, verify_file
from manyheads.data.prepared import EMBEDDED, TATOEBA, cached_folder, prepared_task, refuse_missing
from manyheads.data.preparing import FORMAT, FORMAT_VERSION, LANGUAGE_TASK, SPLITS, canonical
from manyheads.data.preparing_text import prepare_text
from manyheads.data.progress import Progress
from manyheads.data.settings import SegmentSettings
from manyheads.data.texts import TextBlock
from manyheads.data.token_store import TokenStore
from manyheads.errors import ConfigError, DataError
from manyheads.text.settings import VocabularySettings
from manyheads.text.vocabularies import load_vocabulary
from manyheads.text.vocabulary import Vocabulary

__all__ = ["NOVEL", "TextData", "open_text"]

NOVEL = "embedded:crime-and-punishment"
NOTED = ("unknown", "empty_dropped", "bad_utf8_replaced", "bad_utf8_skipped", "control_characters", "long_lines")


@dataclass(frozen=True)
class TextData:
    """A folder written by `prepare_text`.

    Attributes:
        path: the folder.
        vocabulary: text to ids and back.
        train: the training text as ids.
        valid: the validation text, or None.
        test: the test text, or None.
        manifest: settings, counts and SHA-256 sums.
    """

    path: Path
    vocabulary: Vocabulary
    train: TokenStore
    valid: TokenStore | None
    test: TokenStore | None
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> TextData:
        """Open a folder written by `manyheads prepare --task lm`.

        Args:
            path: the folder.
            verify: compare every SHA-256 sum; off, sizes alone.

        Raises: DataError: the folder is missing or damaged, of another task, or its parts do not belong together.
        """
        path = Path(path)
        if not path.is_dir():
            raise DataError(
                f"There is no folder {path} with prepared data; make one with `manyheads prepare --task lm`."
            )
        manifest = read_manifest(path, kind=FORMAT, version=FORMAT_VERSION)
        found = prepared_task(path)
        if found != LANGUAGE_TASK:
            raise DataError(
                f"{path} holds data for {found}; a language model needs a text, prepared with"
                " `manyheads prepare --task lm`."
            )
        known = manifest["files"]
        splits = [split for split in SPLITS if split == "train" or f"{split}/manifest.json" in known]
        for name in ("tokenizer.json", *(f"{split}/manifest.json" for split in splits)):
            verify_file(path / name, known.get(name), content=verify)
        if verify:
            refuse_strangers(path, known)
        vocabulary = load_vocabulary(path / "tokenizer.json")
        stores = {split: TokenStore.open(path / split, verify=verify) for split in splits}
        for split, store in stores.items():
            if store.vocab_size != vocabulary.vocab_size:
                raise DataError(
                    f"{path / split} was made for a vocabulary of {store.vocab_size} ids, but the one beside it has"
                    f" {vocabulary.vocab_size}. Prepare the data again."
                )
        return cls(path, vocabulary, stores["train"], stores.get("valid"), stores.get("test"), manifest)

    @property
    def tokenizer(self) -> Vocabulary:
        """The vocabulary, by the name that every task's data has for it."""
        return self.vocabulary

    @property
    def digest(self) -> str:
        """SHA-256 over vocabulary and ids; equal exactly where the data is, wherever it lies."""
        return hashlib.sha256(canonical(self.manifest["files"])).hexdigest()

    def counts(self, split: str) -> dict[str, int]:
        """The counts of a split: `tokens`, `bytes`, `characters`, `words`, `lines`, `documents`, `unknown`, ...

        Figures per byte or character divide the whole text's loss by these; a word-level perplexity divides by `words`,
        and by `lines` too where line breaks count as words, as in WikiText.

        Raises: DataError: there is no such split.
        """
        counts = self.manifest.get("counts", {}).get(split)
        if not isinstance(counts, dict):
            raise DataError(f"{self.path} has no {split} text; prepare the data with one.")
        return counts

    def describe(self) -> str:
        """A few lines for people: sizes, what was left out, the vocabulary."""
        vocabulary = self.vocabulary
        documents = {
            "none": "one text" if vocabulary.is_text else "one sequence",
            "files": "files are documents",
            "lines": "lines are documents",
            "fixed": "documents of one length",
        }
        lines = [
            f"data {self.digest[:12]} in {self.path}, for a language model",
            f"vocabulary {vocabulary.kind}, {vocabulary.vocab_size} ids, {documents[vocabulary.documents]}",
        ]
        for split in SPLITS:
            store: TokenStore | None = getattr(self, split)
            if store is None:
                continue
            counts = self.counts(split)
            sizes = [f"{len(store):,} tokens", f"{counts['bytes']:,} bytes"]
            sizes += [f"{counts['words']:,} words"] if vocabulary.is_text else []
            if counts["documents"]:
                sizes.append(f"{counts['documents']:,} documents")
            noted = [f"{counts[name]:,} {name.replace('_', ' ')}" for name in NOTED if counts.get(name)]
            lines.append(f"{split}: " + ", ".join([*sizes, *noted]))
        return "\n".join(lines)


def open_text(
    settings: SegmentSettings,
    vocabulary: VocabularySettings,
    cache_dir: str | Path,
    *,
    progress: Progress | None = None,
    verify: bool = True,
) -> TextData:
    """The data that `settings.path` names: a prepared folder, or the embedded novel.

    Args:
        settings: `path`.
        vocabulary: for the embedded novel; a prepared folder brings its own vocabulary.
        cache_dir: the novel is prepared once into a folder in here and found again by its settings.
        progress: see `prepare_text`.
        verify: see `TextData.open`.

    Raises:
        ConfigError: there is no embedded text of that name.
        DataError: the folder is missing or damaged.
    """
    if settings.path == NOVEL:
        recipe = {"corpus": NOVEL, "digest": NOVEL_DIGEST, "vocabulary": dataclasses.asdict(vocabulary)}

        def make(folder: Path, key: str) -> None:
            train, valid, test = (TextBlock(NOVEL, content) for content in load_novel().values())
            options: dict[str, Any] = {"replace": True, "progress": progress, "key": key}
            prepare_text(folder, train=train, valid=valid, test=test, vocabulary=vocabulary, **options)

        return cached_folder(recipe, Path(cache_dir), make, lambda folder: TextData.open(folder, verify=verify))
    if settings.path.startswith(EMBEDDED):
        more = f"; {TATOEBA} is for translation" if settings.path == TATOEBA else ""
        raise ConfigError(f"There is no embedded text {settings.path!r}; the embedded one is {NOVEL}{more}.")
    refuse_missing(settings.path, [NOVEL], "manyheads prepare --task lm")
    return TextData.open(settings.path, verify=verify)
