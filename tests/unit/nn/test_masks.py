"""Mask descriptions against a loop that spells out what each says."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from manyheads.errors import ShapeError
from manyheads.nn.attention.masks import Bias, Causal, Dense, KeyPadding, Lengths, Mask, Window, dense_mask
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.relative import RelativeAttention

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


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_bias_on_both_paths(path: str, bf16: bool) -> None:
    """Products and SDPA alike, with gradients to what is added, and zeros where nothing is left."""
    layer = MultiHeadAttention(12, 3).eval()
    x = torch.randn(2, 4, 12)
    values = torch.randn(3, 4, 4).requires_grad_()
    row = torch.zeros(4, 4).index_fill(0, torch.tensor([2]), -torch.inf)
    mask = Causal() & Bias(values[None] * 1.0) & Bias(row)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        out, _ = layer(x, mask=mask)
    q, k, v = layer._project_together(x)
    blocked = (torch.ones(4, 4).triu(1) > 0) | row.isneginf()
    scores = (q @ k.transpose(-1, -2) / 2 + values).masked_fill(blocked, -1e30)
    weights = torch.softmax(scores, dim=-1).masked_fill(blocked, 0.0)
    wanted = layer.out_proj((weights @ v).transpose(1, 2).flatten(2))
    tolerance = 3e-2 if bf16 else 1e-5
    torch.testing.assert_close(out.float(), wanted, atol=tolerance, rtol=tolerance)
    (gradient,) = torch.autograd.grad(out.float().square().sum(), values)
    (exact,) = torch.autograd.grad(wanted.square().sum(), values)
    torch.testing.assert_close(gradient, exact, atol=4 * tolerance, rtol=4 * tolerance)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_below_the_range_of_the_scores_does_not_forbid(path: str, dtype: torch.dtype) -> None:
    """Only -inf does: the lowest number of float32 on a whole row would otherwise give NaN."""
    layer = MultiHeadAttention(12, 3).eval().to(dtype)
    x = torch.randn(2, 4, 12, dtype=dtype, requires_grad=True)
    lowest = torch.zeros(4, 4).index_fill(0, torch.tensor([2]), torch.finfo(torch.float32).min)
    out, _ = layer(x, mask=Bias(lowest))
    out.float().sum().backward()
    assert out.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    plain, _ = layer(x.detach())
    torch.testing.assert_close(out[:, [0, 1, 3]], plain[:, [0, 1, 3]], atol=0.02, rtol=0.02)


def test_a_bias_is_not_dropped_in_silence() -> None:
    with pytest.raises(ShapeError, match="cannot add a Bias to its scores"):
        RelativeAttention(12, 3)(torch.randn(2, 4, 12), mask=Bias(torch.zeros(4, 4)))
