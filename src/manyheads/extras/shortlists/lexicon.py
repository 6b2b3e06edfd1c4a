"""The likely translations of each source word, learned from pairs of ids by IBM model 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from manyheads.data.lines import Progress

MOST_CANDIDATES = 256
"""Target ids that are kept of each source id."""

_ITERATIONS = 4
# (source id, target id) entries that the table has at most: 0.5 GB. If there are more, the rarest ones are left out.
_MOST_ENTRIES = 1 << 24
# Links of a source token with a target token that are processed at once.
_LINKS_AT_ONCE = 1 << 21
_LEAST_PROBABILITY = 1e-6

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Lexicon:
    """Likely translations of each source id.

    Attributes:
        frequent: all target ids, the most frequent one first. (target_vocab_size,)
        offsets: the candidates of source id i are `candidates[offsets[i]:offsets[i + 1]]`. (source_vocab_size + 1,)
        candidates: target ids, those of one source id by decreasing probability.
        num_pairs: sentence pairs that it was learned from.
    """

    frequent: _Ints
    offsets: _Ints
    candidates: _Ints
    num_pairs: int


@dataclass(frozen=True)
class _Side:
    """Sentence i is ids[offsets[i]:offsets[i + 1]]."""

    ids: _Ints
    offsets: _Ints

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]]) -> _Side:
        lengths = np.fromiter((len(one) for one in sentences), np.int64, len(sentences))
        ids = np.fromiter(chain.from_iterable(sentences), np.int64, int(lengths.sum()))
        return cls(ids, np.concatenate([[0], np.cumsum(lengths)]))

    @property
    def lengths(self) -> _Ints:
        return np.diff(self.offsets)


def learn_lexicon(
    pairs: Iterable[tuple[Sequence[int], Sequence[int]]],
    source_vocab_size: int,
    target_vocab_size: int,
    progress: Progress = lambda what, done, total: None,
) -> Lexicon:
    """Learn p(target id | source id) by expectation maximisation.

    Paper: Brown et al. 1993, sec. 4.2 (model 1). Differs: the probability of a target word without a source word is its
        frequency, and is not learned; the first estimate is how often two words occur in one pair.
    Args:
        pairs: (source ids, target ids), without special ids.
        source_vocab_size: every source id is below it.
        target_vocab_size: every target id is below it.
        progress: called with what is done, how much of it, and the total.

    Cost: memory 16 bytes a token and 0.5 GB; time (iterations + 1) x the sum of source_len x target_len.
    """
    known = list(pairs)
    sides = _Side.of([source for source, _ in known]), _Side.of([target for _, target in known])
    counts = np.bincount(sides[1].ids, minlength=target_vocab_size)
    keys, weights = _together(*sides, target_vocab_size)
    owners = keys // target_vocab_size
    probabilities = _normalised(weights, owners, source_vocab_size)
    unaligned = counts / max(1, counts.sum())
    for number in range(_ITERATIONS):
        progress("learning the lexicon", number, _ITERATIONS)
        expected = np.zeros(len(keys))
        for codes, target, ids in _links(*sides, target_vocab_size) if len(keys) else ():
            row = np.minimum(np.searchsorted(keys, codes), len(keys) - 1)
            share = np.where(keys[row] == codes, probabilities[row], 0.0)
            total = np.bincount(target, share, minlength=len(ids)) + unaligned[ids]
            expected += np.bincount(row, share / total[target], minlength=len(keys))
        probabilities = _normalised(expected, owners, source_vocab_size)
    progress("learning the lexicon", _ITERATIONS, _ITERATIONS)
    offsets, kept = _best(owners, probabilities, source_vocab_size)
    frequent = np.argsort(-counts, kind="stable")
    return Lexicon(frequent, offsets, (keys % target_vocab_size)[kept], len(known))


def _links(source: _Side, target: _Side, target_vocab_size: int) -> Iterator[tuple[_Ints, _Ints, _Ints]]:
    """Link every source token with every target token of its pair, some pairs at a time.

    Yields: the code of each link, source id x target_vocab_size + target id; the number of its target token; the ids of
        the target tokens.
    """
    sizes = np.cumsum(source.lengths * target.lengths)
    first = 0
    while first < len(sizes):
        before = sizes[first - 1] if first else 0
        end = max(first + 1, int(np.searchsorted(sizes, before + _LINKS_AT_ONCE, side="right")))
        ids = target.ids[target.offsets[first] : target.offsets[end]]
        lengths = np.repeat(source.lengths[first:end], target.lengths[first:end])  # of each target token's source
        starts = np.repeat(source.offsets[first:end], target.lengths[first:end])
        number = np.repeat(np.arange(len(ids)), lengths)
        within = np.arange(len(number)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if len(number):
            yield source.ids[starts[number] + within] * target_vocab_size + ids[number], number, ids
        first = end


def _together(source: _Side, target: _Side, target_vocab_size: int) -> tuple[_Ints, _Floats]:
    """Count how often each source id is in a pair with each target id. Returns: sorted codes (see `_links`), counts."""
    keys: _Ints = np.empty(0, np.int64)
    counts: _Floats = np.empty(0)
    for codes, _, _ in _links(source, target, target_vocab_size):
        new, new_counts = np.unique(codes, return_counts=True)
        joined, rows = np.unique(np.concatenate([keys, new]), return_inverse=True)
        counts = np.bincount(rows, np.concatenate([counts, new_counts]), len(joined)).astype(np.float64)
        keys = joined
        least = 1
        while len(keys) > _MOST_ENTRIES:
            least += 1
            keys, counts = keys[counts >= least], counts[counts >= least]
    return keys, counts


def _normalised(weights: _Floats, owners: _Ints, source_vocab_size: int) -> _Floats:
    sums = np.bincount(owners, weights, minlength=source_vocab_size)
    return weights / np.maximum(sums, 1e-300)[owners]


def _best(owners: _Ints, probabilities: _Floats, source_vocab_size: int) -> tuple[_Ints, _Ints]:
    """The most probable entries of each source id. Returns: their offsets, and their rows in the table."""
    order = np.lexsort((-probabilities, owners))
    sorted_owners = owners[order]
    starts = np.searchsorted(sorted_owners, np.arange(source_vocab_size + 1))
    rank = np.arange(len(order)) - starts[sorted_owners]
    keep = (rank < MOST_CANDIDATES) & (probabilities[order] >= _LEAST_PROBABILITY)
    counts = np.bincount(sorted_owners[keep], minlength=source_vocab_size)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), order[keep]
