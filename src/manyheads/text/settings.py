"""Settings of the text room: how a tokenizer is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.errors import ConfigError

__all__ = ["TokenizerSettings"]


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
