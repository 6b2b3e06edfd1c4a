"""Mask descriptions against a loop that spells out what each says."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from manyheads.errors import ShapeError
from manyheads.nn.attention.masks import Causal, Dense, KeyPadding, Lengths, Mask, Window, dense_mask

CPU = torch.device("cpu")
B, H, K = 2, 3, 6


def spelled_out(says: Callable[[int, int, int], bool], q_len: int, k_len: int, first: int) -> torch.Tensor:
    rows = [[[says(b, first + i, j) for j in range(k_len)] for i in range(q_len)] for b in range(B)]
    return torch.tensor(rows, dtype=torch.bool)[:, None]


LENGTHS = torch.tensor([2, 5])
KEEP = torch.arange(B * K).view(B, K) % 4 != 1


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (Causal(), lambda b, i, j: j <= i),
        (Lengths(LENGTHS), lambda b, i, j: j < LENGTHS[b]),
        (KeyPadding(KEEP), lambda b, i, j: bool(KEEP[b, j])),
        (Window(left=1, right=2), lambda b, i, j: i - 1 <= j <= i + 2),
        (Window(left=None, right=0), lambda b, i, j: j <= i),
        (Window(left=2, right=None), lambda b, i, j: j >= i - 2),
        (Causal() & Lengths(LENGTHS), lambda b, i, j: j <= i and j < LENGTHS[b]),
        (Causal() & KeyPadding(KEEP) & Window(left=3, right=3), lambda b, i, j: i - 3 <= j <= i and bool(KEEP[b, j])),
    ],
    ids=["causal", "lengths", "padding", "window", "left open", "right open", "two", "three"],
)
@pytest.mark.parametrize("first", [0, 2])
def test_each_says_what_it_means(mask: Mask, says: Callable[[int, int, int], bool], first: int) -> None:
    """Also behind a cache: the first query stands after `first` keys."""
    q_len = K - first
    got = dense_mask(mask, q_len, K, CPU, first)
    assert torch.equal(got.expand(B, 1, q_len, K), spelled_out(says, q_len, K, first))


def test_no_mask_is_none_and_combines() -> None:
    assert dense_mask(None, 3, 3, CPU) is None
    mask = Causal()
    assert (mask & None) is mask


@pytest.mark.parametrize("shape", [(4, K), (B, 4, K), (B, H, 4, K), (B, 1, 1, K), (B, 1, K)])
def test_dense_patterns_keep_their_axes(shape: tuple[int, ...]) -> None:
    pattern = torch.rand(shape) < 0.5
    got = dense_mask(Dense(pattern), 4, K, CPU)
    wanted = pattern.view({2: (1, 1, *shape), 3: (shape[0], 1, *shape[1:]), 4: shape}[len(shape)])
    assert torch.equal(got.expand(B, H, 4, K), wanted.expand(B, H, 4, K))


def test_misfits_are_named() -> None:
    with pytest.raises(ShapeError, match="6 keys but there are 5"):
        dense_mask(KeyPadding(KEEP), 4, 5, CPU)
    with pytest.raises(ShapeError, match="4 queries and 5 keys"):
        dense_mask(Dense(torch.ones(3, 5)), 4, 5, CPU)
    with pytest.raises(TypeError, match="Mask"):
        Mask().allowed(torch.arange(1), torch.arange(1))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 7), st.lists(st.integers(0, 7), min_size=2, max_size=2))
def test_and_is_the_intersection(left: int, right: int, q_len: int, lengths: list[int]) -> None:
    one, two = Window(left=left, right=right), Lengths(torch.tensor(lengths))
    parts = [dense_mask(mask, q_len, 7, CPU) for mask in (one, two, one & two, two & one)]
    assert torch.equal(parts[0] & parts[1], parts[2])  # type: ignore[operator]
    assert torch.equal(parts[2], parts[3])  # type: ignore[arg-type]
