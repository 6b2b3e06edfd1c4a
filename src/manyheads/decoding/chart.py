"""The best binary tree over the words of each sentence, by the algorithm of Cocke, Kasami and Younger (CKY).

Paper: Stern, Andreas and Klein 2017, arXiv:1705.03919, sec. 3. A tree's score is the sum of the scores of its spans, and
a label's score does not depend on the split, so one table over spans is enough, without a grammar:

    best(i, j) = score(i, j) + max over k of best(i, k) + best(k + 1, j)

A constituent with more than two parts is found as a binary tree whose further spans have no label.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.nn.shapes import Float, Int

__all__ = ["best_spans", "best_splits", "naive_best_tree"]

_IMPOSSIBLE = float("-inf")


def best_splits(
    scores: Float[Tensor, "batch words words"],
) -> tuple[Float[Tensor, "batch words words"], Int[Tensor, "batch words words"]]:
    """Return the score of the best tree over words i to j, both included, and the last word of its left part.

    Sentences may be padded on the right: the entries of the real words do not depend on the padding. Among equal splits
    the first one is chosen.

    Args: scores: `scores[b, i, j]` of the span from word i to word j; entries with j < i are not read.

    Cost: n steps of vector operations for n words; time n^3, memory n^2.
    """
    rows, num_words, _ = scores.shape
    # `left[i, w]` and `right[j, n - w]` are the best scores of the spans of w words that begin at i and end at j, so
    # that both parts of all splits of a span are contiguous, in the same order.
    left = scores.new_full((rows, num_words, num_words + 1), _IMPOSSIBLE)
    right = left.clone()
    splits = torch.zeros_like(scores, dtype=torch.long)
    best = torch.zeros_like(scores)
    for width in range(1, num_words + 1):
        count = num_words - width + 1  # spans of this width; number i is of words i to i + width - 1
        values = scores.diagonal(width - 1, dim1=1, dim2=2)  # (batch, count)
        if width > 1:
            sums = left[:, :count, 1:width] + right[:, width - 1 :, count:num_words]  # (batch, count, width - 1)
            largest, first = sums.max(dim=2)
            values = values + largest
            starts = torch.arange(count, device=scores.device)
            splits.diagonal(width - 1, dim1=1, dim2=2).copy_(starts + first)
        best.diagonal(width - 1, dim1=1, dim2=2).copy_(values)
        left[:, :count, width] = values
        right[:, width - 1 :, num_words - width] = values
    return best, splits


def best_spans(
    scores: Float[Tensor, "batch words words"], labels: Int[Tensor, "batch words words"], lengths: Int[Tensor, " batch"]
) -> list[list[tuple[int, int, int]]]:
    """Return the constituents of the best tree of each sentence: first word, first word after it, and label.

    Args:
        scores: see `best_splits`.
        labels: of each span; those with the label 0 are left out.
        lengths: words of each sentence, at least 1.
    """
    _, splits = best_splits(scores)
    found = []
    for row, length in enumerate(lengths.tolist()):
        split, label = splits[row].tolist(), labels[row].tolist()
        spans, waiting = [], [(0, length - 1)]
        while waiting:
            first, last = waiting.pop()
            if label[first][last]:
                spans.append((first, last + 1, label[first][last]))
            if first < last:
                middle = split[first][last]
                waiting += [(middle + 1, last), (first, middle)]
        found.append(spans)
    return found


def naive_best_tree(scores: list[list[float]]) -> tuple[float, list[tuple[int, int]]]:
    """Return the score and the spans of the best tree of one sentence, from the formula; the oracle of `best_spans`.

    Args: scores: a list for each first word, with an entry for each last word.
    """

    def best(first: int, last: int) -> tuple[float, list[tuple[int, int]]]:
        if (first, last) not in known:
            inside: tuple[float, list[tuple[int, int]]] = (0.0, [])
            if first < last:
                pairs = [(best(first, middle), best(middle + 1, last)) for middle in range(first, last)]
                options = [(one[0] + other[0], one[1] + other[1]) for one, other in pairs]
                inside = max(options, key=lambda option: option[0])  # the first of equal ones
            known[first, last] = (scores[first][last] + inside[0], [(first, last), *inside[1]])
        return known[first, last]

    known: dict[tuple[int, int], tuple[float, list[tuple[int, int]]]] = {}
    return best(0, len(scores) - 1)
