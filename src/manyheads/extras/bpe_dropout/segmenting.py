"""BPE dropout: other segmentations of the training pairs in each epoch.

Paper: Provilkov et al. 2020, arXiv:1910.13267, algorithm 1. A word begins as characters. In each round, every possible
merge is left out with probability p, and the one of highest priority among the others is done; the word is finished
when none is left. Sources and targets are segmented like this in training only.

The `tokenizers` library has BPE dropout, but its random numbers cannot be seeded, so a resumed run would read other
pieces. Here, a random number is a hash of (seed, epoch, side, sentence, word, round, position). Prepared data hold the
ids of the usual segmentation. They are cut into words once, and the characters of each word are segmented again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import tokenizers
from numpy.typing import NDArray

from manyheads.data.sampler import mix
from manyheads.data.store import IntArray, PairStore, TokenSide
from manyheads.errors import ConfigError
from manyheads.seeding import derive_seed
from manyheads.text.pipeline import heads_of

if TYPE_CHECKING:
    from manyheads.text.tokenizer import Tokenizer

BLOCK = 2048
"""Number of sentences that are segmented at once: enough for numpy to be fast, and little memory."""
NO_MERGE = np.int32(2**31 - 1)
ROUND = np.uint64(2**32)
"""Numbers of positions of a round in the hash."""

Ids = NDArray[np.int64]


class BpeDropout:
    """Segments words again, with merges left out at random.

    Args:
        tokenizer: of the pairs.
        probability: p of the paper, above 0 and below 1; its value is 0.1.
        seed: the run's seed.

    Raises: ConfigError: the tokenizer is not BPE, or its targets are not subwords.
    """

    def __init__(self, tokenizer: Tokenizer, probability: float, seed: int) -> None:
        if tokenizer.kind != "bpe" or tokenizer.symbols:
            kind = f"of kind {tokenizer.kind!r}" if tokenizer.kind != "bpe" else "a parser's, with symbols for brackets"
            raise ConfigError(
                f"data.bpe_dropout is {probability:g}, but the tokenizer of the data is {kind}; it needs one of kind"
                " 'bpe' without symbols. Set it to 0, or prepare the data with tokenizer.kind bpe.",
                fields=["data"],
            )
        content = json.loads(tokenizer.to_json())
        merges: list[list[str]] = content["model"]["merges"]
        self._library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        self._library.encode_special_tokens = True
        self._library.normalizer = tokenizers.normalizers.Prepend(" ")  # what was decoded is normal
        self._vocab: dict[str, int] = content["model"]["vocab"]
        self._size = len(self._vocab)
        self._first_tag = self._size - len(tokenizer.target_languages)
        self._seed = seed
        self._threshold = np.uint64(int(probability * 2**64))
        ranks = {(self._vocab[left], self._vocab[right]): rank for rank, (left, right) in enumerate(merges)}
        merged = {pair: self._vocab["".join(merges[rank])] for pair, rank in ranks.items()}
        keys = np.array([left * self._size + right for left, right in ranks] or [-1], np.int64)
        order = np.argsort(keys)
        self._keys = keys[order]
        self._ranks = np.array(list(ranks.values()) or [int(NO_MERGE)], np.int32)[order]
        self._merged = np.array(list(merged.values()) or [0], np.int64)[order]
        spelled = [self._spell(piece) for piece in tokenizer.pieces]
        self._characters = np.fromiter(chain.from_iterable(spelled), np.int64)
        self._num_characters = np.fromiter(map(len, spelled), np.int64)
        self._spelled = np.cumsum(self._num_characters) - self._num_characters
        self._begins: dict[str, NDArray[np.bool_]] = {}

    def _spell(self, piece: str) -> list[int]:
        """Return the ids with which the segmentation of a piece begins; a character without a piece is its bytes."""
        if self._vocab[piece] < len(heads_of("bpe")) or self._vocab[piece] >= self._first_tag:
            return [self._vocab[piece]]
        ids: list[int] = []
        for character in piece:
            found = self._vocab.get(character)
            ids += [self._vocab[f"<0x{byte:02X}>"] for byte in character.encode()] if found is None else [found]
        return ids

    def pairs(self, store: PairStore, samples: IntArray, epoch: int, limits: tuple[int, int]) -> PairStore:
        """Return the given pairs of a store with the segmentations of an epoch, in memory.

        Args:
            store: the pairs as usual; the same in every call.
            samples: (pairs,) positions in the store, in the order of the result; one may occur several times.
            epoch: number of the epoch.
            limits: most tokens of a source and of a target, without special ids. A sentence of which the new
                segmentation would be longer keeps the usual one, so no pair is lost.

        Cost: time in proportion to the characters; the first call also finds the words of the whole store. Memory for
            the new ids, and a byte for each id of the store.
        """
        sides = []
        for name, limit in zip(("source", "target"), limits, strict=True):
            side: TokenSide = getattr(store, name)
            if name not in self._begins:
                self._begins[name] = self.find_words(side)
            key = derive_seed(self._seed, "bpe dropout", name, epoch)
            sides.append(self._side(side, self._begins[name], samples, key, limit))
        source, target = sides
        return PairStore(source, target, store.vocab_size, store.digest)

    def find_words(self, side: TokenSide) -> NDArray[np.bool_]:
        """Return which ids of a side begin a word; pieces are merged only within a word. (ids,)

        The text of a sentence is cut again by the tokenizer, which has no other way to tell.
        """
        begins = np.ones(len(side.ids), np.bool_)
        for first in range(0, len(side), BLOCK):
            rows = [side[index].tolist() for index in range(first, min(first + BLOCK, len(side)))]
            texts = self._library.decode_batch(rows, skip_special_tokens=True)  # without the tag of a language
            encoded = self._library.encode_batch(texts, add_special_tokens=False)
            for index, (row, one) in enumerate(zip(rows, encoded, strict=True), first):
                end = int(side.offsets[index + 1])
                if one.ids and row[-len(one.ids) :] == one.ids:  # if not, each piece counts as a word
                    words = np.array(one.word_ids)
                    begins[end - len(words) + 1 : end] = words[1:] != words[:-1]
        return begins

    def _side(self, side: TokenSide, begins: NDArray[np.bool_], samples: IntArray, key: int, limit: int) -> TokenSide:
        dtype = np.uint16 if self._size <= 2**16 else np.uint32
        ids, lengths = [np.empty(0, dtype)], [np.zeros(1, np.int64)]
        for first in range(0, len(samples), BLOCK):
            new, counts = self._block(side, begins, samples[first : first + BLOCK], key, first, limit)
            ids.append(new.astype(dtype))
            lengths.append(counts)
        return TokenSide(np.concatenate(ids), np.cumsum(np.concatenate(lengths)))

    def _block(
        self, side: TokenSide, begins: NDArray[np.bool_], samples: IntArray, key: int, first: int, limit: int
    ) -> tuple[Ids, Ids]:
        """Return the ids of some sentences, and how many each has. first: number of the first sentence."""
        starts, usual = side.offsets[samples], side.lengths[samples].astype(np.int64)
        # Sentences that will be truncated keep the usual segmentation, also because they can be very long.
        counts = np.where(usual <= limit, usual, 0)
        places = _ranges(starts, counts)
        pieces = side.ids[places].astype(np.int64)
        of_piece = np.repeat(np.arange(len(samples)), counts)
        word = np.cumsum(begins[places]) - 1
        characters = self._characters[_ranges(self._spelled[pieces], self._num_characters[pieces])]
        sizes = np.bincount(word, self._num_characters[pieces]).astype(np.int64)
        of_word = of_piece[np.flatnonzero(begins[places])]
        num_words = np.bincount(of_word, minlength=len(samples))
        number = np.arange(len(of_word)) - np.repeat(np.cumsum(num_words) - num_words, num_words)
        states = mix(mix(np.uint64(key) + (of_word + first).astype(np.uint64)) + number.astype(np.uint64))
        ids, lengths = self.segment_words(characters, sizes, states)
        new = np.bincount(of_word, lengths, minlength=len(samples)).astype(np.int64)
        fits = (new <= limit) & (usual <= limit)
        if fits.all():
            return ids, new
        both = np.concatenate([ids, side.ids[_ranges(starts, usual)].astype(np.int64)])
        begin = np.where(fits, np.cumsum(new) - new, len(ids) + np.cumsum(usual) - usual)
        new = np.where(fits, new, usual)
        return both[_ranges(begin, new)], new

    def segment_words(self, characters: Ids, sizes: Ids, states: NDArray[np.uint64]) -> tuple[Ids, Ids]:
        """Segment words from their characters.

        Args:
            characters: (characters,) the ids of the characters of all words, one word after the other.
            sizes: (words,) number of characters of each word.
            states: (words,) what the random numbers of each word depend on.

        Returns: the ids of all words, one after the other, and how many each word has. (ids,), (words,)
        """
        starts = np.cumsum(sizes) - sizes
        lengths = np.zeros(len(sizes), np.int64)
        parts = []
        widths = 2 ** np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64)
        for width in np.unique(widths).tolist():  # words of similar lengths together, so that little is padding
            members = np.flatnonzero(widths == width)
            columns = np.arange(width)
            real = columns < sizes[members][:, None]
            grid = np.full((len(members), width), -1, np.int64)
            grid[real] = characters[(starts[members][:, None] + columns)[real]]
            left = _Merging(self, grid, real, states[members]).finished()
            lengths[members] = left.sum(1)
            parts.append((members, grid, left))
        begins = np.cumsum(lengths) - lengths
        ids = np.empty(int(lengths.sum()), np.int64)
        for members, grid, left in parts:
            places = begins[members][:, None] + np.cumsum(left, 1) - 1
            ids[places[left]] = grid[left]
        return ids, lengths

    def look_up(self, left: Ids, right: Ids) -> tuple[NDArray[np.int32], Ids]:
        """Return the rank of the merge of each pair of pieces, NO_MERGE if there is none, and the merged piece."""
        key = left * self._size + right
        place = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        found = (self._keys[place] == key) & (left >= 0) & (right >= 0)
        return np.where(found, self._ranks[place], NO_MERGE), self._merged[place]

    def leaves_out(self, numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which merges are left out, given the numbers from which chance is drawn."""
        dropped: NDArray[np.bool_] = mix(numbers) < self._threshold
        return dropped


