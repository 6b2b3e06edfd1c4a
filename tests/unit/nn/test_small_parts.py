"""Embedding, norms, residuals, feed-forward, dropout, and the type of the residual stream."""

import copy
import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from manyheads.errors import ConfigError
from manyheads.nn import RelativeMultiHeadAttention, TorchMultiheadAttention
from manyheads.nn.kernels.dropout import dropout, numbered_rows
from manyheads.nn.kernels.linear import low_precision
from manyheads.nn.layers import Dropout, FeedForward, Residual, UnbiasedLayerNorm, build_norm
from manyheads.nn.positions import TokenEmbedding


def test_embeddings_are_scaled_to_variance_one() -> None:
    table = TokenEmbedding(2000, 64)
    ids = torch.arange(2000)[None]
    assert torch.equal(table(ids)[0], table.weight * 8.0)
    assert table(ids).var().item() == pytest.approx(1.0, rel=0.05)
    plain = TokenEmbedding(7, 4, scale=False)
    assert torch.equal(plain(ids[:, :7])[0], plain.weight)


def test_the_unbiased_norm_is_not_torchs() -> None:
    """std over n - 1, eps added to it, outside the root."""
    norm = UnbiasedLayerNorm(5, eps=0.3).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(4, 5, dtype=torch.float64)
    for row, got in zip(x, norm(x), strict=True):
        mean = sum(row) / 5
        deviation = (sum((row - mean) ** 2) / 4) ** 0.5
        torch.testing.assert_close(got, norm.weight * (row - mean) / (deviation + 0.3) + norm.bias)
    assert not torch.allclose(norm(x), F.layer_norm(x, (5,), norm.weight, norm.bias, 0.3), atol=1e-3)


@pytest.mark.parametrize("kind", ["layer", "unbiased", "rms"])
def test_norms_of_bfloat16_have_statistics_in_float32(kind: Any) -> None:
    """Also where all weights are bfloat16, as in a step on a GPU. With a mean of 100 in bfloat16 the error would be a
    quarter of the deviation; it may be 2^-8 of the result, whose last bit is a half of that, and 2^-6 near 0.
    """
    norm = build_norm(kind, 512, 1e-5)
    nn.init.normal_(norm.weight, 1.0, 0.1)
    exact, narrow = copy.deepcopy(norm).double(), norm.bfloat16()
    exact.load_state_dict({name: value.double() for name, value in narrow.state_dict().items()})
    for mean in (0.0, 100.0, -3e4):
        spread = max(1.0, abs(mean) / 100)
        x = (mean + spread * torch.randn(64, 512)).bfloat16()
        out = narrow(x)
        assert out.dtype is torch.bfloat16
        wanted = exact(x.double())
        assert ((out - wanted).abs() <= 2**-8 * wanted.abs() + 2**-6).all(), mean


def test_the_statistics_of_a_gpu_are_float32() -> None:
    """`meta` has the types of CUDA; the backward pass uses these numbers."""
    norm = build_norm("layer", 8, 1e-5).bfloat16().to("meta")
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        norm(torch.zeros(3, 8, dtype=torch.bfloat16, device="meta"))
    statistics = [x.dtype for x in kept if x.shape == (3, 1)]
    assert statistics == [torch.float32] * 2


def test_the_unbiased_norm_survives_equal_numbers() -> None:
    x = torch.full((2, 4), 3.0, requires_grad=True)
    out = UnbiasedLayerNorm(4)(x)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(2, 4))
    assert x.grad.isfinite().all()


def test_build_norm() -> None:
    layer = build_norm("layer", 4, 0.5, bias=False)
    assert isinstance(layer, nn.LayerNorm)
    assert (layer.eps, layer.bias) == (0.5, None)
    unbiased = build_norm("unbiased", 4, 0.5)
    assert isinstance(unbiased, UnbiasedLayerNorm)
    assert unbiased.eps == 0.5
    with pytest.raises(ConfigError, match="'batch'"):
        inspect.unwrap(build_norm)("batch", 4, 0.5)


