"""Interface of tokenizers for translation: one side for sources and one for targets.

Our `Tokenizer` is both sides. Other toolkits have a separate vocabulary or segmentation for each language.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from manyheads.text.tags import tagged, untagged

__all__ = ["IntoLanguage", "Side", "TranslationTokenizer"]


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
    """Both sides, the files in which they are stored, and what a model with this tokenizer can do.

    kind: a name of the kind. digest: SHA-256 of everything that determines the behaviour.
    model_kind: what a model with it is; one that is no `translator` has targets that are no text of a language.
    splits_lines: whether the lines and pieces of a text may be translated one by one.
    is_shared: an id means the same on both sides. needs_language: a text needs one of `target_languages`, if there are
    any.
    """

    kind: str
    model_kind: str = "translator"
    splits_lines: bool = True
    is_shared: bool = False
    needs_language: bool = False

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
        """Return name -> content of each file that `of_folder.load_tokenizer` reads."""

    def fits(self, source_vocab_size: int, target_vocab_size: int) -> bool:
        """Return whether a model with so many ids on each side has a row for every id of a text."""
        return self.source.vocab_size <= source_vocab_size and self.target.vocab_size <= target_vocab_size

    def grammar(self, settings: Any) -> Any | None:
        """Return the `Grammar` (see `decoding.search_problem`) of a search with these `DecodingSettings`; None: all
        outputs are permitted.
        """
        return None


class IntoLanguage(TranslationTokenizer):
    """A tokenizer whose sources have the tag of one language in front of them.

    Args:
        tokenizer: with tags.
        language: one of its `target_languages`.
    """

    def __init__(self, tokenizer: TranslationTokenizer, language: str) -> None:
        self.untagged = tokenizer
        self.language = language
        self.kind, self.is_shared = tokenizer.kind, tokenizer.is_shared
        self._source: Side = _TaggedSide(tokenizer.source, language)

    @property
    def source(self) -> Side:
        """The side that adds the tag."""
        return self._source

    @property
    def target(self) -> Side:
        """That of the tokenizer."""
        return self.untagged.target

    @property
    def digest(self) -> str:
        """That of the tokenizer."""
        return self.untagged.digest

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
