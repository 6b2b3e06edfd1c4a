"""Trees as labelled spans of words with features of the words: in memory, in batches, and in a prepared folder.

Papers: Stern, Andreas and Klein 2017, arXiv:1705.03919, sec. 2: a span has at most one label, so a chain of
constituents over the same words, such as S over VP, becomes one label. A small treebank has few occurrences of each
word, but many of each ending (`-ing`, `-ly`), and capital letters and digits tell names and numbers, so a word is its
subwords, and hashes of its beginnings, endings and shape. Hashes need no list of known affixes (Weinberger et al. 2009,
arXiv:0902.2206).

The format on disk is that of `data.store`, with five sides: `piece`, the subwords of all words of a sentence; `count`,
how many each word has; `affix`, the hashes of all words, MOST_HASHES each; `tag`; `span`, start, end and label of each
constituent; labels and tags are ids.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyheads.data.batch import RowBatch
from manyheads.data.collate import round_up
from manyheads.data.prepared_folder import (
    PreparedFolder,
    open_manifest,
    open_stores,
    prepared_task,
    read_texts,
    refuse_missing,
)
from manyheads.data.sampler import by_length
from manyheads.data.store import SideWriter, StoreFormat, TokenSide, sides_from_lists
from manyheads.errors import DataError
from manyheads.extras.classification.encoders import RowStream
from manyheads.extras.parsing.trees import MAX_DEPTH, Leaf, Node, ParsingSettings, escape, normal_form, unescape
from manyheads.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from manyheads.extras.parsing.span_task.settings import SpanSettings

Span = tuple[int, int, str]
"""First word, first word after it, and the label; a chain is written from the top, with spaces: `S VP`."""

_CHAIN = " "  # no label contains white space


@dataclass(frozen=True, slots=True)
class SpanTree:
    """A sentence as words in plain text, their tags, and its constituents below the root."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    spans: tuple[Span, ...]


def spans_of(tree: Node, settings: ParsingSettings) -> SpanTree:
    """Return the tree's normal form as spans; `tree_of` restores it.

    Args: settings: the parts of the tree that are kept; its root must be a label.

    Raises: DataError: the tree contains only traces, or is nested more than MAX_DEPTH deep.
    """
    if settings.root is None:
        raise ValueError("A tree of spans needs the label of a root.")
    leaves: list[Leaf] = []
    labels: dict[tuple[int, int], str] = {}

    def walk(part: Node | Leaf) -> None:
        if isinstance(part, Leaf):
            leaves.append(part)
            return
        start = len(leaves)
        for child in part.children:
            walk(child)
        place = (start, len(leaves))
        labels[place] = part.label + (_CHAIN + labels[place] if place in labels else "")

    for child in normal_form(tree, settings).children:
        walk(child)
    words, tags = (unescape(leaf.word) for leaf in leaves), (leaf.tag for leaf in leaves)
    return SpanTree(tuple(words), tuple(tags), tuple((*place, label) for place, label in sorted(labels.items())))


def tree_of(words: Sequence[str], tags: Sequence[str], spans: Iterable[Span], root: str) -> Node:
    """Return the tree with these constituents under a root.

    Args:
        words: in plain text, at least one.
        tags: of the words.
        spans: two of them are either disjoint or one is inside the other. If more than MAX_DEPTH constituents are
            nested, the inner ones are left out.
        root: its label.
    """
    ordered = sorted(spans, key=lambda span: (span[0], -span[1]))
    leaves = [Leaf(tag, escape(word)) for tag, word in zip(tags, words, strict=True)]
    position = 0

    def children(start: int, end: int, depth: int) -> tuple[Node | Leaf, ...]:
        """The parts of a constituent at that depth; takes the spans inside from the ordered list."""
        nonlocal position
        found: list[Node | Leaf] = []
        while start < end:
            if position < len(ordered) and ordered[position][0] == start and ordered[position][1] <= end:
                _, stop, label = ordered[position]
                position += 1
                chain = label.split(_CHAIN)[: max(0, MAX_DEPTH - depth)]
                if not chain:
                    continue
                inside = children(start, stop, depth + len(chain))
                for name in reversed(chain):
                    inside = (Node(name, inside),)
                found += inside
                start = stop
            else:
                found.append(leaves[start])
                start += 1
        return tuple(found)

    return Node(root, children(0, len(leaves), 1))


MOST_PIECES = 8
"""Subwords of a word that count: of a longer one the first four and the last four."""

MOST_HASHES = 10
"""Number of hashes of a word: itself, endings of one to four characters, beginnings of one to three, shape, capital."""

_SHAPE_LEN = 12
_HASHES = 65_535


