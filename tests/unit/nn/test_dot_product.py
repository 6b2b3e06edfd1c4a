"""Scaled dot-product attention, both ways, against the loop in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from naive_attention import naive_dot_product_attention

from manyheads.errors import ShapeError
from manyheads.nn import DotProductAttention
from manyheads.nn.attention.masks import Bias, Causal, Lengths, Mask, dense_bias, dense_mask
from manyheads.nn.kernels import attention, policy
from manyheads.nn.kernels.attention import dot_product_attention, dot_product_weights, masked_softmax

B, H, D, E = 2, 3, 4, 5
MakeMask = Callable[[int, int, int], Mask | None]


def inputs(q_len: int, k_len: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(B, H, n, d).to(dtype) for n, d in ((q_len, D), (k_len, D), (k_len, E))]


@pytest.mark.parametrize(("q_len", "k_len"), [(5, 5), (3, 6), (1, 4)])
def test_fp32_against_the_loop(any_path: str, make_mask: MakeMask, q_len: int, k_len: int) -> None:
    q, k, v = inputs(q_len, k_len)
    mask = make_mask(B, q_len, k_len)
    slow = naive_dot_product_attention(q, k, v, dense_mask(mask, q_len, k_len, q.device))
    torch.testing.assert_close(dot_product_attention(q, k, v, mask).double(), slow, atol=1e-5, rtol=1e-5)


def test_bf16_against_the_loop(any_path: str, make_mask: MakeMask) -> None:
    """Within twice what the plain formula in bfloat16 loses against float64 on the same numbers."""
    q, k, v = inputs(6, 6, torch.bfloat16)
    mask = make_mask(B, 6, 6)
    allowed = dense_mask(mask, 6, 6, q.device)
    slow = naive_dot_product_attention(q, k, v, allowed)
    scores = (q @ k.transpose(-1, -2)) * D**-0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    plain = (scores.float().softmax(-1).nan_to_num(0.0).bfloat16() @ v).double()
    error = (plain - slow).abs().max().item()
    got = dot_product_attention(q, k, v, mask)
    assert got.dtype == torch.bfloat16
    assert (got.double() - slow).abs().max().item() <= 2 * error + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_finite_and_agree(path: str, make_mask: MakeMask, dtype: torch.dtype) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(5, 5, dtype))
    mask = make_mask(B, 5, 5)
    factor = torch.randn(B, H, 5, E).to(dtype)
    grads = torch.autograd.grad((dot_product_attention(q, k, v, mask) * factor).sum(), (q, k, v))
    slow_in = [x.detach().double().requires_grad_() for x in (q, k, v)]
    slow_out = naive_dot_product_attention(*slow_in, dense_mask(mask, 5, 5, q.device))  # type: ignore[arg-type]
    slow = [torch.zeros_like(x) for x in slow_in]
    if slow_out.requires_grad:
        found = torch.autograd.grad((slow_out * factor).sum(), slow_in, allow_unused=True)
        slow = [zero if grad is None else grad for zero, grad in zip(slow, found, strict=True)]
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    for fast, wanted in zip(grads, slow, strict=True):
        assert fast.isfinite().all()
        torch.testing.assert_close(fast.double(), wanted, atol=tolerance, rtol=tolerance)


def test_queries_behind_a_cache(any_path: str) -> None:
    """The last two of six positions, asked alone, answer as in the whole."""
    q, k, v = inputs(6, 6)
    mask = Causal() & Lengths(torch.tensor([6, 5]))
    whole = dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(dot_product_attention(q[:, :, 4:], k, v, mask, first_query=4), whole[:, :, 4:])
    causal = dot_product_attention(q[:, :, 4:], k, v, Causal(), first_query=4)
    torch.testing.assert_close(causal, dot_product_attention(q, k, v, Causal())[:, :, 4:])


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 3), (3, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lengths_zero_and_one(q_len: int, k_len: int, dtype: torch.dtype) -> None:
    q, k, v = inputs(q_len, k_len, dtype)
    for mask in (None, Causal(), Lengths(torch.tensor([0, 1]))):
        out = dot_product_attention(q, k, v, mask)
        assert out.shape == (B, H, q_len, E)
        assert out.isfinite().all()
        if k_len == 0:
            assert (out == 0).all()


def test_scale(any_path: str) -> None:
    q, k, v = inputs(4, 4)
    torch.testing.assert_close(dot_product_attention(q, k, v, scale=D**-0.5), dot_product_attention(q, k, v))
    slow = naive_dot_product_attention(q, k, v, scale=1.7)
    torch.testing.assert_close(dot_product_attention(q, k, v, scale=1.7).double(), slow, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bias_is_added_to_the_scores(any_path: str, make_mask: MakeMask, dtype: torch.dtype) -> None:
    q, k, v = inputs(3, 6, dtype)
    mask, bias = make_mask(B, 3, 6), torch.randn(B, 1, 3, 6)
    out = dot_product_attention(q, k, v, Bias(bias) & mask)
    scores = q.double() @ k.double().transpose(-1, -2) * D**-0.5 + bias
    slow = masked_softmax(scores, dense_mask(mask, 3, 6, q.device)) @ v.double()
    torch.testing.assert_close(out.double(), slow, atol=1e-5, rtol=1e-5)


def test_dropout_keeps_the_mean_and_its_rate(path: str) -> None:
    q, k = torch.zeros(1, 1, 400, D), torch.zeros(1, 1, 50, D)
    v = torch.eye(50)[None, None]
    out = dot_product_attention(q, k, v, dropout_rate=0.25) * 50  # each number is a weight: 0 or 4/3
    assert (out == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)


def test_both_paths_meet_at_the_threshold() -> None:
    """At the real limit, one length more takes the other way and says the same."""
    q, k, v = torch.randn(1, 1, 129, 8), torch.randn(1, 1, 129, 8), torch.randn(1, 1, 129, 8)
    whole = dot_product_attention(q, k, v, Causal())
    torch.testing.assert_close(dot_product_attention(*(x[:, :, :120] for x in (q, k, v)), Causal()), whole[:, :, :120])


@pytest.mark.parametrize("elsewhere", [True, False])
def test_when_products_pay(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a search takes them where MKL is no help; training in 16 bits or with dropout does everywhere."""
    monkeypatch.setattr(policy, "onednn_is_faster", lambda: elsewhere)
    monkeypatch.setattr(policy, "products_gain", lambda: 1.0)  # not measured: the result would depend on the moment

    def pays(pairs: int, q_len: int, k_len: int, rate: float = 0.0, **options: Any) -> bool:
        query, key = (torch.zeros(pairs, 1, length, 8, **options) for length in (q_len, k_len))
        return policy.attention_path(query, key, key, rate) == "products"

    assert pays(64, 1, 40) == pays(64, 8, 512) == pays(64, 4, 40, dtype=torch.bfloat16) == elsewhere
    assert not any((pays(63, 1, 40), pays(64, 9, 40), pays(64, 1, 513), pays(64, 9, 40, requires_grad=True)))
    assert pays(2, 40, 40, rate=0.1)
    assert pays(2, 40, 40, requires_grad=True, dtype=torch.bfloat16)
    assert not any((pays(2, 200, 100, rate=0.1), pays(2, 1, 4, device="meta", rate=0.1)))


