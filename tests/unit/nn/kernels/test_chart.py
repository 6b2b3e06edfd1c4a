"""Charts beside slow ones, and beside all trees there are."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from manyheads.extras.parsing.span_parser import (
    best_splits,
    log_partition,
    naive_best_tree,
    naive_log_partition,
    span_probabilities,
    tree_spans,
)


def all_trees(first: int, last: int) -> Iterator[list[tuple[int, int]]]:
    """The spans of every binary tree over words first to last."""
    if first == last:
        yield [(first, last)]
    for middle in range(first, last):
        for left in all_trees(first, middle):
            for right in all_trees(middle + 1, last):
                yield [(first, last), *left, *right]


def charts(rows: int, num_words: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, num_words, num_words, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def of_tree(scores: list[list[float]], spans: list[tuple[int, int]]) -> float:
    return sum(scores[first][last] for first, last in spans)


def found(scores: Tensor, lengths: Tensor) -> list[list[tuple[int, int]]]:
    return [row.nonzero().tolist() for row in tree_spans(best_splits(scores), lengths)]


@pytest.mark.parametrize("num_words", range(1, 8))
def test_the_slow_forms_agree_with_all_trees(num_words: int) -> None:
    for scores in charts(3, num_words).tolist():
        value, spans = naive_best_tree(scores, 0, num_words - 1)
        values = [of_tree(scores, tree) for tree in all_trees(0, num_words - 1)]
        assert value == pytest.approx(max(values), abs=1e-12)
        assert of_tree(scores, spans) == pytest.approx(value, abs=1e-12)
        total = math.log(math.fsum(map(math.exp, values)))
        assert naive_log_partition(scores, 0, num_words - 1) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("num_words", [1, 2, 5, 9])
def test_the_best_tree_is_that_of_the_slow_form(num_words: int) -> None:
    scores = charts(4, num_words)
    for row, spans in enumerate(found(scores, torch.full((4,), num_words))):
        _, right = naive_best_tree(scores[row].tolist(), 0, num_words - 1)
        assert {(first, last) for first, last in spans} == set(right)


@pytest.mark.parametrize("num_words", [1, 2, 5, 9])
def test_the_sum_is_that_of_the_slow_form(num_words: int) -> None:
    scores = charts(4, num_words)
    right = [naive_log_partition(row, 0, num_words - 1) for row in scores.tolist()]
    total = log_partition(scores, torch.full((4,), num_words))
    torch.testing.assert_close(total, torch.tensor(right, dtype=torch.float64), rtol=1e-12, atol=1e-12)


LENGTHS = torch.tensor([9, 1, 7, 2, 8, 3])


def test_padding_changes_nothing() -> None:
    scores = charts(6, 9)
    padding = torch.arange(9) >= LENGTHS[:, None]
    other = scores.masked_fill(padding[:, None, :], 1e3)
    for table in (scores, other):
        for row, spans in enumerate(found(table, LENGTHS)):
            length = int(LENGTHS[row])
            _, right = naive_best_tree(scores[row].tolist(), 0, length - 1)
            assert {(first, last) for first, last in spans} == set(right)
    torch.testing.assert_close(log_partition(other, LENGTHS), log_partition(scores, LENGTHS), rtol=0, atol=0)


def test_the_gradient_is_the_probability_of_each_span() -> None:
    """Beside the shares of all trees; entries of the padding and below the diagonal have none."""
    scores = charts(6, 9)[:, :6, :6].clone().requires_grad_()
    lengths = LENGTHS.clamp(max=6)
    log_partition(scores, lengths).sum().backward()
    right = torch.zeros_like(scores)
    for row, length in enumerate(lengths.tolist()):
        trees = list(all_trees(0, length - 1))
        values = torch.tensor([of_tree(scores[row].tolist(), tree) for tree in trees], dtype=torch.float64)
        for share, tree in zip(values.softmax(0), trees, strict=True):
            for first, last in tree:
                right[row, first, last] += share
    torch.testing.assert_close(scores.grad, right, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(span_probabilities(scores.detach(), lengths), right, rtol=1e-10, atol=1e-12)


def test_the_gradient_beside_finite_differences() -> None:
    scores = charts(2, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: log_partition(x, torch.tensor([5, 3])), (scores,))


def test_gradients_stay_finite_with_extreme_scores() -> None:
    scores = (1e4 * charts(2, 6).float()).requires_grad_()
    log_partition(scores, torch.tensor([6, 4])).sum().backward()
    assert bool(scores.grad.isfinite().all())
    assert scores.grad[0, 0, 5] == scores.grad[1, 0, 3] == 1


def test_equal_splits_give_the_first_one() -> None:
    splits = best_splits(torch.zeros(1, 4, 4))
    assert splits[0, 0].tolist() == [0, 0, 0, 0]
    assert splits[0, 1].tolist()[2:] == [1, 1]
