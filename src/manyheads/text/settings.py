"""Settings of tokenizers and vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from manyheads.config.checks import MOST_UNITS, at_least, between, check
from manyheads.errors import ConfigError

ITEM_BYTES: dict[str, int] = {"bytes": 1, "u16": 2}
"""Form of ids in a file -> bytes of one."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """A subword tokenizer for both languages.

    Args:
        kind: `bpe` (Sennrich et al. 2016) or `unigram` (Kudo 2018); both fall back to bytes, so no text is unknown.
            `word` splits at spaces only and maps other words to `<unk>` (for artificial data such as the copy task).
        vocab_size: total number of ids, including special tokens and the 256 byte tokens.
        lowercase: fold case before tokenising; decoding cannot restore the case.
        normalize_spaces: read white space of any kind and length as one space, and leave out characters without width
            or meaning (soft hyphens, zero-width spaces, marks of direction, control characters). In targets no-break
            spaces stay. New preparations of sentence pairs do so; it is recorded in tokenizer.json.

    Raises: ConfigError: vocab_size is too small for the special and byte tokens.
    """

    kind: Literal["bpe", "unigram", "word"] = "bpe"
    vocab_size: int = 8000
    lowercase: bool = False
    normalize_spaces: bool = False

    def __post_init__(self) -> None:
        least = 8 if self.kind == "word" else 300
        if self.vocab_size < least:
            raise ConfigError(
                f"tokenizer.vocab_size is {self.vocab_size}; a {self.kind} vocabulary needs at least {least} ids"
                " (4 special tokens, 256 bytes and some pieces).",
                fields=("vocab_size", "kind"),
            )
        check(self, "tokenizer.", between(least, MOST_UNITS), "vocab_size")


@dataclass(frozen=True, kw_only=True)
class GrowthSettings:
    """The record of a tokenizer that has learned more pieces.

    Args:
        tokenizer: digest of the tokenizer before.
        old_size: number of its ids.
        new_pieces: at most this number was to be added.
    """

    tokenizer: str
    old_size: int
    new_pieces: int


@runtime_checkable
class Extension(Protocol):
    """A tokenizer, or the vocabulary of a language model, that is to learn more pieces.

    Attributes: kind: of the tokenizer. settings: the record for a manifest. documents: those of a vocabulary.
    """

    @property
    def kind(self) -> str: ...
    @property
    def settings(self) -> GrowthSettings: ...
    @property
    def documents(self) -> str: ...
    def learn(self, texts: Iterable[str], on_progress: Callable[[str, int, int], None]) -> Any:
        """Return the larger tokenizer or vocabulary, learned from the texts."""


@dataclass(frozen=True, kw_only=True)
class VocabularySettings:
    """The tokens of a language model's text.

    Args:
        level: `bytes` (of any encoding); `bpe`, subwords that fall back to bytes (Sennrich et al. 2016); `words`, split
            at white space, with a line break as a token.
        vocab_size: the total number of ids for `bpe`, the maximum number of words for `words`; 0 means 8,000 subwords,
            or every word. Bytes always have 256.
        min_count: for `words`, the minimum count of a word in the training text; rarer words become `<unk>`.
        lowercase: fold case first; for `bpe` and `words`.
        line_end: for `words`, the token of a line break; WikiText uses `<eos>`, the One Billion Word Benchmark `<S>`.
        documents: what counts as a document: `none` (one endless text), `files` (each file), or `lines` (each line,
            whose line break is then the end of the document). The end of a document is a separate token, which the
            model also reads before each document.

    Raises: ConfigError: a number is out of range or does not match the level.
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
            wanted = "0, because there are exactly 256 bytes" if self.level == "bytes" else f"at least {least}, or 0"
            raise ConfigError(
                f"vocabulary.vocab_size is {self.vocab_size}; with level {self.level} it must be {wanted}.",
                fields=("vocab_size", "level"),
            )
        check(self, "vocabulary.", between(0, MOST_UNITS), "vocab_size")
        check(self, "vocabulary.", at_least(1), "min_count")
        if self.min_count > 1 and self.level != "words":
            raise ConfigError(
                f"vocabulary.min_count is {self.min_count}; with level {self.level} it must be 1.",
                fields=("min_count", "level"),
            )
        if self.lowercase and self.level == "bytes":
            raise ConfigError(
                "vocabulary.lowercase is true, but bytes are read without changes; choose bpe or words.",
                fields=("lowercase", "level"),
            )
        if not self.line_end or self.line_end.split() != [self.line_end] or self.line_end in ("<unk>", "<eod>"):
            raise ConfigError(
                f"vocabulary.line_end is {self.line_end!r}; it must be one word, and neither <unk> nor <eod>.",
                fields=["line_end"],
            )


@dataclass(frozen=True, kw_only=True)
class IdSettings:
    """The numbers of a model of binary files, such as images or sound.

    Args:
        form: encoding of a number in a file: `bytes` (uint8), or `u16` (uint16, little-endian).
        vocab_size: upper bound (exclusive) of the ids; 0: the largest id in the data plus one.
        documents: what counts as a document: `none` (one endless sequence), or `files` (each file).
        document_len: number of ids per document if all have the same number; 0 otherwise.
        image_size: side of square images in pixels, with three bytes per pixel and one document per image; 0: no
            images.

    Raises: ConfigError: a number is out of range or contradicts another.
    """

    form: Literal["bytes", "u16"] = "bytes"
    vocab_size: int = 0
    documents: Literal["none", "files"] = "none"
    document_len: int = 0
    image_size: int = 0

    def __post_init__(self) -> None:
        most = 256 ** ITEM_BYTES[self.form]
        if not 0 <= self.vocab_size <= most:
            raise ConfigError(
                f"vocab_size is {self.vocab_size}; with form {self.form} it must be from 1 to {most:,}, or 0 (the"
                " largest id of the data plus one).",
                fields=("vocab_size", "form"),
            )
        check(self, "", at_least(0), "document_len", "image_size")
        if self.document_len and self.documents == "files":
            raise ConfigError(
                f"document_len is {self.document_len} and documents is 'files'; give only one of them: documents have"
                " either equal lengths or a file each.",
                fields=("document_len", "documents"),
            )
        if self.image_size and (self.form != "bytes" or self.document_len not in (0, 3 * self.image_size**2)):
            raise ConfigError(
                f"image_size is {self.image_size}: each image is a document of {3 * self.image_size**2} bytes; leave"
                " out form and document_len.",
                fields=("image_size", "form", "document_len"),
            )
