"""Additive scores against the loop, and in a whole attention layer."""

from collections.abc import Callable

import pytest
import torch
from naive_attention import naive_additive_attention, naive_dot_product_attention

from manyheads.errors import ShapeError
from manyheads.extras.peers.one_head import AdditiveAttention, DotProductAttention
from manyheads.nn.attention.masks import Mask, dense_mask
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.scores import AdditiveScore
from manyheads.nn.kernels.attention import masked_softmax

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
    assert x.grad.isfinite().all()
    assert {name for name, _ in layer.named_parameters()} >= {"score.query_weight", "score.score_weight"}


def test_weights_start_within_xaviers_bound() -> None:
    score = AdditiveScore(4, 16, 8)
    bound = (6 / 24) ** 0.5
    for weight in (score.query_weight, score.key_weight):
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)


@pytest.mark.parametrize("kind", ["additive", "dot product"])
def test_one_head_against_the_loop(path: str, make_mask: Callable[[int, int, int], Mask | None], kind: str) -> None:
    """Three widths, with weights and without, with a batch and without."""
    query, key, value = torch.randn(B, 3, 6), torch.randn(B, 5, 6), torch.randn(B, 5, 7)
    mask = make_mask(B, 3, 5)
    allowed = dense_mask(mask, 3, 5, query.device)
    if kind == "additive":
        layer: torch.nn.Module = AdditiveAttention(6, 6, 4)
        mapped = [
            (x.double() @ w.weight.double().t())[:, None] for x, w in ((query, layer.q_proj), (key, layer.k_proj))
        ]
        slow = naive_additive_attention(*mapped, value[:, None], layer.score_proj.weight, allowed)[:, 0]
    else:
        layer = DotProductAttention()
        slow = naive_dot_product_attention(query[:, None], key[:, None], value[:, None], allowed)[:, 0]
    out, weights = layer(query, key, value, mask=mask, need_weights=True)
    torch.testing.assert_close(out.double(), slow, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer(query, key, value, mask=mask), out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights @ value, out, atol=1e-5, rtol=1e-5)
    alone, alone_weights = layer(query[1], key[1], value[1], need_weights=True)
    torch.testing.assert_close(alone, layer(query, key, value)[1], atol=1e-5, rtol=1e-5)
    assert alone_weights.shape == (3, 5)


@pytest.mark.parametrize("layer", [AdditiveAttention(6, 6, 4, dropout=0.5), DotProductAttention(dropout=0.5)])
def test_one_head_drops_weights_in_training_alone(layer: torch.nn.Module) -> None:
    x = torch.randn(1, 4, 6)
    exact = layer.eval()(x, x, x)[0]
    rows = x.expand(4000, 4, 6)
    for need_weights in (False, True):
        found = layer.train()(rows, rows, rows, need_weights=need_weights)
        out = found[0] if need_weights else found
        assert not torch.equal(out[0], out[1])
        torch.testing.assert_close(out.mean(0), exact, atol=0.1, rtol=0.1)
    with pytest.raises(ShapeError, match="4 axes"):
        layer(x[None], x[None], x[None])


def test_additive_weights_start_within_xaviers_bound() -> None:
    layer = AdditiveAttention(20, 30, 40)
    for projection in (layer.q_proj, layer.k_proj, layer.score_proj):
        bound = (6 / sum(projection.weight.shape)) ** 0.5
        assert bound * 0.8 < projection.weight.abs().max() <= bound
