"""Additive scores against the loop, and in a whole attention layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from manyheads.nn.attention.additive import AdditiveScore
from manyheads.nn.attention.masks import Mask, dense_mask
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.naive import naive_additive_attention
from manyheads.nn.attention.softmax import masked_softmax

B, H, D = 2, 2, 4


@pytest.mark.parametrize("hidden_dim", [0, 3])
def test_against_the_loop(make_mask: Callable[[int, int, int], Mask | None], hidden_dim: int) -> None:
    score = AdditiveScore(H, D, hidden_dim)
    q, k, v = torch.randn(B, H, 3, D), torch.randn(B, H, 5, D), torch.randn(B, H, 5, D)
    allowed = dense_mask(make_mask(B, 3, 5), 3, 5, q.device)
    fast = masked_softmax(score(q, k), allowed) @ v
    mapped = [torch.einsum("bhld,hde->bhle", x, w) for x, w in ((q, score.query_weight), (k, score.key_weight))]
    slow = naive_additive_attention(*mapped, v, score.score_weight, allowed)
    torch.testing.assert_close(fast.double(), slow, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_in_a_layer(make_mask: Callable[[int, int, int], Mask | None], bf16: bool) -> None:
    layer = MultiHeadAttention(8, H, score=AdditiveScore(H, D))
    x = torch.randn(B, 5, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        out, _ = layer(x, mask=make_mask(B, 5, 5))
    out.float().sum().backward()
    assert out.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert {name for name, _ in layer.named_parameters()} >= {"score.query_weight", "score.score_weight"}


def test_weights_start_within_xaviers_bound() -> None:
    score = AdditiveScore(4, 16, 8)
    bound = (6 / 24) ** 0.5
    for weight in (score.query_weight, score.key_weight):
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