@dataclass
class _Merging:
    """Words of similar lengths while they are merged, each a linked list of pieces in a row of `grid`.

    Attributes:
        rule: the merges.
        grid: (words, width) the piece that begins at each character; changed in place.
        real: (words, width) where there are characters.
        states: (words,) see `BpeDropout.segment_words`.
    """

    rule: BpeDropout
    grid: Ids
    real: NDArray[np.bool_]
    states: NDArray[np.uint64]

    def finished(self) -> NDArray[np.bool_]:
        """Merge until no word has a merge left. Returns: (words, width) where a piece begins."""
        grid, width = self.grid, self.grid.shape[1]
        begins = self.real.copy()
        after = np.broadcast_to(np.arange(1, width + 1), grid.shape).copy()
        before = after - 2
        ranks = np.full(grid.shape, NO_MERGE, np.int32)
        merged = np.zeros(grid.shape, np.int64)
        ranks[:, :-1], merged[:, :-1] = self.rule.look_up(grid[:, :-1], grid[:, 1:])
        columns = np.arange(width, dtype=np.uint64)
        words = np.flatnonzero((ranks != NO_MERGE).any(1))
        turn = 0
        while len(words):
            dropped = self.rule.leaves_out((self.states[words] + ROUND * np.uint64(turn))[:, None] + columns)
            allowed = np.where(dropped, NO_MERGE, ranks[words])
            place = allowed.argmin(1)  # of equal ranks the first, as in the library
            goes_on = allowed[np.arange(len(words)), place] != NO_MERGE
            words, place = words[goes_on], place[goes_on]
            self._merge(words, place, begins, after, before, ranks, merged)
            turn += 1
        return begins

    def _merge(
        self,
        words: NDArray[np.intp],
        place: NDArray[np.intp],
        begins: NDArray[np.bool_],
        after: Ids,
        before: Ids,
        ranks: NDArray[np.int32],
        merged: Ids,
    ) -> None:
        """Join the piece at `place` of each word with the next one, and look up the two pairs that change."""
        grid, width = self.grid, self.grid.shape[1]
        right = after[words, place]
        beyond = after[words, right]
        grid[words, place] = merged[words, place]
        begins[words, right] = False
        ranks[words, right] = NO_MERGE
        after[words, place] = beyond
        inner = beyond < width
        before[words[inner], beyond[inner]] = place[inner]
        follower = np.where(inner, grid[words, np.minimum(beyond, width - 1)], -1)
        ranks[words, place], merged[words, place] = self.rule.look_up(grid[words, place], follower)
        earlier = before[words, place]
        some = earlier >= 0
        rows, left = words[some], earlier[some]
        ranks[rows, left], merged[rows, left] = self.rule.look_up(grid[rows, left], grid[rows, place[some]])


def _ranges(starts: Ids, counts: Ids) -> Ids:
    """Return start, start + 1, ... of each start, one range after the other."""
    ends = np.cumsum(counts)
    ranges: Ids = np.arange(int(counts.sum())) + np.repeat(starts - (ends - counts), counts)
    return ranges
