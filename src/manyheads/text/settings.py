"""Settings of the text room: how tokenizers and vocabularies are made, and how trees become sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.errors import ConfigError

__all__ = ["ITEM_BYTES", "IdSettings", "ParsingSettings", "TokenizerSettings", "VocabularySettings"]

ITEM_BYTES: dict[str, int] = {"bytes": 1, "u16": 2}
"""Form of ids in a file -> bytes of one."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """A subword tokenizer, one for both languages.

    Args:
        kind: `bpe` (Sennrich et al. 2016) or `unigram` (Kudo 2018); both fall back to bytes, so no text is unknown.
            `word` splits at spaces alone and knows `<unk>` (for made-up languages such as the copy task's).
        vocab_size: number of ids in all, special tokens and the 256 byte tokens included.
        lowercase: fold case before tokenising; what it loses cannot be restored.

    Raises: ConfigError: vocab_size is too small to hold the special and byte tokens.
    """

    kind: Literal["bpe", "unigram", "word"] = "bpe"
    vocab_size: int = 8000
    lowercase: bool = False

    def __post_init__(self) -> None:
        least = 8 if self.kind == "word" else 300
        if self.vocab_size < least:
            raise ConfigError(
                f"tokenizer.vocab_size is {self.vocab_size}; a {self.kind} vocabulary needs at least {least} ids"
                " (4 special tokens, 256 bytes and some pieces)."
            )


@dataclass(frozen=True, kw_only=True)
class VocabularySettings:
    """What a language model reads and writes: the units of one long text.

    Args:
        level: `bytes`, as they are, whatever the encoding; `bpe`, pieces of words that fall back to bytes (Sennrich et
            al. 2016); `words`, split at white space, where a line break is a token of its own.
        vocab_size: of `bpe` the number of ids in all, of `words` the most words that are kept; 0 means 8,000 pieces, or
            every word. Bytes are always 256.
        min_count: of `words`, the fewest times that a word must stand in the training text; rarer ones are `<unk>`.
        lowercase: fold case first; of `bpe` and `words`.
        line_end: of `words`, the token for a line break; `<eos>` is WikiText's, `<S>` the One Billion Word Benchmark's.
        documents: what a document is: nothing (`none`: one endless text), a whole file (`files`), or a line (`lines`),
            whose line break is then the end of the document. Documents end in a token that stands for that alone, and
            are read as if it stood before them too.

    Raises: ConfigError: a number is out of range, or does not go with the level.
    """

    level: Literal["bytes", "bpe", "words"] = "bytes"
    vocab_size: int = 0
    min_count: int = 1
    lowercase: bool = False
    line_end: str = "<eos>"
    documents: Literal["none", "files", "lines"] = "none"

    def __post_init__(self) -> None:
        least = {"bytes": 0, "bpe": 300, "words": 4}[self.level]
        if self.vocab_size and (self.level == "bytes" or self.vocab_size < least):
            wanted = "0, as bytes are 256 and no others" if self.level == "bytes" else f"at least {least}, or 0"
            raise ConfigError(
                f"vocabulary.vocab_size is {self.vocab_size}; with level {self.level} it must be {wanted}."
            )
        if self.min_count < 1 or (self.min_count > 1 and self.level != "words"):
            raise ConfigError(
                f"vocabulary.min_count is {self.min_count}; it must be at least 1, and 1 with level {self.level}."
                if self.level != "words"
                else f"vocabulary.min_count is {self.min_count}; it must be at least 1."
            )
        if self.lowercase and self.level == "bytes":
            raise ConfigError("vocabulary.lowercase is true, but bytes are read as they are; choose bpe or words.")
        if not self.line_end or self.line_end.split() != [self.line_end] or self.line_end in ("<unk>", "<eod>"):
            raise ConfigError(
                f"vocabulary.line_end is {self.line_end!r}; it must be one word, and neither <unk> nor <eod>."
            )


@dataclass(frozen=True, kw_only=True)
class IdSettings:
    """What a model of sequences that are no text reads and writes: numbers as they stand in binary files.

    Args:
        form: how a file holds a number: `bytes` (uint8), or `u16` (uint16, little-endian).
        vocab_size: ids are below it; 0 takes the largest id there is, and one more.
        documents: what a document is: nothing (`none`: one endless sequence), or a whole file (`files`).
        document_len: ids of a document, where all have the same number; 0: they have not.
        image_size: the ids are square pictures of so many pixels a side, three bytes a pixel, a document each; 0: not.

    Raises: ConfigError: a number is out of range, or contradicts another.
    """

    form: Literal["bytes", "u16"] = "bytes"
    vocab_size: int = 0
    documents: Literal["none", "files"] = "none"
    document_len: int = 0
    image_size: int = 0

    def __post_init__(self) -> None:
        most = 256 ** ITEM_BYTES[self.form]
        if not 0 <= self.vocab_size <= most:
            raise ConfigError(f"vocab_size is {self.vocab_size}; {self.form} hold ids of 1 to {most:,}, or give 0.")
        for name in ("document_len", "image_size"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative.")
        if self.document_len and self.documents == "files":
            raise ConfigError(
                f"document_len is {self.document_len} and documents is 'files'; documents either have one length, or"
                " are files; give one of the two."
            )
        if self.image_size and (self.form != "bytes" or self.document_len not in (0, 3 * self.image_size**2)):
            raise ConfigError(
                f"image_size is {self.image_size}: pictures are documents of {3 * self.image_size**2} bytes; leave out"
                " form and document_len."
            )


@dataclass(frozen=True, kw_only=True)
class ParsingSettings:
    """What of a tree a parser learns and writes (Vinyals et al. 2015, arXiv:1412.7449). The defaults are the paper's.

    Args:
        tags: parts of speech: `XX` for all of them, or `keep`.
        words: what stands in the place of a word: its tag alone (`leave`), or after it the word's pieces (`write`), so
            that the decoder reads where it is in the sentence.
        functions: what follows - or = in a label (`NP-SBJ`): `strip` or `keep`.
        traces: leaves tagged -NONE-, which are no words: `strip` (with constituents that hold nothing else) or `keep`.
        root: the label on top of every tree. It stands for no constituent and is not written; a root that a file calls
            TOP, S1 or nothing at all becomes this one. None: nothing is on top, trees stay as they are.

    Raises: ConfigError: root is no label.
    """

    tags: Literal["XX", "keep"] = "XX"
    words: Literal["leave", "write"] = "leave"
    functions: Literal["strip", "keep"] = "strip"
    traces: Literal["strip", "keep"] = "strip"
    root: str | None = "ROOT"

    def __post_init__(self) -> None:
        if self.root is not None and (not self.root or any(char in "() \t\n\r\v\f" for char in self.root)):
            raise ConfigError(f"root is {self.root!r}; a label has no brackets or spaces and is not empty.")
