"""A tokenizer of several languages with a chosen target language; see `tags`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from manyheads.text.sides import Side, TranslationTokenizer
from manyheads.text.tags import tagged, untagged

__all__ = ["IntoLanguage"]


class IntoLanguage:
    """A tokenizer whose sources have the tag of one language in front of them; see `sides.TranslationTokenizer`.

    Args:
        tokenizer: with tags.
        language: one of its `target_languages`.
    """

    def __init__(self, tokenizer: TranslationTokenizer, language: str) -> None:
        self.untagged = tokenizer
        self.language = language
        self.kind = tokenizer.kind
        self.target = tokenizer.target
        self.digest = tokenizer.digest
        self.source: Side = _TaggedSide(tokenizer.source, language)

    @property
    def target_languages(self) -> tuple[str, ...]:
        """Those of the tokenizer."""
        return self.untagged.target_languages

    def describe(self) -> Mapping[str, object]:
        """Return the properties to show to users."""
        return self.untagged.describe()

    def files(self) -> Mapping[str, bytes]:
        """Return the tokenizer's files, which do not contain the choice of a language."""
        return self.untagged.files()


class _TaggedSide:
    """A side for sources that adds the tag; see `sides.Side`."""

    def __init__(self, side: Side, language: str) -> None:
        self._side, self._language = side, language
        self.pad_id, self.bos_id, self.eos_id = side.pad_id, side.bos_id, side.eos_id

    @property
    def vocab_size(self) -> int:
        return self._side.vocab_size

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._side.encode_batch([tagged(text, self._language) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        return untagged(self._side.decode(ids))[0]

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        return [untagged(text)[0] for text in self._side.decode_batch(batch)]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return self._side.tokens(ids)
