"""Conversion between text and ids: one tokenizer for both languages, stored in one JSON file that contains no code.

Text is normalised to NFC (and lower case, if requested; and white space, see `TokenizerSettings.normalize_spaces`).
Nothing else changes: `decode(encode(text)) == text` for normalised text. With `bpe` and `unigram` no text is unknown:
characters without a piece are encoded as UTF-8 bytes. `word` splits at white space and joins with single spaces. The
words `<s>`, `</s>` etc. in a text are ordinary text and never become special ids.

Symbols are whole words of the target side that must be one piece each, such as the brackets of trees. `encode_targets`
uses them. `encode` returns one only for a word with the same spelling (the tag `NN`), never for a bracket. All ids of
targets are below `num_target_ids`.

Tags (`>>de<<`) are the last pieces of a tokenizer for several languages; see `text.sides`. Only the source side uses
them, at the start of a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import normalizers

from manyheads.errors import ConfigError, DataError
from manyheads.text.learning import SYMBOL_SCORE, Progress, learn_pieces
from manyheads.text.pipeline import (
    SPACE_SIGN,
    SPECIAL_PIECES,
    WHITE,
    WHITE_OF_TARGETS,
    TokenizerFile,
    assemble,
    check_encodable,
    grouped,
    heads_of,
    in_parts,
    normalizer,
    parse_json,
    parts_of,
    read_tokenizer_file,
    replacements,
    take_apart,
)
from manyheads.text.sides import Capabilities, refuse_untagged, tag_of, untagged

if TYPE_CHECKING:
    from manyheads.text.settings import TokenizerSettings

MAX_CHARS_AT_ONCE = 500_000
MOST_KNOWN_CHARS = 2**21  # of parts whose ids are kept: about 300,000 words, and 60 MB


class Tokenizer(TokenizerFile, Capabilities):
    """A trained tokenizer; immutable. Create one with `train`, `load` or `from_json`.

    Ids 0 to 3 are padding, begin of sentence, end of sentence and unknown; `encode` never returns the first three.
    """

    is_shared = True
    needs_language = True
    pad_id = 0
    bos_id = 1
    eos_id = 2
    unk_id = 3

    def __init__(
        self,
        kind: str,
        lowercase: bool,
        pieces: list[str],
        extra: list[Any],
        num_symbols: int = 0,
        num_tags: int = 0,
        normalize_spaces: bool = False,
    ) -> None:
        self.kind = kind
        self.lowercase = lowercase
        self.normalize_spaces = normalize_spaces
        self._pieces = pieces
        self._num_tags = num_tags
        content = assemble(kind, lowercase, pieces, extra, num_symbols, num_tags, normalize_spaces)
        self._json = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        first = len(heads_of(kind))
        self._symbols = {pieces[index].removeprefix(" "): index for index in range(first, first + num_symbols)}
        self._white = WHITE if normalize_spaces else ""
        self._known = _KnownParts()
        try:
            self._library = tokenizers.Tokenizer.from_str(self._json)
        except Exception as error:
            raise DataError(f"The tokenizers library refuses this tokenizer: {error}") from None
        self._library.encode_special_tokens = True  # "</s>" in a text is four characters, not the end of the sentence

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        settings: TokenizerSettings,
        *,
        symbols: Sequence[str] = (),
        languages: Sequence[str] = (),
        on_progress: Progress = lambda phase, done, total: None,
    ) -> Tokenizer:
        """Train a vocabulary. The same texts give the same bytes, on any number of threads.

        Args:
            texts: sentences of both languages, read twice; an iterator is kept in memory.
            settings: kind, size and case; a small corpus may give fewer pieces than `vocab_size`.
            symbols: words of targets, each of which becomes one piece, in the order of their ids.
            languages: of translations, each of which gets a tag; see `text.sides`.
            on_progress: progress, see `learn_pieces`.

        Raises:
            DataError: there is no text, it contains an unpaired surrogate, or a symbol is not a word.
            ConfigError: the vocabulary is too small for the symbols and tags.
        """
        known = list(texts) if isinstance(texts, Iterator) else texts
        _check_symbols(symbols, settings, len(languages))
        named = [symbol if settings.kind == "word" else f" {symbol}" for symbol in symbols]
        size = settings.vocab_size - len(languages)
        pieces, extra = learn_pieces(
            settings.kind,
            known,
            size,
            settings.lowercase,
            named,
            on_progress,
            normalize_spaces=settings.normalize_spaces,
        )
        tags = [tag_of(language) for language in languages]
        # A word of the text that is spelled like a tag is an unknown word.
        pieces = [piece for piece in pieces if piece not in tags] + tags
        extra = extra + [SYMBOL_SCORE] * len(tags) if settings.kind == "unigram" else extra
        known_as = len(symbols), len(tags), settings.normalize_spaces
        return cls(settings.kind, settings.lowercase, pieces, extra, *known_as)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json.

        Raises: DataError: it is missing, too large, damaged, or not written by manyheads.
        """
        return cls.from_json(read_tokenizer_file(path), where=str(path))

    @classmethod
    def from_json(cls, text: str, *, where: str = "The text") -> Tokenizer:
        """Return the tokenizer that `to_json` wrote. where: its name in error messages.

        Raises: DataError: the text is damaged or not written by manyheads.
        """
        return cls(*take_apart(parse_json(text, where), where))

    def to_json(self) -> str:
        """Return the content of tokenizer.json, which the `tokenizers` library can read."""
        return self._json

    @property
    def in_pieces(self) -> Tokenizer:
        return self

    @property
    def source(self) -> Tokenizer:
        """The side for sources: this tokenizer (see `sides.TranslationTokenizer`), or one that reads tags."""
        return _SourceSide(self) if self._num_tags else self

    @property
    def target_languages(self) -> tuple[str, ...]:
        """The languages that have a tag, in the order of their ids; empty for one pair of languages."""
        return tuple(piece[2:-2] for piece in self._pieces[self.vocab_size - self._num_tags :])

    @cached_property
    def target(self) -> Tokenizer:
        """The side for targets: `encode` is `encode_targets`, and `decode` leaves out invalid byte sequences."""
        return _TargetSide(self)

    def describe(self) -> dict[str, object]:
        """Return the properties to show to users."""
        spaces = {"normalize_spaces": True} if self.normalize_spaces else {}
        return {"vocab_size": self.vocab_size, "lowercase": self.lowercase, **spaces}

    @property
    def vocab_size(self) -> int:
        """Number of ids, including special ones."""
        return len(self._pieces)

    @property
    def pieces(self) -> tuple[str, ...]:
        """Every piece by id as stored in the file: bytes as `<0xE2>`, special pieces as `</s>`."""
        return tuple(self._pieces)

    @property
    def can_grow(self) -> bool:
        """Whether pieces can be added: not where their scores were learned together, nor in a class that adds to it."""
        return type(self) is Tokenizer and self.kind != "unigram"

    @property
    def symbols(self) -> tuple[str, ...]:
        """The words that `encode_targets` maps to one id each, in the order of their ids; usually empty."""
        return tuple(self._symbols)

    @property
    def symbol_ids(self) -> range:
        """The ids of `symbols`."""
        first = len(heads_of(self.kind))
        return range(first, first + len(self._symbols))

    @property
    def num_target_ids(self) -> int:
        """Upper bound (exclusive) of the ids from `encode_targets`: without symbols, vocab_size."""
        return self.symbol_ids.stop if self._symbols else self.vocab_size

    def fits(self, source_vocab_size: int, target_vocab_size: int) -> bool:
        """Also whether each id of the model's outputs has a text."""
        return self.vocab_size <= source_vocab_size and self.num_target_ids <= target_vocab_size <= self.vocab_size

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, using all threads of the library.

        Raises: DataError: a text contains an unpaired surrogate; the message gives its position.
        """
        check_encodable(texts)
        lists: list[list[int]] = []
        for group in grouped(texts, MAX_CHARS_AT_ONCE):
            alone = len(group[0]) > MAX_CHARS_AT_ONCE
            lists += [self._encode_long(group[0])] if alone else _ids(self._library, group)
        if self.kind == "word":  # a word with the spelling of a special piece or a tag is an ordinary word
            known = range(self.unk_id, self.vocab_size - self._num_tags)
            lists = [[index if index in known else self.unk_id for index in ids] for ids in lists]
        return lists

    def encode_many(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return all ids that `encode_batch` gives, in a row, and the number of ids of each text.

        Each different part of a text is encoded once, also over several calls, because words repeat. Not for several
        threads at the same time.

        Raises: DataError: see `encode_batch`.
        """
        check_encodable(texts)
        if self._known.num_chars > MOST_KNOWN_CHARS:
            self._known = _KnownParts()
        return self._known.encoded([self._parts_of(text) for text in texts], self.encode_batch)

    def _parts_of(self, text: str) -> list[str]:
        # Where characters without width are left out, a part may begin with another white space than in its text.
        is_whole = len(text) > MAX_CHARS_AT_ONCE or (self._white and not text.isprintable())
        return [text] if is_whole else parts_of(text)

    def _encode_long(self, text: str) -> list[int]:
        """Encode part by part, adding a space in front of each part that does not begin inside a word."""
        ids: list[int] = []
        if self.kind == "word":
            text = self._without_endless_words(text)
        if self._white:  # here, because a part must not lose the spaces at its ends
            for pattern, content in replacements(self._white):
                text = normalizers.Replace(tokenizers.Regex(pattern), content).normalize_str(text)
            text = text.strip(" ")
        inside: tokenizers.Tokenizer | None = None
        for part, begins in in_parts(text, MAX_CHARS_AT_ONCE, through_words=self.kind != "word"):
            if not begins and inside is None:
                inside = self._with_normalizer(normalizer("word", self.lowercase))
            ids += _ids(self._library if begins or inside is None else inside, [part])[0]
        return ids

    def _with_normalizer(self, content: dict[str, Any]) -> tokenizers.Tokenizer:
        library = tokenizers.Tokenizer.from_str(json.dumps({**json.loads(self._json), "normalizer": content}))
        library.encode_special_tokens = True
        return library

    def _without_endless_words(self, text: str) -> str:
        """Replace words that are too long to be in the vocabulary.

        Normalisation of millions of combining marks needs 60 times their size in memory.

        NFC joins at most four characters into one. So a word that is more than four times as long as the longest piece
        is unknown.
        """
        least = max(1000, 4 * max(map(len, self._pieces)) + 1)
        return re.sub(rf"(?:\S|[\x1c-\x1f]){{{least},}}", SPECIAL_PIECES[self.unk_id], text)

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of target texts: the same as `encode_batch`, unless there are symbols.

        With symbols, a text consists of words separated by single spaces: symbols, and other words, which are encoded
        as bytes (for kind `word`: unknown).

        Raises: DataError: a text contains an unpaired surrogate; the message gives its position.
        """
        if not self._symbols:
            return self.encode_batch(texts)
        check_encodable(texts)
        return [[index for word in text.split(" ") if text for index in self._target_word(word)] for text in texts]

    def _target_word(self, word: str) -> list[int]:
        if word in self._symbols:
            return [self._symbols[word]]
        if self.kind == "word":
            return [self.unk_id]
        return [len(SPECIAL_PIECES) + byte for byte in f" {word}".encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of one sequence of ids, without special ids; invalid byte sequences become U+FFFD.

        Raises: DataError: an id is outside the vocabulary.
        """
        return self.decode_batch([ids])[0]

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of ids, see `decode`."""
        lists = [self._checked(ids) for ids in batch]
        if self._symbols:  # the library treats symbols as special tokens and would leave them out
            known = range(self.unk_id, self.vocab_size - self._num_tags)
            lists = [[index for index in ids if index in known] for ids in lists]
        texts: list[str] = self._library.decode_batch(lists, skip_special_tokens=not self._symbols)
        return texts

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the piece of each id in readable form: spaces as `▁`, bytes as `<0xE2>`, special ids as `</s>`.

        Raises: DataError: an id is outside the vocabulary.
        """
        return [self._pieces[index].replace(" ", SPACE_SIGN) for index in self._checked(ids)]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Complete a copy: the library forgets that special tokens in a text are ordinary text."""
        vars(self).update(state)
        self._library.encode_special_tokens = True

    def __repr__(self) -> str:
        case = ", lowercase" if self.lowercase else ""
        return f"Tokenizer({self.kind}, {self.vocab_size} pieces{case}, {self.digest[:12]})"


class _KnownParts:
    """The ids of different parts of texts, of which those that were not met yet are encoded."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._ids, self._starts = np.empty(0, np.int32), np.zeros(1, np.int64)  # of place n: starts[n] to starts[n + 1]
        self.num_chars = 0

    def encoded(
        self, split: Sequence[Sequence[str]], encode: Callable[[list[str]], list[list[int]]]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return all ids of texts in a row, and the number of ids of each. split: the parts of each text."""
        parts = list(chain.from_iterable(split))
        found = np.fromiter(map(self._places.get, parts, repeat(-1)), np.int64, len(parts))
        unknown = np.flatnonzero(found < 0)
        names = [parts[place] for place in unknown.tolist()]
        if new := list(dict.fromkeys(names)):
            lists = encode(new)
            self._places.update(zip(new, range(len(self._places), len(self._places) + len(new)), strict=True))
            self._ids = np.append(self._ids, np.fromiter(chain.from_iterable(lists), np.int32))
            self._starts = np.append(self._starts, self._starts[-1] + np.cumsum([*map(len, lists)]))
            self.num_chars += sum(map(len, new))
            found[unknown] = [self._places[name] for name in names]
        starts = self._starts[found]
        lengths = self._starts[found + 1] - starts
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        ids = self._ids[np.repeat(starts - ends[:-1], lengths) + np.arange(ends[-1])]
        return ids, np.diff(ends[np.cumsum([0, *map(len, split)])])


def _ids(library: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]


class _TargetSide(Tokenizer):
    """The target side of a tokenizer."""

    def __init__(self, whole: Tokenizer) -> None:
        vars(self).update(vars(whole))
        if self.normalize_spaces:
            self._white = WHITE_OF_TARGETS
            self._library = self._with_normalizer(normalizer(self.kind, self.lowercase, self._white))
            self._known = _KnownParts()

    @property
    def target(self) -> Tokenizer:  # cached in the whole tokenizer only
        return self

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode_targets(texts) if self._symbols else super().encode_batch(texts)

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        texts = super().decode_batch(batch)
        broken = [place for place, text in enumerate(texts) if "\ufffd" in text and self.kind != "word"]
        mended = super().decode_batch([_with_whole_characters(batch[place]) for place in broken])
        for place, text in zip(broken, mended, strict=True):
            texts[place] = text
        return texts


def _with_whole_characters(ids: Sequence[int]) -> list[int]:
    """Return the ids without bytes that are no part of a character in UTF-8."""
    first = len(SPECIAL_PIECES)
    whole: list[int] = []
    for is_byte, run in groupby(ids, lambda index: first <= index < first + 256):
        some = list(run)
        if is_byte:
            text = bytes(index - first for index in some).decode(errors="ignore")
            some = [first + byte for byte in text.encode()]
        whole += some
    return whole


class _SourceSide(Tokenizer):
    """The source side of a tokenizer with tags."""

    def __init__(self, whole: Tokenizer) -> None:
        vars(self).update(vars(whole))
        self._whole = whole

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, the first of which is the tag. Raises: RequestError: a text has no tag."""
        plain, tags = self._untagged(texts)
        encoded = super().encode_batch(plain)
        return [ids if tag is None else [tag, *ids] for tag, ids in zip(tags, encoded, strict=True)]

    def encode_many(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        plain, tags = self._untagged(texts)
        ids, lengths = self._whole.encode_many(plain)
        tagged = [place for place, tag in enumerate(tags) if tag is not None]
        starts = (np.cumsum(lengths) - lengths)[tagged]
        lengths[tagged] += 1
        return np.insert(ids, starts, [tag for tag in tags if tag is not None]), lengths

    def _untagged(self, texts: Sequence[str]) -> tuple[list[str], list[int | None]]:
        """Return the texts without their tags, and the ids of these."""
        refuse_untagged(texts, self.target_languages)
        parts = [untagged(text) for text in texts]
        first = self.vocab_size - self._num_tags
        ids = {language: first + place for place, language in enumerate(self.target_languages)}
        return [text for text, _ in parts], [None if language is None else ids[language] for _, language in parts]


def _check_symbols(symbols: Sequence[str], settings: TokenizerSettings, num_tags: int) -> None:
    """Check that symbols are unique words and leave room for other pieces."""
    for symbol in symbols:
        if not symbol or " " in symbol or symbol in SPECIAL_PIECES or symbols.count(symbol) > 1:
            raise DataError(f"{symbol!r} cannot be a symbol of a tokenizer: it is not a word, or it exists already.")
    check_encodable(symbols)
    least = len(heads_of(settings.kind)) + len(symbols) + num_tags + 8
    if num_tags and settings.vocab_size < least:
        raise ConfigError(
            f"tokenizer.vocab_size is {settings.vocab_size}, but {num_tags} tags of languages need at least {least}."
        )
    if symbols and settings.vocab_size < least:
        raise ConfigError(
            f"tokenizer.vocab_size is {settings.vocab_size}, but {len(symbols)} symbols of the target side need at"
            f" least {least}."
        )