def word_pieces(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the ids of the subwords of each word, at most MOST_PIECES, at least one."""
    half = MOST_PIECES // 2
    encoded = tokenizer.encode_batch(list(words))
    kept = [ids if len(ids) <= MOST_PIECES else [*ids[:half], *ids[-half:]] for ids in encoded]
    return [ids or [tokenizer.unk_id] for ids in kept]


def affix_hashes(word: str) -> list[int]:
    """Return MOST_HASHES numbers from 0 to 65,535. 0: a feature that a short word does not have."""
    lower = word.lower()
    features = [f"w={lower}"]
    features += [f"s={lower[-size:]}" if len(lower) > size else "" for size in (1, 2, 3, 4)]
    features += [f"p={lower[:size]}" if len(lower) > size else "" for size in (1, 2, 3)]
    features += [f"h={_shape(word)}", f"c={word[:1].isupper():d}"]
    return [1 + zlib.crc32(one.encode(errors="surrogatepass")) % _HASHES if one else 0 for one in features]


def _shape(word: str) -> str:
    """`Mc-Donald's2` -> `AaA-Aa'a0` without repetitions: A, a and 0 stand for runs of letters and digits."""
    shape = ""
    for character in word[:_SHAPE_LEN]:
        kind = "A" if character.isupper() else "a" if character.islower() else "0" if character.isdigit() else character
        if shape[-1:] != kind:
            shape += kind
    return shape


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

    Returns: the number of sentences. Raises: DataError, SaveError: see `store.write_blocks_of_pairs`.
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
        line = f"{len(self._kept):,} of {self.num_rows:,} training sentences kept"
        line += f", the longest has {self.longest:,} words"
        return line + (f"; data.max_len is {self.settings.max_len}" if self.num_too_long else "")

    def collate(self, sample_ids: NDArray[np.int64], **limits: Any) -> SpanBatch:
        return collate_spans(self.store, sample_ids, **limits)


SPANS_TASK = "spans"
SIDES = ("source", "target")  # sentence and tree
_COMMAND = "manyheads prepare --task spans"


@dataclass(frozen=True, kw_only=True)
class SpanData(PreparedFolder):
    """A folder written by `span_task.prepare.prepare_spans`.

    Attributes:
        tokenizer: of words.
        constituents: the labels of spans; the id of the first is 1.
        tags: the tags of words; the id of the first is 1.
        root: the label at the top of every tree.
        train: training trees as numbers.
        valid: validation trees as numbers, or None.
        test: test trees as numbers, or None.
        texts: split -> its sentences and trees as lines of text, in order, of valid and test.
    """

    tokenizer: Tokenizer
    constituents: tuple[str, ...]
    tags: tuple[str, ...]
    root: str
    train: SpanStore
    valid: SpanStore | None = None
    test: SpanStore | None = None
    texts: Mapping[str, list[tuple[str, str]]]

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> SpanData:
        """Open a folder written by `manyheads prepare --task spans`.

        Args: verify: compare every SHA-256 sum; otherwise compare sizes only.

        Raises: DataError: the folder is missing or damaged, of another task, or its parts do not belong together.
        """
        path = Path(path)
        manifest = open_manifest(path, _COMMAND, verify)
        if (name := prepared_task(path)) != SPANS_TASK:
            raise DataError(f"{path} is prepared for {name}; trees for a chart parser are needed here: `{_COMMAND}`.")
        task = manifest["task"]
        names = [task.get(key) for key in ("constituents", "tags")]
        are_names = all(isinstance(some, list) and some and all(isinstance(one, str) for one in some) for some in names)
        if not are_names or not isinstance(task.get("root"), str):
            raise DataError(
                f"{path}/manifest.json is damaged: labels, tags or root are missing. Prepare the data again."
            )
        constituents, tags = map(tuple, names)
        tokenizer = Tokenizer.load(path / "tokenizer.json")
        stores = open_stores(SpanStore, path, manifest, verify)
        for split, store in stores.items():
            found = store.largest_label, store.tag.ids.max(initial=0), store.piece.ids.max(initial=0)
            largest = len(constituents), len(tags), tokenizer.vocab_size - 1
            if any(one > most for one, most in zip(found, largest, strict=True)):
                raise DataError(f"{path / split} does not fit the tokenizer, labels and tags. Prepare the data again.")
        named = {"constituents": constituents, "tags": tags, "root": task["root"]}
        texts = read_texts(path, SIDES, manifest, stores, verify)
        return cls(path=path, manifest=manifest, tokenizer=tokenizer, texts=texts, **named, **stores)

    def describe(self) -> str:
        """Return a few lines for users: sizes, what was left out, and the tokenizer."""
        return self.describe_splits(
            f", {len(self.constituents)} labels, {len(self.tags)} tags",
            lambda _, store: (f"{len(store):,} trees", f"{len(store.tag.ids):,} words"),
        )


def open_spans(path: str) -> SpanData:
    """Return the data of a run. Raises: DataError: the folder is missing, damaged, or of another task."""
    if not path:
        raise DataError(f"data.path is not set; prepare trees with `{_COMMAND}`, and name the folder.")
    refuse_missing(path, [path], _COMMAND)
    return SpanData.open(path)
