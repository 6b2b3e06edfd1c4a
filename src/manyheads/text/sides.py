"""Interface of tokenizers for translation: one side for sources and one for targets.

Our `Tokenizer` is both sides. Other toolkits have a separate vocabulary or segmentation for each language.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from manyheads.errors import DataError
from manyheads.extras.parsing.parsing_text import load_task
from manyheads.extras.parsing.tokenizer import ParsingTokenizer
from manyheads.text.marian import MarianTokenizer
from manyheads.text.tokenizer import Tokenizer

__all__ = ["Side", "TranslationTokenizer", "has_tokenizer", "load_tokenizer"]


class Side(Protocol):
    """Conversion between text and ids for one language. bos_id: the first input id of the decoder."""

    pad_id: int
    bos_id: int
    eos_id: int

    @property
    def vocab_size(self) -> int:
        """Upper bound (exclusive) of the ids."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without BOS and EOS."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, without special ids."""

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]: ...
    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the piece of each id in readable form."""


class TranslationTokenizer(Protocol):
    """Both sides, and the files in which they are stored.

    kind: a name of the kind. digest: SHA-256 of everything that determines the behaviour.
    """

    kind: str

    @property
    def source(self) -> Side: ...
    @property
    def target(self) -> Side: ...
    @property
    def digest(self) -> str: ...
    @property
    def target_languages(self) -> tuple[str, ...]:
        """The target languages of a model of several languages, with one tag each (see `text.tags`); otherwise
        empty."""
        ...

    def describe(self) -> Mapping[str, object]:
        """Return the properties to show to users."""

    def files(self) -> Mapping[str, bytes]:
        """Return name -> content of each file that `load_tokenizer` reads."""


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model folder contains a tokenizer, complete or not."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "source.spm"))


def load_tokenizer(folder: Path) -> TranslationTokenizer:
    """Load the tokenizer of a model folder.

    Raises: DataError: it is missing or damaged. MissingExtraError: it needs a package that is not installed.
    """
    if (folder / "tokenizer.json").is_file():
        tokenizer, task = Tokenizer.load(folder / "tokenizer.json"), load_task(folder)
        return tokenizer if task is None else ParsingTokenizer(tokenizer, task)
    if (folder / "source.spm").is_file():
        return MarianTokenizer.load(folder)
    raise DataError(f"{folder} has no tokenizer: neither tokenizer.json nor source.spm is there.")