@pytest.mark.parametrize("k_len", [1, 13, 16, 21])
def test_part_of_a_cache_in_bf16_is_asked_over_a_round_length(make_mask, k_len, monkeypatch):
    """What stands behind the end, and would poison every sum, is not seen; and products have few different lengths."""
    monkeypatch.setattr(policy, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(policy, "_MANY_PAIRS", 1)
    lengths: list[int] = []
    plain_attention = attention.plain_attention

    def counted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **options: Any) -> Any:
        lengths.extend((key.shape[2], value.shape[2]))
        return plain_attention(query, key, value, *more, **options)

    monkeypatch.setattr(attention, "plain_attention", counted)
    q, k, v = inputs(2, 40, torch.bfloat16)
    k[:, :, k_len:] = v[:, :, k_len:] = torch.nan
    q, parts = q[:, :, : 2 if k_len > 1 else 1], (k[:, :, :k_len], v[:, :, :k_len])
    masks = [make_mask(B, q.shape[2], k_len), Bias(torch.randn(B, 1, q.shape[2], k_len))]
    for mask in masks:
        first_query = k_len - q.shape[2]
        allowed, bias = dense_bias(mask, q.shape[2], k_len, q.device, first_query)
        out = dot_product_attention(q, *parts, mask, first_query=first_query)
        scores = q.double() @ parts[0].double().transpose(-1, -2) * D**-0.5 + (0 if bias is None else bias)
        slow = masked_softmax(scores, allowed) @ parts[1].double()
        torch.testing.assert_close(out.double(), slow, atol=0.05, rtol=0.05)
    assert lengths == [-(-k_len // 16) * 16] * 4
    whole = [x[:, :, :k_len].contiguous() for x in (k, v)]
    dot_product_attention(q, *whole)
    with torch.enable_grad():
        dot_product_attention(q.clone().requires_grad_(), *parts)
    assert lengths[4:] == [k_len] * 4


@pytest.mark.unhooked
def test_keys_and_values_of_other_numbers_are_refused() -> None:
    """SDPA on CPUs would compute something, from memory behind the shorter of the two."""
    q, v = torch.randn(2, 1, 5, 8), torch.randn(2, 1, 7, 8)
    for call in (lambda: dot_product_attention(q, q, v), lambda: DotProductAttention()(q[:, 0], q[:, 0], v[:, 0])):
        with pytest.raises(ShapeError, match="5 keys and 7 values"):
            call()


@pytest.mark.parametrize("path", ["products", "sdpa"])
@pytest.mark.parametrize("masks", [1, 2])
def test_lowest_numbers_in_half_precision_forbid_nothing(path, masks, monkeypatch):
    """A score below zero plus the lowest number is below its range; it stays the lowest number, as with wider types."""
    monkeypatch.setattr(policy, "attention_path", lambda *_: path)
    query, key = torch.full((1, 1, 1, 4), 8.0).half(), -torch.full((1, 1, 3, 4), 8.0).half()
    key[:, :, 2] = 8.0
    lowest = torch.full((1, 3), torch.finfo(torch.float16).min).half()
    lowest[:, 2] /= masks
    mask = Bias(lowest) if masks == 1 else Bias(lowest / 2) & Bias(lowest / 2)
    weights = dot_product_weights(query, key, mask)
    assert weights.isfinite().all()
    assert weights.sum() == pytest.approx(1, abs=1e-3)
    assert dot_product_attention(query, key, key, mask).isfinite().all()


def test_equal_keys_that_a_lowest_number_hides_have_equal_weights() -> None:
    query, key = torch.full((1, 1, 1, 4), 8.0).half(), -torch.full((1, 1, 3, 4), 8.0).half()
    mask = Bias(torch.full((1, 3), -65504.0).half())
    torch.testing.assert_close(dot_product_weights(query, key, mask), torch.full((1, 1, 1, 3), 1 / 3).half())
    torch.testing.assert_close(dot_product_attention(query, key, key, mask), key[:, :, :1])
