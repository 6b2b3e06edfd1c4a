"""Training of subword vocabularies. The same text always gives the same subwords, on any number of threads.

Paper: Sennrich et al. 2016, arXiv:1508.07909 (`bpe`); Kudo 2018, arXiv:1804.10959 (`unigram`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import tokenizers
from tokenizers import models, trainers

from manyheads.text.pipeline import (
    BYTE_PIECES,
    BYTE_SCORE,
    SPECIAL_PIECES,
    WHITE_OF_TARGETS,
    assemble,
    heads_of,
    normalizer,
)

__all__ = ["MAX_LEARNED_CHARS", "MIN_FREQUENCY", "SYMBOL_SCORE", "Thinned", "learn_pieces", "rare_characters"]

T = TypeVar("T")

COVERAGE = 0.9999  # fraction of all characters in the text that get their own piece; rarer ones are encoded as bytes
MIN_FREQUENCY = 2  # a merge that occurs once does not generalise
MAX_LEARNED_CHARS = 10_000  # per text: the time for a word grows with the square of its length
SYMBOL_SCORE = -1e6  # low enough that encoding always prefers other pieces to a symbol
SCORE_DECIMALS = 4  # threads add scores in any order, which changes them by 1e-14; rounding makes the file reproducible


class Thinned(Generic[T]):
    """Every n-th item of a sequence; n doubles when more than `most` are kept. The result depends only on the items."""

    def __init__(self, most: int) -> None:
        self.kept: list[T] = []
        self._most = most
        self._stride = 1
        self._seen = 0

    def add(self, thing: T) -> None:
        if self._seen % self._stride == 0:
            self.kept.append(thing)
            if len(self.kept) > self._most:
                self.kept = self.kept[::2]
                self._stride *= 2
        self._seen += 1


def learn_pieces(
    kind: str,
    texts: list[str],
    vocab_size: int,
    lowercase: bool,
    symbols: Sequence[str] = (),
    *,
    normalize_spaces: bool = False,
) -> tuple[list[str], list[Any]]:
    """Return all pieces by id (special pieces first, then symbols) and the extra argument of `pipeline.model`.

    Args:
        kind: `bpe`, `unigram` or `word`.
        texts: the training texts; of each text only the first MAX_LEARNED_CHARS characters are used.
        vocab_size: maximum number of pieces; a small text gives fewer.
        lowercase: fold case first.
        symbols: pieces that are always included; encoding almost never produces one, unless the text also teaches it.
        normalize_spaces: first normalise white space, as in targets.
    """
    texts = [text[:MAX_LEARNED_CHARS] for text in texts]
    words = assemble("word", lowercase, list(SPECIAL_PIECES), [])
    words["normalizer"] = normalizer("word", lowercase, WHITE_OF_TARGETS if normalize_spaces else "")
    blank = tokenizers.Tokenizer.from_str(json.dumps(words))
    texts = [blank.normalizer.normalize_str(text) for text in texts]
    if kind == "word":
        split = blank.pre_tokenizer.pre_tokenize_str
        return _learn_words((word for text in texts for word, _ in split(text)), vocab_size, symbols)
    heads = [*heads_of(kind), *symbols]
    room = vocab_size - len(heads)
    known = set(symbols)
    texts = _replace_rare(texts, room // 2)
    extra = [] if kind == "bpe" else [0.0] * len(heads)
    # Without added tokens: otherwise "</s>" in a text would be one word.
    blueprint = {**assemble(kind, lowercase, heads, extra), "added_tokens": []}
    library = tokenizers.Tokenizer.from_str(json.dumps(blueprint))
    if kind == "bpe":
        library.model = models.BPE()
        trainer: Any = trainers.BpeTrainer(vocab_size=room, min_frequency=MIN_FREQUENCY, show_progress=False)
    else:
        library.model = models.Unigram()
        trainer = trainers.UnigramTrainer(vocab_size=room, show_progress=False)
    library.train_from_iterator(texts, trainer, length=len(texts))
    learned = json.loads(library.to_str())["model"]
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


def _learn_words(words: Iterable[str], vocab_size: int, symbols: Sequence[str]) -> tuple[list[str], list[Any]]:
    """Return the most frequent words; ties are sorted by character."""
    counts = Counter(words)
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


def _replace_rare(texts: list[str], most: int) -> list[str]:
    """Replace every rare character with a space, because it gets no piece and no piece may contain it."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    rare = rare_characters(counts, most) - {" "}
    table = {ord(char): " " for char in rare}
    return [text if rare.isdisjoint(text) else text.translate(table) for text in texts]
