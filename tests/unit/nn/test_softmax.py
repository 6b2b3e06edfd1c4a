"""The masked softmax: one formula, nothing to attend to, no NaN on the way back."""

import inspect
from typing import Any

import pytest
import torch

from manyheads.errors import ConfigError, ShapeError
from manyheads.nn.attention.masks import Causal
from manyheads.nn.kernels.attention import masked_softmax


def test_among_allowed_keys_it_is_the_softmax_of_those() -> None:
    scores = torch.randn(4, 5, 7, dtype=torch.float64)
    allowed = torch.rand(4, 5, 7) < 0.6
    allowed[..., 0] = True
    weights = masked_softmax(scores, allowed)
    for row, seen, got in zip(scores.view(-1, 7), allowed.view(-1, 7), weights.view(-1, 7), strict=True):
        assert torch.equal(got[~seen], torch.zeros_like(got[~seen]))
        torch.testing.assert_close(got[seen], row[seen].exp() / row[seen].exp().sum())
    torch.testing.assert_close(masked_softmax(scores, None), scores.softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("habit", "each"), [("zeros", 0.0), ("uniform", 0.25)])
def test_fully_masked_rows(dtype: torch.dtype, habit: Any, each: float) -> None:
    scores = torch.randn(2, 3, 4, dtype=dtype).requires_grad_()
    allowed = torch.ones(2, 3, 4, dtype=torch.bool)
    allowed[0, 1] = False
    weights = masked_softmax(scores, allowed, habit)
    assert weights.dtype == dtype
    assert (weights[0, 1] == each).all()
    torch.testing.assert_close(weights[1], scores[1].softmax(-1))
    (weights * torch.randn_like(weights)).sum().backward()
    assert scores.grad.isfinite().all()
    assert (scores.grad[0, 1] == 0).all()
    assert (scores.grad[1] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("habit", "each"), [("zeros", 0.0), ("uniform", 0.25)])
@pytest.mark.parametrize("shape", [(2, 1, 1, 4), (1, 1, 3, 4), (4,)])
def test_a_mask_for_many_rows_is_as_one_written_out(dtype, habit, each, shape):
    """To the bit, forwards and backwards; also for scores far from zero, and for rows that see nothing."""
    scores = (torch.randn(2, 5, 3, 4) * 30).to(dtype).requires_grad_()
    allowed = torch.rand(shape) < 0.6
    allowed.view(-1, 4)[0] = False  # (4,): no row sees anything
    grad = torch.randn(2, 5, 3, 4).to(dtype)
    weights = masked_softmax(scores, allowed, habit)
    written_out = masked_softmax(scores, allowed.expand(2, 5, 3, 4).contiguous(), habit)
    assert torch.equal(weights, written_out)
    assert (weights.masked_select(~allowed.any(-1, keepdim=True)) == each).all()
    (mine,), (theirs,) = (torch.autograd.grad(one, scores, grad) for one in (weights, written_out))
    assert torch.equal(mine, theirs)
    assert (mine.masked_select(~allowed.any(-1, keepdim=True)) == 0).all()


def test_it_leaves_its_input_alone() -> None:
    scores = torch.randn(2, 4)
    before = scores.clone()
    masked_softmax(scores, torch.tensor([True, False, True, False]))
    assert torch.equal(scores, before)


def test_bfloat16_scores_are_summed_in_float32() -> None:
    """4,096 equal scores: a running sum in bfloat16 would stop at 256."""
    weights = masked_softmax(torch.zeros(1, 4096, dtype=torch.bfloat16), torch.ones(1, 4096, dtype=torch.bool))
    assert weights.double().sum() == pytest.approx(1.0, rel=1e-2)


def test_an_unknown_habit() -> None:
    with pytest.raises(ConfigError, match="'nan'"):
        inspect.unwrap(masked_softmax)(torch.zeros(1, 1), None, "nan")  # past the tests' own type checks


@pytest.mark.parametrize(
    ("allowed", "said"),
    [
        (torch.ones(2, 4, dtype=torch.int64), r"tensor of torch.int64; .* mask != 0"),
        (torch.ones(2, 4), r"tensor of torch\.float32"),
        (torch.tensor([2, 3]), r"torch.arange\(k_len\) < lengths"),
        ([2, 3], "allowed is list"),
        (Causal(), r"allowed is Causal; .* mask.allowed"),
        (torch.ones(3, 4) > 0, r"shape \(3, 4\), which does not fit scores of shape \(2, 4\)"),
    ],
    ids=str,
)
def test_what_does_not_say_which_keys_are_allowed_is_named(allowed: Any, said: str) -> None:
    forward = masked_softmax.__wrapped__ if hasattr(masked_softmax, "__wrapped__") else masked_softmax
    with pytest.raises(ShapeError, match=said):
        forward(torch.randn(2, 4), allowed)
    for mask in (torch.ones(2, 4) > 0, None):
        with pytest.raises(ShapeError, match=r"scores are of torch\.int64"):
            forward(torch.ones(2, 4, dtype=torch.int64), mask)
