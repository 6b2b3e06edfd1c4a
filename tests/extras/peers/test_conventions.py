"""Masks of every convention against the pattern they stand for; shapes with two readings are refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.errors import ShapeError
from manyheads.extras.peers.conventions import (
    Sizes,
    from_additive,
    from_allowed,
    from_blocked,
    from_sequence_first,
    from_valid_lens,
)
from manyheads.nn.attention.masks import Dense, Mask, dense_bias, dense_mask
from manyheads.nn.attention.multi_head import MultiHeadAttention

pytestmark = pytest.mark.usefixtures("fast_and_seeded")

SIZES = Sizes(batch=2, num_heads=3, q_len=4, k_len=5)
FULL = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(4)) < 0.5  # (batch, heads, q_len, k_len)


def written(mask: Mask, sizes: Sizes = SIZES) -> Tensor:
    found = dense_mask(mask, sizes.q_len, sizes.k_len, torch.device("cpu"))
    return found.expand(sizes.batch, sizes.num_heads, sizes.q_len, sizes.k_len)


# reading -> (the mask as given, what it means)
READINGS: dict[str, tuple[Tensor, Tensor]] = {
    "k_len": (FULL[0, 0, 0], FULL[:1, :1, :1]),
    "q_len k_len": (FULL[0, 0], FULL[:1, :1]),
    "batch k_len": (FULL[:, 0, 0], FULL[:, :1, :1]),
    "batch q_len k_len": (FULL[:, 0], FULL[:, :1]),
    "heads q_len k_len": (FULL[0], FULL[:1]),
    "batch*heads q_len k_len": (FULL.flatten(0, 1), FULL),
    "batch heads q_len k_len": (FULL, FULL),
}


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", ["blocked", "allowed", "ints", "additive"])
def test_each_reading(reading: str, named: bool, kind: str) -> None:
    """All sizes differ, so that every shape has one reading; naming it changes nothing."""
    given, meaning = READINGS[reading]
    axes = reading if named else None
    if kind == "blocked":
        mask: Mask = from_blocked(~given, SIZES, axes)
    elif kind == "allowed":
        mask = from_allowed(given, SIZES, axes)
    elif kind == "ints":
        mask = from_allowed(given.long(), SIZES, axes) & from_blocked(1 - given.int(), SIZES, axes)
    else:
        mask = from_additive(torch.zeros(given.shape).masked_fill(~given, -torch.inf), SIZES, axes)
        allowed, _ = dense_bias(mask, 4, 5, torch.device("cpu"))
        assert torch.equal(allowed.expand_as(FULL), meaning.expand_as(FULL))
        return
    assert torch.equal(written(mask), meaning.expand_as(FULL))


@pytest.mark.parametrize(
    ("shape", "sizes", "readings"),
    [
        ((3, 5, 5), Sizes(batch=3, num_heads=3, q_len=5, k_len=5), ["(batch, q_len, k_len)", "(heads, q_len, k_len)"]),
        ((5, 5), Sizes(batch=5, num_heads=3, q_len=5, k_len=5), ["(q_len, k_len)", "(batch, k_len)"]),
        ((4, 5, 5), Sizes(batch=4, num_heads=1, q_len=5, k_len=5), []),  # heads of 1: both mean the same
        ((3, 5, 5), Sizes(batch=1, num_heads=3, q_len=5, k_len=5), []),  # a batch of 1: likewise
        ((1, 5, 5), Sizes(batch=3, num_heads=3, q_len=5, k_len=5), []),  # broadcast anyhow
        ((1, 5), Sizes(batch=1, num_heads=3, q_len=1, k_len=5), []),
    ],
    ids=str,
)
def test_two_readings(shape: tuple[int, ...], sizes: Sizes, readings: list[str]) -> None:
    for make in (from_blocked, from_allowed, from_additive):
        mask = torch.zeros(shape) if make is from_additive else torch.zeros(shape, dtype=torch.bool)
        if not readings:
            make(mask, sizes)
            continue
        with pytest.raises(ShapeError) as caught:
            make(mask, sizes)
        assert all(reading in str(caught.value) for reading in readings)
        for reading in readings:
            axes = reading.strip("()").replace(",", "")
            assert isinstance(make(mask, sizes, axes=axes), Mask)


def test_naming_the_axes_decides() -> None:
    """(B, T, T) with B = H: the pattern of sentence 1 is not that of head 1."""
    sizes = Sizes(batch=2, num_heads=2, q_len=3, k_len=3)
    given = torch.stack([torch.eye(3), torch.ones(3, 3)]).bool()
    by_batch = written(from_allowed(given, sizes, "batch q_len k_len"), sizes)
    by_head = written(from_allowed(given, sizes, "heads q_len k_len"), sizes)
    assert by_batch[1].all()
    assert not by_batch[0].all()
    assert torch.equal(by_head, by_batch.transpose(0, 1))


def test_valid_lens() -> None:
    lens = torch.tensor([0, 3])
    assert written(from_valid_lens(lens))[:, 0, 0].sum(-1).tolist() == [0, 3]
    each = torch.tensor([[0, 1, 2, 3], [5, 5, 4, 9]])
    assert written(from_valid_lens(each))[:, 1].sum(-1).tolist() == [[0, 1, 2, 3], [5, 5, 4, 5]]
    with pytest.raises(ShapeError, match="length for each query"):
        written(from_valid_lens(each[:, :3]))


def test_sequence_first() -> None:
    given = FULL[:, 0].permute(1, 2, 0)  # (q_len, k_len, batch)
    assert torch.equal(written(from_sequence_first(given.long(), SIZES)), FULL[:, :1].expand_as(FULL))
    assert written(from_sequence_first(torch.ones(1, 5, 1))).all()
    for wrong in (FULL[:, 0], FULL[0, 0]):
        with pytest.raises(ShapeError, match="q_len, k_len, batch"):
            from_sequence_first(wrong, SIZES)


def test_additive_masks_add_and_block() -> None:
    """ALiBi's numbers stay; what is as low as others' -infinity blocks, and a row of nothing else gives zeros."""
    layer = MultiHeadAttention(12, 3).eval()
    x = torch.randn(2, 4, 12)
    sizes = Sizes(batch=2, num_heads=3, q_len=4, k_len=4)
    for lowest in (-torch.inf, torch.finfo(torch.float32).min, -1e9):
        values = torch.randn(4, 4).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), lowest)
        values[0] = lowest
        out, _, weights = layer(x, mask=from_additive(values, sizes), need_weights=True)
        q, k, _ = layer._project_together(x)
        wanted = torch.softmax(q @ k.transpose(-1, -2) / 2 + values, dim=-1)[:, :, 1:]
        torch.testing.assert_close(weights[:, :, 1:], wanted, atol=1e-5, rtol=1e-5)
        assert (weights[:, :, 0] == 0).all()
        assert torch.equal(out[:, 0], layer.out_proj.bias.expand(2, 12))
    half = from_additive(torch.full((4, 4), torch.finfo(torch.float16).min, dtype=torch.float16), sizes)
    assert not dense_bias(half, 4, 4, x.device)[0].any()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: from_blocked(torch.zeros(4, 6) > 0, SIZES), r"\(q_len, k_len\), or \(batch, k_len\)"),
        (lambda: from_blocked(torch.zeros(1, 1, 1, 4, 5) > 0, SIZES), "one to four axes"),
        (lambda: from_blocked(torch.zeros(4, 5), SIZES, axes="rows columns"), "rows columns"),
        (lambda: from_blocked(torch.zeros(4, 5), SIZES, axes="k_len"), "axes is 'k_len'"),
        (lambda: from_blocked(torch.randn(4, 5), SIZES), "from_additive"),
        (lambda: from_allowed(torch.randn(4, 5), SIZES), "from_additive"),
        (lambda: from_additive(torch.zeros(4, 5) > 0, SIZES), "from_blocked"),
        (lambda: from_valid_lens(torch.zeros(2)), "whole numbers"),
        (lambda: from_valid_lens(torch.zeros(2, 5) > 0), "from_allowed"),
        (lambda: from_valid_lens(torch.zeros(2, 3, 4, dtype=torch.int64)), "whole numbers"),
        (lambda: written(Dense(torch.ones(2, 2, 2, 4, 5))), "dense mask"),
        (lambda: written(Dense(torch.ones(5))), "dense mask"),
    ],
    ids=range(12),
)
def test_mistakes_are_named(call: Any, named: str) -> None:
    with pytest.raises(ShapeError, match=named):
        call()
