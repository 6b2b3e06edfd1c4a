"""What translation asks of a tokenizer: a side that reads sources and one that writes targets.

Our own `Tokenizer` is both at once. Other toolkits have a vocabulary, or at least a segmentation, for each language.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from manyheads.errors import DataError
from manyheads.text.marian import MarianTokenizer
from manyheads.text.parsing import load_task
from manyheads.text.parsing_tokenizer import ParsingTokenizer
from manyheads.text.tokenizer import Tokenizer

__all__ = ["Side", "TranslationTokenizer", "has_tokenizer", "load_tokenizer"]


class Side(Protocol):
    """Text to ids and back, for the texts of one language."""

    @property
    def pad_id(self) -> int: ...
    @property
    def bos_id(self) -> int:
        """What the decoder is given first."""
        ...

    @property
    def eos_id(self) -> int: ...
    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of one text, without BOS and EOS."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special ones are left out."""
        ...

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]: ...
    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The piece of each id, for people to read."""
        ...


class TranslationTokenizer(Protocol):
    """Both sides, and what is kept in files.

    kind: what it is, in a word. digest: SHA-256 over all that decides what it does.
    """

    @property
    def kind(self) -> str: ...
    @property
    def source(self) -> Side: ...
    @property
    def target(self) -> Side: ...
    @property
    def digest(self) -> str: ...
    def describe(self) -> Mapping[str, object]:
        """What people may want to know."""
        ...

    def files(self) -> Mapping[str, bytes]:
        """Name -> content of each file that `load_tokenizer` reads it from."""
        ...


def has_tokenizer(folder: Path) -> bool:
    """Whether a model's folder holds a tokenizer, whole or not."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "source.spm"))


def load_tokenizer(folder: Path) -> TranslationTokenizer:
    """The tokenizer of a model's folder.

    Raises: DataError: there is none, or it is damaged. MissingExtraError: it needs a package that is not installed.
    """
    if (folder / "tokenizer.json").is_file():
        tokenizer, task = Tokenizer.load(folder / "tokenizer.json"), load_task(folder)
        return tokenizer if task is None else ParsingTokenizer(tokenizer, task)
    if (folder / "source.spm").is_file():
        return MarianTokenizer.load(folder)
    raise DataError(f"{folder} has no tokenizer: neither tokenizer.json nor source.spm is there.")
