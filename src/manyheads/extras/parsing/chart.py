"""Charts: the best binary tree over the words of a sentence, and the sum over all of them.

Papers: Stern, Andreas and Klein 2017, arXiv:1705.03919, sec. 3 (the best tree, by the algorithm of Cocke, Kasami and
Younger); Zhang, Zhou and Li 2020, arXiv:2008.03736, sec. 3 (the sum, batched). The score of a tree is the sum of the
scores of its spans. The score of a span does not depend on how it is split, so one table over spans is enough:

    best(i, j) = score(i, j) + max over k of best(i, k) + best(k + 1, j)

and with log sum exp in place of max, the logarithm of the sum of exp(score) over all trees. A constituent with more
than two parts is a binary tree whose further spans have no label.

Both take n steps. A step computes all spans of one width, in all rows, with vector operations. For n words the time is
O(n^3) and the memory O(n^2).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyheads.nn.kernels import modes
from manyheads.nn.kernels.modes import first_derivative_only

if TYPE_CHECKING:
    from manyheads.nn.shapes import Bool, Float, Int

_IMPOSSIBLE = float("-inf")


def naive_best_tree(scores: list[list[float]], first: int, last: int) -> tuple[float, list[tuple[int, int]]]:
    """Return the score and the spans of the best tree over words first to last; of equal splits the first one.

    Args: scores: a list for each first word, with an entry for each last word.
    """
    inside: tuple[float, list[tuple[int, int]]] = (0.0, [])
    if first < last:
        pairs = [
            (naive_best_tree(scores, first, middle), naive_best_tree(scores, middle + 1, last))
            for middle in range(first, last)
        ]
        inside = max(((one[0] + other[0], one[1] + other[1]) for one, other in pairs), key=lambda option: option[0])
    return scores[first][last] + inside[0], [(first, last), *inside[1]]


def naive_log_partition(scores: list[list[float]], first: int, last: int) -> float:
    """Return log sum exp of the scores of all trees over words first to last."""
    total = 1.0 if first == last else 0.0
    for middle in range(first, last):
        left, right = naive_log_partition(scores, first, middle), naive_log_partition(scores, middle + 1, last)
        total += math.exp(left + right)
    return scores[first][last] + math.log(total)


class _Parts:
    """The values of spans in two layouts, in which both parts of all splits of a span are contiguous, in one order.

    `left[i, w]` and `right[j, n - w]` are those of the spans of w words that begin at i and end at j.
    """

    def __init__(self, scores: Tensor, fill: float) -> None:
        self.num_words = scores.shape[1]
        self.left = scores.new_full((scores.shape[0], self.num_words, self.num_words + 1), fill)
        self.right = self.left.clone()

    def of_splits(self, width: int) -> tuple[Tensor, Tensor]:
        """Views of the first and the second parts of all spans of that width. (batch, spans, width - 1)"""
        count = self.num_words - width + 1
        return self.left[:, :count, 1:width], self.right[:, width - 1 :, count : self.num_words]

    def of_width(self, width: int) -> tuple[Tensor, Tensor]:
        """Views of the values of all spans of that width, in both layouts. (batch, spans)"""
        count = self.num_words - width + 1
        return self.left[:, :count, width], self.right[:, width - 1 :, self.num_words - width]

    def write(self, width: int, values: Tensor) -> None:
        for view in self.of_width(width):
            view.copy_(values)


def _of_width(table: Tensor, width: int) -> Tensor:
    """View of the entries of a table over spans that belong to spans of that width. (batch, spans)"""
    return table.diagonal(width - 1, dim1=1, dim2=2)


def best_splits(scores: Float[Tensor, "batch words words"]) -> Int[Tensor, "batch words words"]:
    """Return the last word of the first part of the best tree over words i to j, both included.

    Rows may be padded on the right: the entries of real words do not depend on the padding. Of equal splits the first
    one is chosen.

    Args: scores: `scores[b, i, j]` of the span from word i to word j; entries with j < i are not read.
    """
    splits = torch.zeros_like(scores, dtype=torch.long)
    parts = _Parts(scores, _IMPOSSIBLE)
    for width in range(1, scores.shape[1] + 1):
        values = _of_width(scores, width)
        if width > 1:
            first, second = parts.of_splits(width)
            largest, place = (first + second).max(dim=2)
            values = values + largest
            _of_width(splits, width).copy_(place + torch.arange(place.shape[1], device=scores.device))
        parts.write(width, values)
    return splits


def tree_spans(
    splits: Int[Tensor, "batch words words"], lengths: Int[Tensor, " batch"]
) -> Bool[Tensor, "batch words words"]:
    """Return which spans are in the tree with these splits over the words of each row; see `best_splits`."""
    inside = torch.zeros_like(splits, dtype=torch.bool)
    inside[torch.arange(len(lengths), device=lengths.device), 0, lengths - 1] = True
    for width in range(splits.shape[1], 1, -1):
        rows, first = _of_width(inside, width).nonzero(as_tuple=True)
        last = first + width - 1
        middle = splits[rows, first, last]
        inside[rows, first, middle] = True
        inside[rows, middle + 1, last] = True
    return inside


def log_partition(
    scores: Float[Tensor, "batch words words"], lengths: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Return log sum exp of the scores of all trees over the words of each row; its gradient are the probabilities of
    spans.

    Args: scores: see `best_splits`; lengths: words of each row, at least 1.
    """
    if not modes.is_fast():
        return _sums(scores, lengths)[0]
    value: Tensor = _LogPartition.apply(scores, lengths)  # type: ignore[no-untyped-call]
    return value


