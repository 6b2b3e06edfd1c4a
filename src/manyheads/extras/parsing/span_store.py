"""Trees as spans on disk, and the batches of training and evaluation by position.

The format is that of `store`, with five sides: `piece`, the subwords of all words of a sentence; `count`, how many each
word has; `affix`, the hashes of all words, MOST_HASHES each; `tag`; `span`, start, end and label of each constituent;
labels and tags are ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyheads.data.batch import RowBatch
from manyheads.data.collate import round_up
from manyheads.data.plan import by_length
from manyheads.data.row_stream import RowStream
from manyheads.data.store import SideWriter, StoreFormat, TokenSide, sides_from_lists
from manyheads.errors import DataError
from manyheads.extras.parsing.span_settings import SpanSettings
from manyheads.extras.parsing.word_features import MOST_HASHES, MOST_PIECES

__all__ = ["SpanBatch", "SpanRow", "SpanStore", "SpanStream", "collate_spans", "eval_spans", "write_spans"]

_SIDES = ("piece", "count", "affix", "tag", "span")
_FORMAT = StoreFormat("manyheads.spans", "num_sentences", _SIDES, ("uint32",))
_BOUND = 2**17  # every number is below it: ids, hashes, positions


@dataclass(frozen=True)
class SpanBatch(RowBatch):
    """Sentences as features of their words, padded on the right with zeros, with their trees.

    Shape: pieces (batch, len, most_pieces) 1 + ids of the subwords of each word, 0: none; affixes
        (batch, len, num_hashes) hashes of each word, 0: none; lengths (batch,) in words; tags (batch, len) ids, -1:
        unknown; labels (batch, len, len): `labels[b, i, j]` is the id of the constituent from word i to word j, both
        included, 0: none; sample_ids (batch,), positions in the store.
    """

    pieces: Tensor
    affixes: Tensor
    lengths: Tensor
    tags: Tensor
    labels: Tensor
    sample_ids: Tensor

    @property
    def size(self) -> int:
        """Number of words, including padding."""
        return self.tags.numel()

    def describe(self) -> str:
        """Return the shape in words."""
        rows, length = self.tags.shape
        return f"{rows} sentences of {length} words"

    def num_target_tokens(self) -> int:
        """Return the number of words, by which the loss is divided."""
        return int(self.lengths.sum())


@dataclass(frozen=True)
class SpanRow:
    """A sentence as numbers.

    pieces: ids of the subwords of each word. affixes: the hashes of each word. tags: the id of each word's tag, from 1;
    0: it is unknown. spans: (start, end, label) of each constituent; a label is an id from 1.
    """

    pieces: Sequence[Sequence[int]]
    affixes: Sequence[Sequence[int]]
    tags: Sequence[int]
    spans: Sequence[tuple[int, int, int]] = ()

    def sides(self) -> list[list[int]]:
        """Return the numbers in the order of the store's sides."""
        return [
            [index for ids in self.pieces for index in ids],
            [len(ids) for ids in self.pieces],
            [value for values in self.affixes for value in values],
            list(self.tags),
            [number for span in self.spans for number in span],
        ]


