"""The token embeddings of a model by name: neighbours of words, and a map of frequent tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.architectures.hub import resolve_model_path
from manyheads.architectures.pretrained import read_config
from manyheads.catalogue import ARCHITECTURES
from manyheads.config.suggest import not_among
from manyheads.decoding.generator import Generator
from manyheads.errors import ModelFileError, RequestError
from manyheads.extras.classification.classifier import Classifier
from manyheads.extras.inspect.attending import open_model
from manyheads.extras.inspect.embeddings import EmbeddingTable, Neighbour, embedding_tables, nearest, principal_plane
from manyheads.extras.inspect.token_labels import legible
from manyheads.text.pipeline import SPACE_SIGN

__all__ = ["EmbeddedWord", "MapPoint", "NamedEmbeddings", "embedding_map", "neighbours_of", "open_embeddings"]

_SPECIAL = re.compile(r"<[^<>\s]+>|>>[^<>\s]+<<")
"""Special tokens, bytes and tags of languages."""
_LEAST_LETTERS = 2


@dataclass(frozen=True)
class NamedEmbeddings:
    """A table of embeddings with its vocabulary. vocabulary: has `encode`, `tokens` and `vocab_size`."""

    table: EmbeddingTable
    vocabulary: Any

    @property
    def name(self) -> str:
        """The sides that use the table, such as `source and target`."""
        return " and ".join(self.table.sides)

    @property
    def num_rows(self) -> int:
        """Ids that the vocabulary can name."""
        return min(self.table.num_rows, int(self.vocabulary.vocab_size))

    def label(self, index: int) -> str:
        """Return a token as people read it."""
        return legible(self.vocabulary.tokens([index]))[0]

    def labels(self, ids: Sequence[int]) -> list[str]:
        """Return tokens as the map shows them.

        If pieces mark the beginning of a word, `▁walk` is shown as `walk` and `ing` as `-ing`.
        """
        tokens = [self.label(index) for index in ids]
        if not self._word_ids:
            return tokens
        return [
            token[1:] if token[0] == SPACE_SIGN and token[1:] else f"-{token}" if token[0].isalpha() else token
            for token in tokens
        ]

    @cached_property
    def _tokens(self) -> list[str]:
        tokens: list[str] = self.vocabulary.tokens(range(self.num_rows))
        return tokens

    @cached_property
    def _word_ids(self) -> list[int]:
        """Ids of pieces that are whole words of two letters or more."""
        return [
            index
            for index, token in enumerate(self._tokens)
            if token.startswith(SPACE_SIGN) and len(token) > _LEAST_LETTERS and token[1:].isalpha()
        ]

    def frequent(self, count: int) -> list[int]:
        """Return the first ids that are whole words; if these are too few, of all tokens but special ones and bytes.

        Ids increase with decreasing frequency, or in the order in which pieces were learned, frequent ones first.
        """
        if len(self._word_ids) >= count:
            return self._word_ids[:count]
        return [index for index, token in enumerate(self._tokens) if not _SPECIAL.fullmatch(token)][:count]

    def word(self, text: str) -> EmbeddedWord:
        """Return a word with the mean of the vectors of its pieces.

        Raises: RequestError: the vocabulary does not know the word, or it has no piece. DataError: it is not text.
        """
        ids = self.vocabulary.encode(text)
        if not ids:
            raise RequestError(f"--words {text!r} has no token; give a word.")
        if getattr(self.vocabulary, "unk_id", None) in ids:
            raise RequestError(f"--words {text!r}: the vocabulary does not know this word; give one that it has.")
        return self._embedded(text, ids)

    def token(self, index: int) -> EmbeddedWord:
        """Return the token with this id. Raises: RequestError: the vocabulary has no such id."""
        if not 0 <= index < self.num_rows:
            raise RequestError(f"--ids {index}: the vocabulary has the ids 0 to {self.num_rows - 1:,}.")
        return self._embedded(self.label(index), [index])

    def _embedded(self, text: str, ids: list[int]) -> EmbeddedWord:
        pieces = tuple(legible(self.vocabulary.tokens(ids)))
        return EmbeddedWord(text, pieces, tuple(ids), self.table.vectors(ids).mean(dim=0))


@dataclass(frozen=True)
class EmbeddedWord:
    """A word, its tokens, and the mean of their vectors. Shape: vector (width,), float64."""

    text: str
    pieces: tuple[str, ...]
    ids: tuple[int, ...]
    vector: Tensor


@dataclass(frozen=True)
class MapPoint:
    """A point of the map. kind: `word` that was asked for, `neighbour` of one, or `frequent` token."""

    token: str
    kind: str
    x: float
    y: float


def open_embeddings(path: str | Path, side: str | None = None) -> NamedEmbeddings:
    """Load a table of embeddings with its vocabulary, on the CPU in fp32.

    Args: side: `source` or `target` of a translator; None: the first one.

    Raises: RequestError: the model has no such side. ModelFileError: it has no table. As `open_model`.
    """
    task = ARCHITECTURES[read_config(resolve_model_path(path)).architecture].task
    reader: Any = Classifier.from_pretrained(path, "cpu") if task == "classification" else open_model(path, "cpu")
    tables = embedding_tables(reader.model) if isinstance(reader.model, torch.nn.Module) else []
    sides = [name for table in tables for name in table.sides]
    if not sides:
        raise ModelFileError(f"{path} has no table of token embeddings.")
    if side is not None and side not in sides:
        raise RequestError(f"--side {side}: {not_among('the model has no embedding', side, sides)}")
    side = side or sides[0]
    table = next(one for one in tables if side in one.sides)
    if isinstance(reader, Generator):
        return NamedEmbeddings(table, reader.vocabulary)
    return NamedEmbeddings(table, getattr(reader.tokenizer, side) if task == "translation" else reader.tokenizer)


def neighbours_of(embeddings: NamedEmbeddings, words: Sequence[EmbeddedWord], count: int) -> list[list[Neighbour]]:
    """Return the nearest tokens of each word, without its own."""
    if not words:
        return []
    return nearest(
        embeddings.table,
        torch.stack([word.vector for word in words]),
        count,
        num_rows=embeddings.num_rows,
        without=[word.ids for word in words],
    )


def embedding_map(
    embeddings: NamedEmbeddings, words: Sequence[EmbeddedWord], found: Sequence[Sequence[Neighbour]], frequent: int
) -> tuple[list[MapPoint], tuple[float, float]]:
    """Return words, their neighbours and frequent tokens in the plane of their first two principal components.

    Args:
        found: the neighbours of the words.
        frequent: number of frequent tokens: see `NamedEmbeddings.frequent`.

    Returns: the points, and the share of the variance of each axis. Raises: RequestError: there is nothing to draw.
    """
    shown = {index for word in words if len(word.ids) == 1 for index in word.ids}
    near = [index for index in dict.fromkeys(one.id for some in found for one in some) if index not in shown]
    shown |= set(near)
    others = [index for index in embeddings.frequent(frequent) if index not in shown]
    if not (words or others):
        raise RequestError("there is no token to draw; give --words, or --tokens above 0.")
    vectors = torch.cat([*(word.vector[None] for word in words), embeddings.table.vectors([*near, *others])])
    plane, shares = principal_plane(vectors)
    labels = [word.text for word in words] + embeddings.labels([*near, *others])
    kinds = ["word"] * len(words) + ["neighbour"] * len(near) + ["frequent"] * len(others)
    points = [MapPoint(label, kind, x, y) for label, kind, (x, y) in zip(labels, kinds, plane.tolist(), strict=True)]
    return points, shares