def span_probabilities(
    scores: Float[Tensor, "batch words words"], lengths: Int[Tensor, " batch"]
) -> Float[Tensor, "batch words words"]:
    """Return the probability that a span is in the tree: the gradient of `log_partition`, without autograd."""
    _, totals, parts = _sums(scores, lengths)
    return _shares(scores.new_ones(len(lengths)), totals, parts, lengths)


def _sums(scores: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, _Parts]:
    """Return `log_partition`, log sum exp over the splits of each span, and the values of all spans."""
    parts = _Parts(scores, _IMPOSSIBLE)
    totals = torch.zeros_like(scores)
    for width in range(1, scores.shape[1] + 1):
        values = _of_width(scores, width)
        if width > 1:
            first, second = parts.of_splits(width)
            total = torch.logsumexp(first + second, dim=2)
            _of_width(totals, width).copy_(total)
            values = values + total
        parts.write(width, values)
    rows = torch.arange(len(lengths), device=lengths.device)
    return parts.left[rows, 0, lengths], totals, parts


def _shares(grad: Tensor, totals: Tensor, parts: _Parts, lengths: Tensor) -> Tensor:
    """Return the gradient of all scores: the steps of `_sums` in reverse order. grad: of each row's value."""
    grads = _Parts(totals, 0.0)
    rows = torch.arange(len(lengths), device=lengths.device)
    grads.left[rows, 0, lengths] = grad
    found = torch.zeros_like(totals)
    for width in range(totals.shape[1], 0, -1):
        one, other = grads.of_width(width)
        of_spans = one + other
        _of_width(found, width).copy_(of_spans)
        if width > 1:
            first, second = parts.of_splits(width)
            # Spans that reach into the padding have no gradient, whatever their scores are.
            shares = torch.exp(first + second - _of_width(totals, width)[:, :, None]) * of_spans[:, :, None]
            shares = shares.masked_fill((of_spans == 0)[:, :, None], 0.0)
            for view in grads.of_splits(width):
                view.add_(shares)
    return found


@first_derivative_only
class _LogPartition(torch.autograd.Function):
    """With a gradient of our own: autograd would keep copies of every step."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, lengths: Tensor) -> Tensor:
        value, totals, parts = _sums(scores, lengths)
        ctx.save_for_backward(totals, parts.left, parts.right, lengths)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        totals, left, right, lengths = ctx.saved_tensors
        parts = _Parts(totals, 0.0)
        parts.left, parts.right = left, right
        return _shares(grad, totals, parts, lengths), None
