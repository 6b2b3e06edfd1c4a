"""The properties of attention and positions that the tutorials state (and prove by hand)."""

import math

import pytest
import torch
from torch import Tensor

from manyheads.extras.peers.one_head import AdditiveAttention, DotProductAttention
from manyheads.extras.peers.torch_compatible import TorchMultiheadAttention
from manyheads.nn.attention.masks import Lengths
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.kernels.attention import dot_product_weights
from manyheads.nn.positions import sinusoidal_table

LENGTH, WIDTH = 7, 12


def kinds() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    return {
        "multi-head": MultiHeadAttention(WIDTH, 3),
        "one head": DotProductAttention(),
        "additive": AdditiveAttention(WIDTH, WIDTH, 5),
        "torch": TorchMultiheadAttention(WIDTH, 3, batch_first=True),
    }


def attend(layer: torch.nn.Module, query: Tensor, key: Tensor) -> Tensor:
    found = layer(query, key, key)
    return found if isinstance(found, Tensor) else found[0]


@pytest.mark.parametrize("kind", kinds())
def test_permutation_equivariance(kind: str) -> None:
    """Self-attention of a permuted sequence is the permuted self-attention: attention(P x) = P attention(x)."""
    layer = kinds()[kind]
    x, order = torch.randn(2, LENGTH, WIDTH), torch.randperm(LENGTH)
    torch.testing.assert_close(
        attend(layer, x[:, order], x[:, order]), attend(layer, x, x)[:, order], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("kind", kinds())
def test_the_order_of_keys_does_not_matter(kind: str) -> None:
    layer = kinds()[kind]
    query, key, order = torch.randn(2, 3, WIDTH), torch.randn(2, LENGTH, WIDTH), torch.randperm(LENGTH)
    torch.testing.assert_close(attend(layer, query, key[:, order]), attend(layer, query, key), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [4, 64, 512])
def test_variance_of_scores(head_dim: int) -> None:
    """Of q.k, for components of mean 0 and variance 1: d_k, and 1 after the scale. What the layer has is the latter."""
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 400, head_dim), torch.randn(1, 1, 400, head_dim)
    assert torch.matmul(query, key.transpose(-1, -2)).var().item() == pytest.approx(head_dim, rel=0.05)
    weights = dot_product_weights(query, key)
    scores = weights.log() - weights.log().mean(-1, keepdim=True)  # up to a constant a row
    assert scores.var().item() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("d_model", [16, 128])
@pytest.mark.parametrize("offset", [1, 5, 40])
def test_positions_are_linear_in_positions(layout: str, d_model: int, offset: int) -> None:
    """PE(pos + k) = M_k PE(pos) with one matrix, a rotation of each pair, for all pos."""
    table = sinusoidal_table(torch.arange(300.0), d_model, layout).double()  # type: ignore[arg-type]
    pairs = [(i, i + d_model // 2) if layout == "halves" else (2 * i, 2 * i + 1) for i in range(d_model // 2)]
    matrix = torch.zeros(d_model, d_model, dtype=torch.float64)
    for i, (sine, cosine) in enumerate(pairs):
        angle = offset * 10_000 ** (-2 * i / d_model)
        matrix[sine, sine] = matrix[cosine, cosine] = math.cos(angle)
        matrix[sine, cosine], matrix[cosine, sine] = math.sin(angle), -math.sin(angle)
    torch.testing.assert_close(table[:-offset] @ matrix.t(), table[offset:], atol=1e-6, rtol=0.0)
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(d_model, dtype=torch.float64))


def test_the_first_frequency_is_there() -> None:
    """One printed matrix of positions skips it: sin(pos) and cos(pos) come first."""
    table = sinusoidal_table(torch.arange(10.0), 8)
    torch.testing.assert_close(table[:, 0], torch.arange(10.0).sin())
    torch.testing.assert_close(table[:, 1], torch.arange(10.0).cos())


def test_d2ls_own_numbers() -> None:
    """Equal keys get equal weights among the valid: means of the first 2 and 6 values (d2l, section 11.3)."""
    query, key = torch.randn(2, 1, 2), torch.ones(2, 10, 2)
    value = torch.arange(40.0).view(1, 10, 4).repeat(2, 1, 1)
    out = DotProductAttention()(query, key, value, mask=Lengths(torch.tensor([2, 6])))
    wanted = torch.tensor([[[2.0, 3, 4, 5]], [[10.0, 11, 12, 13]]])
    torch.testing.assert_close(out, wanted)
