"""More pieces for a tokenizer that a model already has: all its ids stay, and new ones follow.

A model that is trained further on other text then needs fewer tokens for it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import tokenizers
from tokenizers import models, trainers

from manyheads.errors import ConfigError, DataError
from manyheads.text.learning import MIN_FREQUENCY, Progress, WordCounts, rare_characters, train_on_words
from manyheads.text.of_folder import PieceVocabulary
from manyheads.text.pipeline import SPECIAL_PIECES, WHITE_OF_TARGETS, assemble, heads_of, normalizer, take_apart
from manyheads.text.settings import GrowthSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabulary import Vocabulary

_FIRST_SIGN = 0x10000  # from here on no code point is white space
_SPARE = 100  # merges


@dataclass(frozen=True)
class Growth:
    """A tokenizer, or the vocabulary of a language model, that is to learn more pieces.

    Args:
        tokenizer: as the model has it.
        new_pieces: at most this number of pieces is added.

    Raises: ConfigError: the number is not positive, or this kind cannot grow.
    """

    tokenizer: Tokenizer | Vocabulary
    new_pieces: int

    def __post_init__(self) -> None:
        if self.new_pieces < 1:
            raise ConfigError(
                f"--new-pieces is {self.new_pieces}; give at least 1, or leave it out to use the tokenizer as it is."
            )
        known: Any = self.tokenizer
        if isinstance(known, Vocabulary) and not isinstance(known, PieceVocabulary):
            raise ConfigError(f"--new-pieces: a vocabulary of {known.kind} cannot grow, only one of subwords (bpe).")
        inner = known.tokenizer if isinstance(known, PieceVocabulary) else known
        if not getattr(inner, "can_grow", False):
            kind = getattr(inner, "kind", type(inner).__name__)
            raise ConfigError(
                f"--new-pieces: a tokenizer of kind {kind} cannot grow, because its scores were learned together; only"
                " bpe and word can."
            )
        if inner.symbols or inner.target_languages:
            what = "brackets of trees" if inner.symbols else "tags of languages"
            raise ConfigError(f"--new-pieces: a tokenizer with pieces for {what} cannot grow; leave the option out.")

    @property
    def kind(self) -> str:
        """That of the tokenizer."""
        return self.tokenizer.kind

    @property
    def documents(self) -> str:
        """Those of the vocabulary of a language model; `none` for a tokenizer of pairs."""
        return self.tokenizer.documents if isinstance(self.tokenizer, Vocabulary) else "none"

    @property
    def settings(self) -> GrowthSettings:
        """The record for a manifest."""
        known = self.tokenizer
        return GrowthSettings(tokenizer=known.digest, old_size=known.vocab_size, new_pieces=self.new_pieces)

    def learn(self, texts: Iterable[str], on_progress: Progress = lambda phase, done, total: None) -> Any:
        """Return the larger tokenizer or vocabulary. For the arguments see `grow`."""
        known = self.tokenizer
        if isinstance(known, PieceVocabulary):
            return PieceVocabulary(grow(known.tokenizer, texts, self.new_pieces, on_progress), known.documents)
        return grow(cast(Tokenizer, known), texts, self.new_pieces, on_progress)  # since __post_init__


def grow(
    tokenizer: Tokenizer,
    texts: Iterable[str],
    new_pieces: int,
    on_progress: Progress = lambda phase, done, total: None,
) -> Tokenizer:
    """Return a tokenizer with the pieces of another one, and after them pieces that are learned from a text.

    With `bpe` the text is first divided by the old merges, and new ones are learned that follow the old ones, so a text
    never gets more tokens. Characters that the old tokenizer writes as bytes get pieces, unless they are rare. With
    `word` the most frequent unknown words are added. The same texts give the same bytes.

    Args:
        tokenizer: of kind `bpe` or `word`, without symbols and tags.
        texts: the training texts; of each only the first 10,000 characters are used.
        new_pieces: at most this number is added; a text that needs fewer gives fewer.
        on_progress: progress, see `learn_pieces`.

    Raises: DataError: there is no text, or it contains an unpaired surrogate.
    """
    kind, lowercase, pieces, merges, *_, spaces = take_apart(json.loads(tokenizer.to_json()), "The tokenizer")
    counts = WordCounts(texts, kind, lowercase, on_progress, normalize_spaces=spaces).words
    words = {word: count for word, count in counts.items() if word.strip()}
    if not words:
        raise DataError("There is no text to learn new pieces from: every line is empty.")
    if kind == "word":
        ranked = sorted(words.keys() - set(pieces), key=lambda word: (-words[word], word))
        return Tokenizer(kind, lowercase, pieces + ranked[:new_pieces], [], normalize_spaces=spaces)
    pieces = pieces + _new_characters(words, set(pieces), new_pieces)
    with_characters = Tokenizer(kind, lowercase, pieces, merges, normalize_spaces=spaces)
    room = new_pieces - (len(pieces) - tokenizer.vocab_size)
    more, more_merges = _learn_merges(with_characters, words, room, on_progress) if room else ([], [])
    return Tokenizer(kind, lowercase, pieces + more, merges + more_merges, normalize_spaces=spaces)


def _library_of(tokenizer: Tokenizer) -> Any:
    """The tokenizer in the `tokenizers` library, without special tokens, which could be found in a text."""
    kind, lowercase, pieces, extra, *_, spaces = take_apart(json.loads(tokenizer.to_json()), "The tokenizer")
    normal = normalizer(kind, lowercase, WHITE_OF_TARGETS if spaces else "")
    blueprint = {**assemble(kind, lowercase, pieces, extra), "added_tokens": [], "normalizer": normal}
    return tokenizers.Tokenizer.from_str(json.dumps(blueprint))


def _new_characters(words: Mapping[str, int], known: set[str], most: int) -> list[str]:
    """The characters without a piece that are not rare, the most frequent first; at most half of `most`."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for char in word:
            counts[char] += count
    kept = {char for char in counts if char not in known} - rare_characters(counts, len(counts))
    return sorted(kept, key=lambda char: (-counts[char], char))[: most // 2]


def _learn_merges(
    tokenizer: Tokenizer, words: Mapping[str, int], most: int, on_progress: Progress
) -> tuple[list[str], list[list[str]]]:
    """Learn merges of a tokenizer's pieces: each piece is a letter for the trainer of the library.

    Returns: the new pieces, at most `most`, and the merges.
    """
    library = _library_of(tokenizer)
    pieces, first = tokenizer.pieces, len(heads_of(tokenizer.kind))
    signs: dict[int, str] = {}

    def written(word: str) -> str:
        ids = [token.id for token in library.model.tokenize(word)]
        # Bytes are never joined, so a word ends before each and begins after it.
        return "".join(" " if one < first else signs.setdefault(one, chr(_FIRST_SIGN + len(signs))) for one in ids)

    divided: Counter[str] = Counter()
    for word in sorted(words):
        for part in written(word).split():
            divided[part] += words[word]
    # Two merges can give one piece, so more are learned than there is room for.
    size = len(signs) + 2 * most + _SPARE
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=MIN_FREQUENCY, show_progress=False)
    of_sign = {sign: pieces[index] for index, sign in signs.items()}
    known, new, merges = set(pieces), list[str](), list[list[str]]()
    for pair in train_on_words(models.BPE(), trainer, divided, on_progress)["merges"]:
        left, right = ("".join(of_sign[sign] for sign in half) for half in pair)
        if left + right not in known:
            if len(new) == most:
                break
            known.add(left + right)
            new.append(left + right)
        merges.append([left, right])
    return new, merges


