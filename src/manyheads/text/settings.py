"""Settings of the text room: how tokenizers and vocabularies are made, and how trees become sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.errors import ConfigError

__all__ = ["ParsingSettings", "TokenizerSettings", "VocabularySettings"]


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