@dataclass(frozen=True)
class SpanStore:
    """Sentences as numbers; see the module. digest: SHA-256 over all."""

    piece: TokenSide
    count: TokenSide
    affix: TokenSide
    tag: TokenSide
    span: TokenSide
    digest: str

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> SpanStore:
        """Map a folder written by `write_spans`. Raises: DataError: it is missing, damaged, or of a newer format."""
        sides, _, digest = _FORMAT.open(Path(folder), verify)
        return cls._of(sides, digest, str(folder))

    @classmethod
    def from_rows(cls, rows: Iterable[SpanRow]) -> SpanStore:
        """Return a store in memory. Raises: DataError: a number is out of range."""
        sides, digest = sides_from_lists(zip(*(row.sides() for row in rows), strict=True), _BOUND)
        return cls._of(sides, digest, "The given data")

    @classmethod
    def _of(cls, sides: Sequence[TokenSide], digest: str, where: str) -> SpanStore:
        piece, count, affix, tag, span = sides
        store = cls(piece, count, affix, tag, span, digest)
        words = store.lengths
        fits = (store.affix.lengths == MOST_HASHES * words).all() and (store.tag.lengths == words).all()
        pieces = np.add.reduceat(store.count.ids.astype(np.int64), store.count.offsets[:-1]) if words.all() else None
        if not fits or pieces is None or (pieces != store.piece.lengths).any() or (store.span.lengths % 3).any():
            raise DataError(f"{where} does not hold sentences with words and tags. Prepare the data again.")
        return store

    def __len__(self) -> int:
        return len(self.count)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Number of words of each sentence."""
        return self.count.lengths

    @property
    def largest_label(self) -> int:
        """The largest id of a label; 0: there are no constituents."""
        return int(self.span.ids[2::3].max(initial=0))


def write_spans(folder: str | Path, rows: Iterable[SpanRow]) -> int:
    """Write a store; it appears under its name only when it is complete.

    Returns: the number of sentences. Raises: DataError, SaveError: see `store.write_pairs`.
    """

    def fill(*sides: SideWriter) -> None:
        for row in rows:
            for side, numbers in zip(sides, row.sides(), strict=True):
                side.add(numbers)

    return _FORMAT.write(Path(folder), _BOUND, fill)[0].num_sentences


def collate_spans(
    store: SpanStore, sample_ids: NDArray[np.int64], *, max_len: int | None = None, pad_to_multiple: int = 1
) -> SpanBatch:
    """Return a batch of some sentences, in the given order, padded on the right with zeros.

    Args:
        store: all sentences.
        sample_ids: (batch,) positions in the store, at least one.
        max_len, pad_to_multiple: rows are padded to a multiple of this length, but not beyond max_len.
    """
    lengths = store.lengths[sample_ids].astype(np.int64)
    width = int(round_up(int(lengths.max()), pad_to_multiple, max_len))
    rows = len(sample_ids)
    pieces = np.zeros((rows, width, MOST_PIECES), np.int64)
    affixes = np.zeros((rows, width, MOST_HASHES), np.int64)
    tags = np.zeros((rows, width), np.int64)
    labels = np.zeros((rows, width, width), np.int64)
    columns = np.arange(MOST_PIECES)
    for row, sample in enumerate(sample_ids):
        length, counts = lengths[row], store.count[sample]
        pieces[row, :length][columns < counts[:, None]] = store.piece[sample] + 1
        affixes[row, :length] = store.affix[sample].reshape(length, MOST_HASHES)
        tags[row, :length] = store.tag[sample].astype(np.int64) - 1
        start, end, label = store.span[sample].reshape(-1, 3).astype(np.int64).T
        labels[row, start, end - 1] = label
    known = (pieces, affixes, lengths, tags, labels, sample_ids.copy())
    return SpanBatch(*map(torch.from_numpy, known))


def eval_spans(store: SpanStore, max_tokens: int) -> Iterator[SpanBatch]:
    """Yield every sentence once, shortest first; `sample_ids` give the original order.

    Args: max_tokens: upper bound of rows x longest sentence; a longer sentence is a batch of its own.
    """
    for samples in by_length(store.lengths, max_tokens):
        yield collate_spans(store, samples)


class SpanStream(RowStream[SpanBatch]):
    """The training batches of sentences; see `RowStream`."""

    def __init__(self, store: SpanStore, settings: SpanSettings, seed: int) -> None:
        super().__init__(store.lengths, settings, seed)
        self.store = store

    def describe(self) -> str:
        """See `RowStream.describe`."""
        line = f"{len(self._kept):,} of {self.num_rows:,} training sentences kept"
        line += f", the longest has {self.longest:,} words"
        return line + (f"; data.max_len is {self.settings.max_len}" if self.num_too_long else "")

    def collate(self, sample_ids: NDArray[np.int64], **limits: Any) -> SpanBatch:
        """See `RowStream.collate`."""
        return collate_spans(self.store, sample_ids, **limits)
