"""Local attention against the loop over pairs, and its cache against the whole."""

from typing import Any

import pytest
import torch
from naive_attention import naive_dot_product_attention
from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.errors import ConfigError, RequestError
from manyheads.nn.attention.local import LocalSelfAttention, local_attention
from manyheads.nn.attention.relative_bias import local_slopes

KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "two before": {"chunks_before": 2},
    "both ways": {"causal": False, "chunks_after": 1},
    "after alone": {"causal": False, "chunks_before": 0, "chunks_after": 1},
    "wrapped": {"causal": False, "chunks_after": 1, "wrap": True},
    "penalties": {"penalties": torch.randn(2, 8)},
    "penalties, both ways": {
        "causal": False,
        "chunks_before": 2,
        "chunks_after": 1,
        "penalties": torch.randn(2, 12, dtype=torch.float64),
    },
}


def visible(length: int, chunk_len: int, kind: dict[str, Any]) -> Tensor:
    """Pair by pair, from the chunks' numbers."""
    allowed = torch.zeros(length, length, dtype=torch.bool)
    chunks = -(-length // chunk_len)
    for i in range(length):
        for j in range(length):
            for offset in range(-kind.get("chunks_before", 1), kind.get("chunks_after", 0) + 1):
                wanted = i // chunk_len + offset
                wanted = wanted % chunks if kind.get("wrap") else wanted
                if wanted == j // chunk_len and (j <= i or not kind.get("causal", True)):
                    allowed[i, j] = True
    return allowed


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("length", [1, 3, 4, 13, 16])
def test_against_the_loop(kind: dict[str, Any], length: int) -> None:
    query, key, value = (torch.randn(2, 2, length, 5, dtype=torch.float64) for _ in range(3))
    lengths = torch.tensor([length, length // 2])
    out = local_attention(query, key, value, chunk_len=4, lengths=lengths, **kind)
    if length <= 4:
        kind = {**kind, "wrap": False}
    real = torch.arange(length) < lengths[:, None]
    allowed = visible(length, 4, kind) & real[:, None, None, :] & real[:, None, :, None]
    wanted = naive_dot_product_attention(query, key, value, allowed, penalties=kind.get("penalties"))
    torch.testing.assert_close(out, wanted)


def test_slopes() -> None:
    assert local_slopes(4).tolist() == [1 / 2, 1 / 8, 1 / 32, 1 / 128]
    assert local_slopes(1).tolist() == [1 / 2]
    layer = LocalSelfAttention(8, 2, chunk_len=4, chunks_before=2, sloped=True)
    penalties = layer.penalties()
    assert penalties.shape == (2, 12)
    assert penalties[:, 3].tolist() == [3 / 2, 3 / 128]
    assert LocalSelfAttention(8, 2, chunk_len=4).penalties() is None


def test_trained_slopes_begin_as_the_others_and_learn() -> None:
    torch.manual_seed(1)
    fixed = LocalSelfAttention(8, 2, chunk_len=4, sloped=True)
    torch.manual_seed(1)
    trained = LocalSelfAttention(8, 2, chunk_len=4, sloped=True, train_slopes=True)
    x = torch.randn(2, 14, 8)
    torch.testing.assert_close(trained(x), fixed(x))
    trained(x).square().sum().backward()
    gradient = trained.distance_penalties.grad
    # In a causal layer of chunks of 4 the last of 4 positions reaches back 7.
    assert gradient.shape == (2, 8)
    assert bool((gradient != 0).all())


def test_steps_of_ragged_rows_and_reordered_caches() -> None:
    module = LocalSelfAttention(12, 2, 5, chunk_len=4).double().eval()
    x = torch.randn(3, 27, 12, dtype=torch.float64)
    whole, lengths = module(x), torch.tensor([7, 12, 3])
    _, cache = module.step(x[:, :12], module.start(3), lengths)
    order = torch.tensor([2, 0, 1])
    branch = cache.clone().reorder(order)
    module.step(x[:, :5], cache)
    following = torch.stack([x[row, n : n + 9] for row, n in enumerate(lengths.tolist())])[order]
    wanted = torch.stack([whole[row, n : n + 9] for row, n in enumerate(lengths.tolist())])[order]
    counts = torch.tensor([9, 4, 1])
    out, branch = module.step(following, branch, counts)
    for row, count in enumerate(counts.tolist()):
        torch.testing.assert_close(out[row, :count], wanted[row, :count])
    assert all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(branch))


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="sees no later chunk"):
        LocalSelfAttention(8, 2, chunk_len=4, chunks_after=1)
    with pytest.raises(ConfigError, match="chunk_len 0"):
        LocalSelfAttention(8, 2, chunk_len=0)
    with pytest.raises(ConfigError, match="wrap and sloped"):
        LocalSelfAttention(8, 2, chunk_len=4, wrap=True, sloped=True)
    with pytest.raises(ConfigError, match="train_slopes is true, but sloped is false"):
        LocalSelfAttention(8, 2, chunk_len=4, train_slopes=True)
    with pytest.raises(ConfigError, match="not divisible"):
        LocalSelfAttention(8, 3, chunk_len=4)
    with pytest.raises(RequestError, match="a bidirectional layer cannot be cached"):
        LocalSelfAttention(8, 2, chunk_len=4, causal=False).start(1)