@pytest.mark.parametrize("position", ["pre", "post"])
def test_residual(position: Any) -> None:
    norm = nn.LayerNorm(4)
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 4)
    out = Residual(norm, position=position, dropout=0.5).eval()(x, torch.sin)
    wanted = x + norm(x).sin() if position == "pre" else norm(x + x.sin())
    torch.testing.assert_close(out, wanted)


def test_a_residual_drops_the_sublayer_not_the_stream() -> None:
    x = torch.randn(2, 3, 4)
    out = Residual(nn.Identity(), position="pre", dropout=0.5)(x, lambda h: torch.full_like(h, 100.0))
    assert set((out - x).round().unique().tolist()) == {0.0, 200.0}


@pytest.mark.parametrize(("activation", "function"), [("relu", F.relu), ("gelu", F.gelu), ("swish", F.silu)])
@pytest.mark.parametrize("bias", [True, False])
def test_feed_forward(activation: Any, function: Any, bias: bool) -> None:
    layer = FeedForward(4, 7, activation=activation, bias=bias, dropout=0.5).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    assert len(list(layer.parameters())) == (4 if bias else 2)
    x = torch.randn(2, 3, 4)
    inner = x @ layer.in_proj.weight.t() + (layer.in_proj.bias if bias else 0)
    wanted = function(inner) @ layer.out_proj.weight.t() + (layer.out_proj.bias if bias else 0)
    torch.testing.assert_close(layer(x), wanted, atol=1e-5, rtol=1e-5)
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order])  # position-wise
    layer.train()
    assert not torch.equal(layer(x), layer(x))


def test_an_unknown_activation() -> None:
    with pytest.raises(ConfigError, match="'sine'"):
        inspect.unwrap(FeedForward.__init__)(FeedForward.__new__(FeedForward), 4, 4, activation="sine")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.9])
def test_dropout_rate_mean_and_gradient(rate: float, dtype: torch.dtype) -> None:
    x = torch.ones(200, 200, dtype=dtype, requires_grad=True)
    out = dropout(x, rate)
    assert out.dtype == dtype
    dropped = out == 0
    assert dropped.float().mean().item() == pytest.approx(rate, abs=0.01)
    kept = torch.tensor(1 / (1 - rate)).to(dtype)
    torch.testing.assert_close(out[~dropped], kept.expand_as(out[~dropped]), rtol=1e-2, atol=0.0)
    out.float().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.8])
def test_dropout_is_fair_to_each_of_the_numbers_that_share_a_draw(rate: float) -> None:
    kept = (dropout(torch.ones(4 * 20_000), rate) != 0).float().view(-1, 4)
    torch.testing.assert_close(kept.mean(dim=0), torch.full((4,), 1 - rate), atol=0.015, rtol=0.0)
    pairs = (kept[:, :, None] * kept[:, None, :]).mean(dim=0)[torch.triu(torch.ones(4, 4), 1).bool()]
    torch.testing.assert_close(pairs, torch.full((6,), (1 - rate) ** 2), atol=0.015, rtol=0.0)


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (2, 3, 7)])
def test_dropout_of_any_shape(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape).transpose(0, -1)
    out = dropout(x, 0.25)
    assert out.shape == x.shape
    torch.testing.assert_close(out[out != 0], (x / 0.75)[out != 0])


@pytest.mark.parametrize("rate", [1e-7, 1e-5, 0.1, 0.5, 2 / 3, 0.999, 0.9999999])
@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 16)])
def test_dropout_in_bf16_loses_what_it_loses_in_fp32(rate: float, shape: tuple[int, ...]) -> None:
    """There its mask is made of whole numbers; what is kept is scaled by the factor, rounded once."""
    torch.manual_seed(3)
    wide = dropout(torch.ones(64, *shape), rate)
    torch.manual_seed(3)
    narrow = dropout(torch.ones(64, *shape, dtype=torch.bfloat16), rate)
    assert torch.equal(narrow, wide.bfloat16())


