"""Opening prepared data of a language model: vocabulary and token stores, by folder or by setting."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.data.corpora import NOVEL_DIGEST, load_novel
from manyheads.data.language.preparing import prepare_text
from manyheads.data.language.texts import TextBlock
from manyheads.data.prepared_folder import (
    EMBEDDED,
    TATOEBA,
    PreparedFolder,
    cached_folder,
    open_manifest,
    open_stores,
    prepared_task,
    refuse_missing,
)
from manyheads.data.preparing import LANGUAGE_TASK
from manyheads.data.store import TokenStore
from manyheads.errors import ConfigError, DataError
from manyheads.text.of_folder import load_vocabulary

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.data.settings import SegmentSettings
    from manyheads.text.settings import VocabularySettings
    from manyheads.text.vocabulary import Vocabulary

NOVEL = "embedded:crime-and-punishment"
COMMAND = "manyheads prepare --task lm"


@dataclass(frozen=True, kw_only=True)
class TextData(PreparedFolder):
    """A folder written by `prepare_text` or `prepare_ids`.

    Attributes:
        tokenizer: conversion between text and ids.
        train: the training text as ids.
        valid: the validation text as ids, or None.
        test: the test text as ids, or None.
    """

    tokenizer: Vocabulary
    train: TokenStore
    valid: TokenStore | None = None
    test: TokenStore | None = None

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> TextData:
        """Open a folder written by `manyheads prepare --task lm`.

        Args:
            path: the folder.
            verify: compare every SHA-256 sum; otherwise compare sizes only.

        Raises: DataError: the folder is missing or damaged, of another task, or its parts do not belong together.
        """
        path = Path(path)
        manifest = open_manifest(path, COMMAND, verify)
        found = prepared_task(path)
        if found != LANGUAGE_TASK:
            raise DataError(f"{path} holds data for {found}; a language model needs a text, prepared with `{COMMAND}`.")
        vocabulary = load_vocabulary(path / "tokenizer.json")
        stores = open_stores(TokenStore, path, manifest, verify, vocabulary.vocab_size)
        return cls(path=path, manifest=manifest, tokenizer=vocabulary, **stores)

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer, by the name that language models have for it."""
        return self.tokenizer

    def counts(self, split: str) -> dict[str, int]:
        """Return the counts of a split: `tokens`, `bytes`, `characters`, `words`, `lines`, `documents`, `unknown`, ...

        Results per byte or character divide the loss of the whole text by these counts. A word-level perplexity
        divides by `words`, plus `lines` if line breaks count as words, as in WikiText.

        Raises: DataError: there is no such split.
        """
        counts = self.manifest.get("counts", {}).get(split)
        if not isinstance(counts, dict):
            raise DataError(f"{self.path} has no {split} text; prepare the data with one.")
        return counts

    def describe(self) -> str:
        """Return a few lines for users: sizes, what was left out, the vocabulary."""
        vocabulary = self.vocabulary
        documents = {
            "none": "one text" if vocabulary.is_text else "one sequence",
            "files": "files are documents",
            "lines": "lines are documents",
            "fixed": "documents of one length",
        }

        def sizes(split: str, store: TokenStore) -> list[str]:
            counts = self.counts(split)
            found = [f"{len(store):,} tokens", f"{counts['bytes']:,} bytes"]
            found += [f"{counts['words']:,} words"] if vocabulary.is_text else []
            return found + ([f"{counts['documents']:,} documents"] if counts["documents"] else [])

        line = f"vocabulary {vocabulary.kind}, {vocabulary.vocab_size} ids, {documents[vocabulary.documents]}"
        return self.describe_splits(", for a language model", sizes, line)


def open_text(
    settings: SegmentSettings,
    vocabulary: VocabularySettings,
    cache_dir: str | Path,
    *,
    progress: Progress | None = None,
) -> TextData:
    """Return the data that `settings.path` names: a prepared folder, or the embedded novel.

    Args:
        settings: `path`.
        vocabulary: for the embedded novel; a prepared folder contains its own vocabulary.
        cache_dir: the novel is prepared once, in a folder below this one, and found again by its settings.
        progress: see `prepare_text`.

    Raises:
        ConfigError: there is no embedded text of that name.
        DataError: the folder is missing or damaged.
    """
    if settings.path == NOVEL:
        recipe = {"corpus": NOVEL, "digest": NOVEL_DIGEST, "vocabulary": asdict(vocabulary)}

        def make(folder: Path, key: str) -> None:
            train, valid, test = (TextBlock(NOVEL, content) for content in load_novel().values())
            options: dict[str, Any] = {"replace": True, "progress": progress, "key": key}
            prepare_text(folder, train=train, valid=valid, test=test, vocabulary=vocabulary, **options)

        return cached_folder(recipe, Path(cache_dir), make, TextData.open)
    if settings.path.startswith(EMBEDDED):
        more = f"; {TATOEBA} is for translation" if settings.path == TATOEBA else ""
        raise ConfigError(f"There is no embedded text {settings.path!r}; the embedded one is {NOVEL}{more}.")
    refuse_missing(settings.path, [NOVEL], COMMAND)
    return TextData.open(settings.path)
