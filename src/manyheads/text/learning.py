"""Training of subword vocabularies. The same text always gives the same subwords, on any number of threads.

Paper: Sennrich et al. 2016, arXiv:1508.07909 (`bpe`); Kudo 2018, arXiv:1804.10959 (`unigram`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import length_hint
from typing import Any, Generic, TypeVar

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from manyheads.errors import DataError
from manyheads.text.pipeline import (
    BYTE_PIECES,
    BYTE_SCORE,
    SPECIAL_PIECES,
    WHITE_OF_TARGETS,
    assemble,
    check_encodable,
    heads_of,
    joins_before,
    normalizer,
    parts_of,
)

T = TypeVar("T")
Progress = Callable[[str, int, int], None]

COVERAGE = 0.9999  # fraction of all characters in the text that get their own piece; rarer ones are encoded as bytes
MIN_FREQUENCY = 2  # a merge that occurs once does not generalise
MAX_SAMPLE = 2_000_000  # texts or pairs; of more, every second one is used for training, then every fourth, ...
MAX_SAMPLE_BYTES = 2**30  # the same for their bytes
MAX_LEARNED_CHARS = 10_000  # per text: the time for a word grows with the square of its length
SYMBOL_SCORE = -1e6  # low enough that encoding always prefers other pieces to a symbol
MAX_PARTS = 2**19  # kept in memory
TOLD_TEXTS = 10_000  # per call of `on_progress`
TOLD_WORDS = 100_000
REPEATED = 1000  # occurrences of a word in one text for the trainer
SCORE_DECIMALS = 4  # threads add scores in any order, which changes them by 1e-14; rounding makes the file reproducible


class Rereadable(Generic[T]):
    """Things that are read again from their place at each iteration, so that they need no memory.

    Args: read: begins to read. length: number of things, for progress; 0: unknown.
    """

    def __init__(self, read: Callable[[], Iterable[T]], length: int = 0) -> None:
        self._read, self._length = read, length

    def __iter__(self) -> Iterator[T]:
        return iter(self._read())

    def __length_hint__(self) -> int:
        return self._length


def thinned(things: Iterable[T], count: int, size: int) -> Rereadable[T]:
    """Return every n-th thing, where n is the least power of 2 with which the number and the size are in bounds.

    Args: things: can be read again. count: their number. size: their bytes.
    """
    stride = 1
    while -(-count // stride) > MAX_SAMPLE or size // stride > MAX_SAMPLE_BYTES:
        stride *= 2
    return Rereadable(lambda: islice(things, 0, None, stride), -(-count // stride))


class WordCounts:
    """The words and the characters of texts with their numbers. Each different part between two spaces is split once.

    No word crosses a single space, so the counts are those of the whole texts. Memory is that of the different words.

    Args:
        texts: read once, and once more by `without`; of each only the first MAX_LEARNED_CHARS characters are used.
        kind, lowercase: see `pipeline.assemble`.
        on_progress: progress, see `learn_pieces`.
        normalize_spaces: see `learn_pieces`.

    Attributes: words: as the tokenizer splits. chars: of the normalised texts, spaces included.

    Raises: DataError: a text contains an unpaired surrogate.
    """

    def __init__(
        self, texts: Iterable[str], kind: str, lowercase: bool, on_progress: Progress, *, normalize_spaces: bool = False
    ) -> None:
        self.words: Counter[str] = Counter()
        self.chars: Counter[str] = Counter()
        self._texts, self._told = texts, on_progress
        heads = heads_of(kind)
        extra = [0.0] * len(heads) if kind == "unigram" else []
        self._library = tokenizers.Tokenizer.from_str(json.dumps(assemble(kind, lowercase, [*heads], extra)))
        content = assemble("word", lowercase, list(SPECIAL_PIECES), [])
        content["normalizer"] = normalizer("word", lowercase, WHITE_OF_TARGETS if normalize_spaces else "")
        blank = tokenizers.Tokenizer.from_str(json.dumps(content))
        self._normalizes_spaces = normalize_spaces
        self._normal: Callable[[str], str] = blank.normalizer.normalize_str
        self._raw: set[str] = set()
        parts: Counter[str] = Counter()
        for text in self._read("count words"):
            found = parts_of(text)
            parts.update(found)
            self.chars[" "] += max(0, len(found) - 1)
            if len(parts) > MAX_PARTS:
                self._add(parts)
                parts.clear()
        self._add(parts)

    def without(self, rare: set[str]) -> None:
        """Replace characters with spaces in all texts: they get no piece and no piece may contain them."""
        if not rare:
            return
        table = dict.fromkeys(map(ord, rare), " ")
        suspects = {char for char in self._raw if joins_before(char) or not rare.isdisjoint(self._normal(char))}
        for text in self._read("count rare characters"):
            if not suspects.isdisjoint(text) and not rare.isdisjoint(plain := self._normal(text)):
                self.words.subtract(self._split(plain))
                self.words.update(self._split(plain.translate(table)))
        self.words = +self.words

    def _read(self, phase: str) -> Iterator[str]:
        total, number = length_hint(self._texts), 0
        for number, text in enumerate(self._texts, 1):
            check_encodable([text])
            text = text[:MAX_LEARNED_CHARS]
            yield self._normal(text) if self._normalizes_spaces else text
            if number % TOLD_TEXTS == 0:
                self._told(phase, number, total)
        self._told(phase, number, number)

    def _add(self, parts: Mapping[str, int]) -> None:
        for part, count in parts.items():
            self._raw.update(part)
            plain = self._normal(part)
            for char in plain:
                self.chars[char] += count
            for word in self._split(plain):
                self.words[word] += count

    def _split(self, plain: str) -> list[str]:
        normal = self._library.normalizer.normalize_str(plain)
        return [word for word, _ in self._library.pre_tokenizer.pre_tokenize_str(normal)]


def train_on_words(model: Any, trainer: Any, words: Mapping[str, int], on_progress: Progress) -> dict[str, Any]:
    """Train a model of the `tokenizers` library on words, each repeated as often as it occurs. Returns: it as JSON."""
    learner = tokenizers.Tokenizer(model)
    used = set().union(*words)
    end = next(char for char in map(chr, range(0xE000, 0x110000)) if char not in used)
    learner.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(end)
    total = sum(words.values())

    def repeated() -> Iterator[str]:
        done = 0
        for word, count in words.items():
            for start in range(0, count, REPEATED):
                some = min(REPEATED, count - start)
                yield f"{word}{end}" * some
                if (done + some) // TOLD_WORDS > done // TOLD_WORDS:
                    on_progress("hand words to the trainer", done, total)
                done += some
        on_progress("hand words to the trainer", total, total)
        on_progress(f"learn pieces from {len(words):,} words (one call of the library, up to some minutes)", 0, 0)

    learner.train_from_iterator(repeated(), trainer)
    content: dict[str, Any] = json.loads(learner.to_str())["model"]
    return content


def learn_pieces(
    kind: str,
    texts: Iterable[str],
    vocab_size: int,
    lowercase: bool,
    symbols: Sequence[str] = (),
    on_progress: Progress = lambda phase, done, total: None,
    *,
    normalize_spaces: bool = False,
) -> tuple[list[str], list[Any]]:
    """Return all pieces by id (special pieces first, then symbols) and the extra argument of `pipeline.model`.

    Args:
        kind: `bpe`, `unigram` or `word`.
        texts: the training texts, read twice; see `WordCounts`.
        vocab_size: maximum number of pieces; a small text gives fewer.
        lowercase: fold case first.
        symbols: pieces that are always included; encoding almost never produces one, unless the text also teaches it.
        on_progress: called with a phase, the amount done, and the total or 0.
        normalize_spaces: first normalise white space, as in targets.

    Raises: DataError: there is no text, or it contains an unpaired surrogate.
    """
    counted = WordCounts(texts, kind, lowercase, on_progress, normalize_spaces=normalize_spaces)
    if not any(char.strip() for char in counted.chars):
        raise DataError("There is no text to train a tokenizer on: every line is empty.")
    if kind == "word":
        return _learn_words(counted.words, vocab_size, symbols)
    heads = [*heads_of(kind), *symbols]
    room = vocab_size - len(heads)
    known = set(symbols)
    counted.without(rare_characters(counted.chars, room // 2) - {" "})
    if kind == "bpe":
        trainer: Any = trainers.BpeTrainer(vocab_size=room, min_frequency=MIN_FREQUENCY, show_progress=False)
        learned = train_on_words(models.BPE(), trainer, counted.words, on_progress)
    else:
        trainer = trainers.UnigramTrainer(vocab_size=room, show_progress=False)
        learned = train_on_words(models.Unigram(), trainer, counted.words, on_progress)
    if kind == "bpe":
        vocab = learned["vocab"]
        new = sorted((piece for piece in vocab if piece not in known), key=vocab.__getitem__)
        return heads + new, [list(pair) for pair in learned["merges"]]
    scored = sorted(((-round(score, SCORE_DECIMALS), piece) for piece, score in learned["vocab"] if piece != "<unk>"))
    own = {piece: -cost for cost, piece in scored if piece in known}
    scored = [(cost, piece) for cost, piece in scored if piece not in known]
    scores = [0.0] * len(SPECIAL_PIECES) + [BYTE_SCORE] * len(BYTE_PIECES)
    scores += [own.get(symbol, SYMBOL_SCORE) for symbol in symbols]
    return heads + [piece for _, piece in scored], scores + [-cost for cost, _ in scored]


def _learn_words(counts: Counter[str], vocab_size: int, symbols: Sequence[str]) -> tuple[list[str], list[Any]]:
    """Return the most frequent words; ties are sorted by character."""
    heads = [*SPECIAL_PIECES, *symbols]
    for piece in heads:
        counts.pop(piece, None)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return [*heads, *ranked[: vocab_size - len(heads)]], []


def rare_characters(counts: Mapping[str, int], most: int) -> set[str]:
    """Return the characters that are too rare for a piece of their own.

    Args: counts: of each character of a text. most: at most this number of characters gets a piece.
    """
    wanted = COVERAGE * sum(counts.values())
    covered, rare = 0, set()
    for rank, char in enumerate(sorted(counts, key=lambda char: (-counts[char], char))):
        if covered >= wanted or rank >= most:
            rare.add(char)
        covered += counts[char]
    return rare