def test_dropout_is_replayed_by_the_seed_and_off_in_evaluation() -> None:
    x, layer = torch.randn(50, 50), Dropout(0.4)
    torch.manual_seed(3)
    first = layer(x)
    second = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)
    assert layer.eval()(x) is x
    assert dropout(x, 0.0) is x
    # neighbours are independent: no pattern along rows or columns
    pairs = (dropout(torch.ones(400, 400), 0.5) != 0).float()
    assert (pairs[:, 1:] * pairs[:, :-1]).mean().item() == pytest.approx(0.25, abs=0.01)
    assert (pairs[1:] * pairs[:-1]).mean().item() == pytest.approx(0.25, abs=0.01)


def test_everything_is_dropped_at_rate_one_and_other_rates_are_refused() -> None:
    """Also where attention draws the masks of its weights itself, which torch's module at rate 1 makes zeros."""
    assert not Dropout(1.0)(torch.ones(300, 300)).any()
    x = torch.randn(300, 2, 8)
    assert not TorchMultiheadAttention(8, 2, dropout=1.0)(x, x, x)[1].any()
    assert not RelativeMultiHeadAttention(8, 2, dropout=1.0)(x).any()
    for rate in (-0.5, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=f"dropout is {rate}; it must be a number from 0 to 1"):
            Dropout(rate)(torch.ones(3, 4))


def test_the_stream_follows_autocast() -> None:
    x = torch.randn(3)
    assert low_precision(x) is x
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert low_precision(x).dtype == torch.bfloat16


def test_what_a_row_loses_does_not_depend_on_the_others() -> None:
    """Two ranks with parts of a batch drop what one would, also where the batch stands in a tensor twice."""
    whole = torch.ones(7, 3, 5)
    torch.manual_seed(4)
    masks = [dropout(whole, 0.4), dropout(torch.cat([whole, whole]), 0.4), dropout(torch.ones(6, 3), 0.4, shared=True)]
    for first, count in ((0, 4), (4, 3)):
        rows = slice(first, first + count)
        torch.manual_seed(4)
        with numbered_rows(first, count, 7):
            part = whole[rows]
            found = [dropout(part, 0.4), dropout(torch.cat([part, part]), 0.4)]
            assert torch.equal(found[0], masks[0][rows])
            assert torch.equal(found[1], torch.cat([masks[1][:7][rows], masks[1][7:][rows]]))
            assert torch.equal(dropout(torch.ones(6, 3), 0.4, shared=True), masks[2])
    assert not torch.equal(masks[1][:7], masks[1][7:])


def test_rows_are_dropped_independently_at_the_rate() -> None:
    """Each row, each of the four numbers that share 64 bits, each pair of rows, and neighbours in a row."""
    rate, width, rows = 0.3, 4096, 96
    torch.manual_seed(0)
    kept = (dropout(torch.ones(rows, width), rate) > 0).double() - (1 - rate)
    spread = math.sqrt(rate * (1 - rate))
    assert kept.mean(dim=1).abs().max() < 5 * spread / math.sqrt(width)
    assert kept.view(rows, -1, 4).mean(dim=(0, 1)).abs().max() < 5 * spread / math.sqrt(rows * width / 4)
    pairs = kept @ kept.T / (width * spread**2)
    assert pairs.tril(-1).abs().max() < 5.5 / math.sqrt(width)
    lanes = kept.view(rows, -1, 4)
    for lane in range(4):  # the same place of the four alone, where a weak mixture would show
        some = lanes[:, :, lane]
        pairs = some @ some.T / (some.shape[1] * spread**2)
        assert pairs.tril(-1).abs().max() < 6 / math.sqrt(1024)
    for step in (1, 2, 3, 4):
        near = (kept[:, step:] * kept[:, :-step]).mean() / spread**2
        assert near.abs() < 5 / math.sqrt(rows * width)
