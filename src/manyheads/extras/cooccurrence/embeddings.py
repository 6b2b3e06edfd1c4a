"""Embeddings of tokens from counts: which tokens occur in the same sentence pairs, or beside each other in a text.

A word and its translation occur in the same pairs, and related words in similar ones and beside the same words, so
their vectors are near each other before the first step of training.

Paper: Levy and Goldberg 2014, "Neural word embedding as implicit matrix factorization", sec. 5: singular vectors of the
positive pointwise mutual information, with the square roots of their singular values; Levy et al. 2015, TACL, sec. 3.1:
counts of contexts to the power of 0.75, and neighbours that count less the farther they are. Differs: only the most
frequent tokens are contexts. A context of a sentence pair is a token anywhere in it, in either language; one of a text
is a token with the side on which it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyheads.data.store import count_ids

if TYPE_CHECKING:
    from manyheads.data.store import PairStore, TokenSide

_MOST_CONTEXTS = 2048
_MOST_COUNTS = 1 << 26
_MOST_LINKS = 1 << 26
_MOST_TOKENS = 1 << 24
_WINDOW = 4
_CONTEXT_POWER = 0.75
_LEAST = 1e-4  # norm below which a row has no information


def cooccurrence_embeddings(pairs: PairStore, width: int) -> Tensor:
    """Return a vector of length 1 for every id that occurs, and zeros for the others.

    Shape: (vocab_size, width). Columns beyond the number of contexts are zero.
    Cost: some seconds on one core and 2,048 floats for each id, at any number of pairs.
    """
    sides = [np.bincount(_ids(side), minlength=pairs.vocab_size) for side in (pairs.source, pairs.target)]
    occurrences = sides[0] + sides[1]
    counts = count_contexts(pairs, _most_frequent(occurrences, _MOST_CONTEXTS))
    return _vectors(_information(counts), occurrences, width)


def neighbour_embeddings(
    ids: NDArray[np.integer[Any]], vocab_size: int, width: int, *, occurrences: NDArray[np.int64] | None = None
) -> Tensor:
    """Return a vector of length 1 for every id that occurs in the first 16 million of a text, and zeros for the others.

    Args: occurrences: `count_ids` of the whole text, if known.

    Shape: (vocab_size, width). Columns beyond the number of contexts are zero.
    Cost: some seconds on one core, and floats: 2,048 for each id, or 2^26 in all where these are fewer.
    """
    tokens = np.asarray(ids[:_MOST_TOKENS], np.int64)
    if occurrences is None or len(tokens) < len(ids):
        occurrences = count_ids(tokens, vocab_size)
    most = min(_MOST_CONTEXTS, _MOST_COUNTS // vocab_size) // 2  # of each side
    counts = count_neighbours(tokens, vocab_size, _most_frequent(occurrences, max(1, most)))
    return _vectors(torch.cat([_information(side) for side in counts], 1), occurrences, width)


def count_contexts(pairs: PairStore, contexts: NDArray[np.int64], max_links: int = _MOST_LINKS) -> Tensor:
    """Count how often an id and a context are tokens of one sentence pair, of the same or of different sides.

    Every token is in the context of itself, too: otherwise a word would have its translation as a context, but its
    translation would not, and their rows would differ.

    Args:
        pairs: the sentences.
        contexts: ids.
        max_links: the shortest pairs are counted, as many as have together at most this number of links.

    Shape: (vocab_size, contexts).
    """
    lengths = (pairs.source_lengths + pairs.target_lengths).astype(np.int64)
    shortest = np.argsort(lengths, kind="stable")
    taken = np.zeros(len(lengths), bool)
    taken[shortest[np.cumsum(lengths[shortest] ** 2) <= max_links]] = True
    ids, number = _joined(pairs, taken)
    column = _columns(contexts, pairs.vocab_size)
    counts = torch.zeros(pairs.vocab_size * len(contexts))
    for distance in range(int(lengths[taken].max(initial=0))):
        together = number[distance:] == number[: len(number) - distance]
        first, second = ids[: len(ids) - distance][together], ids[distance:][together]
        for token, other in ((first, column[second]), (second, column[first]))[: distance + 1]:
            _add(counts, token, other, len(contexts), 1.0)
    return counts.view(pairs.vocab_size, len(contexts))


def count_neighbours(
    ids: NDArray[np.int64], vocab_size: int, contexts: NDArray[np.int64], window: int = _WINDOW
) -> Tensor:
    """Count how often a context is one of the `window` tokens before an id, or after it: 1 / distance each time.

    Shape: ids (tokens,), contexts (contexts,). Returns (2, vocab_size, contexts): before, after.
    """
    tokens, column = torch.from_numpy(ids), _columns(contexts, vocab_size)
    counts = torch.zeros(2, vocab_size * len(contexts))
    for distance in range(1, window + 1):
        first, second = tokens[:-distance], tokens[distance:]
        _add(counts[0], second, column[first], len(contexts), 1 / distance)
        _add(counts[1], first, column[second], len(contexts), 1 / distance)
    return counts.view(2, vocab_size, len(contexts))


def _most_frequent(occurrences: NDArray[np.integer[Any]], count: int) -> NDArray[np.int64]:
    return np.argsort(-occurrences, kind="stable")[:count]


def _columns(contexts: NDArray[np.int64], vocab_size: int) -> Tensor:
    """Return the number of each id among the contexts, -1 for the others."""
    column = torch.full((vocab_size,), -1)
    column[torch.from_numpy(contexts)] = torch.arange(len(contexts))
    return column


def _add(counts: Tensor, token: Tensor, column: Tensor, num_contexts: int, amount: float) -> None:
    cells = (token * num_contexts + column)[column >= 0]
    counts.scatter_add_(0, cells, torch.full((1,), amount).expand(len(cells)))


def _information(counts: Tensor) -> Tensor:
    """Return the positive pointwise mutual information. Shape: (vocab_size, contexts), as counts."""
    columns = counts.sum(0) ** _CONTEXT_POWER
    expected = counts.sum(1, keepdim=True) * (columns / columns.sum().clamp(min=1))
    return (counts / expected.clamp(min=1e-9)).clamp(min=1).log()


def _vectors(information: Tensor, occurrences: NDArray[np.integer[Any]], width: int) -> Tensor:
    """Return the `width` columns with the most information, centred, with rows of length 1; zeros for ids that do not
    occur."""
    # The right singular vectors and squared singular values, the largest last.
    squares, directions = torch.linalg.eigh(information.mT @ information)
    squares, directions = squares[-width:].clamp(min=_LEAST), directions[:, -width:]
    table = information @ (directions * squares**-0.25)
    occurs = torch.from_numpy(occurrences > 0)[:, None]
    table = torch.where(occurs, table - table[occurs[:, 0]].mean(0), 0)
    norms = table.norm(dim=1, keepdim=True)
    table = torch.where(norms > _LEAST, table / norms.clamp(min=_LEAST), 0)
    return torch.nn.functional.pad(table, (0, width - table.shape[1]))


def _ids(side: TokenSide) -> NDArray[np.int64]:
    ids, offsets = side.ids, side.offsets
    return np.asarray(ids[offsets[0] : offsets[-1]], np.int64)


def _joined(pairs: PairStore, taken: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """Return the ids of the taken pairs, each source followed by its target, and the number of each id's pair."""
    sides = (pairs.source, pairs.target)
    ids = np.concatenate([_ids(side) for side in sides])
    number = np.concatenate([np.repeat(np.arange(len(side)), side.lengths) for side in sides])
    order = np.argsort(number, kind="stable")
    order = order[taken[number[order]]]
    return torch.from_numpy(ids[order]), torch.from_numpy(number[order])