def old_ids_of(tokenizer: Any, old_size: int) -> list[list[int]]:
    """Return for each id from `old_size` on the older ids that it replaces.

    They are the two halves of its merge, divided further where a half is new, or the bytes of a character. The list of
    an id is empty if they are not known (a word).

    Args:
        tokenizer: of any kind, or a vocabulary of a language model.
        old_size: number of ids before it grew; as many as now: the list is empty.
    """
    inner = tokenizer.tokenizer if isinstance(tokenizer, PieceVocabulary) else tokenizer
    new = range(old_size, tokenizer.vocab_size)
    if not new:
        return []
    if not getattr(inner, "can_grow", False) or inner.kind != "bpe":
        return [[] for _ in new]
    _, _, pieces, merges, *_ = take_apart(json.loads(inner.to_json()), "The tokenizer")
    ids = {piece: index for index, piece in enumerate(pieces)}
    halves: dict[str, list[str]] = {}
    for left, right in merges:
        halves.setdefault(left + right, [left, right])

    def older(piece: str) -> list[int]:
        if ids[piece] < old_size:
            return [ids[piece]]
        if piece in halves:
            return [one for half in halves[piece] for one in older(half)]
        return [len(SPECIAL_PIECES) + byte for byte in piece.encode("utf-8")]

    return [older(pieces[index]) for index in new]
