"""Settings of the text room: how a tokenizer is trained, and how trees become sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.errors import ConfigError

__all__ = ["ParsingSettings", "TokenizerSettings"]


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
