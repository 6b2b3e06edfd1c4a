"""The cache of one attention layer as a value."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch.utils import _pytree as pytree

from manyheads.nn.attention.state import KeyValueState

R, H, D = 3, 2, 4


def chunk(new_len: int, rows: int = R) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, H, new_len, D), torch.randn(rows, H, new_len, D)


def empty() -> KeyValueState:
    return KeyValueState.empty(R, H, D, like=torch.zeros(1))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_appending_is_concatenating(new_lens: list[int]) -> None:
    state, keys, values = empty(), [], []
    for new_len in new_lens:
        key, value = chunk(new_len)
        keys.append(key)
        values.append(value)
        state = state.append(key, value)
    key, value = state.filled()
    assert torch.equal(key, torch.cat(keys, dim=2))
    assert torch.equal(value, torch.cat(values, dim=2))
    assert int(state.length) == sum(new_lens)
    assert state.length.device.type == "cpu"


def test_growth_is_by_doubling() -> None:
    """A hundred steps copy the whole a handful of times, not a hundred."""
    state, buffers = empty(), set()
    for _ in range(100):
        state = state.append(*chunk(1))
        buffers.add(state.key.data_ptr())
    assert state.key.shape[2] == 128
    assert len(buffers) <= 4


def test_reorder_takes_rows_in_the_order_given() -> None:
    state = empty().append(*chunk(5))
    key, value = (x.clone() for x in state.filled())
    rows = torch.tensor([2, 0, 2, 1])
    after = state.reorder(rows)
    assert torch.equal(after.filled()[0], key[rows])
    assert torch.equal(after.filled()[1], value[rows])
    new = chunk(1, rows=4)
    grown = after.append(*new)
    assert torch.equal(grown.filled()[0], torch.cat([key[rows], new[0]], dim=2))
    assert torch.equal(state.filled()[0], key)  # the old one was only read


def test_a_clone_shares_nothing() -> None:
    state = empty().append(*chunk(3))
    branch = state.clone()
    kept = branch.filled()[0].clone()
    state.append(*chunk(1))
    state.key.zero_()
    assert torch.equal(branch.filled()[0], kept)
    assert int(branch.length) == 3
    one, other = chunk(1), chunk(1)
    left, right = branch.clone().append(*one), branch.append(*other)
    assert torch.equal(left.filled()[0][:, :, 3:], one[0])
    assert torch.equal(right.filled()[0][:, :, 3:], other[0])


def test_it_is_a_pytree() -> None:
    state = empty().append(*chunk(2))
    leaves, spec = pytree.tree_flatten(state)
    assert len(leaves) == 3
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, KeyValueState)
    assert torch.equal(again.filled()[0], state.filled()[0])
    doubled = pytree.tree_map(lambda leaf: leaf * 2, state)
    assert torch.equal(doubled.filled()[0][:, :, :2], state.key[:, :, :2] * 2)
    assert int(doubled.length) == 4


def test_a_change_of_type_is_followed() -> None:
    """A cache begun in float32 and continued under autocast takes the new type, and keeps what it had."""
    key, value = chunk(2)
    state = empty().append(key, value).append(*(x.bfloat16() for x in chunk(1)))
    assert state.key.dtype == torch.bfloat16
    torch.testing.assert_close(state.filled()[0][:, :, :2].float(), key, atol=0.02, rtol=0.01)
    assert int(state.length) == 3
    assert value.dtype == torch.float32


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 3))
def test_planned_steps_hold_all_keys(steps: int, new_len: int) -> None:
    """A planned step shows all keys and values so far in their order, and no view is ever the whole buffer."""
    state, chunks = empty(), []
    for _ in range(steps):
        chunks.append(chunk(new_len))
        planned, state = state.plan(new_len)
        assert planned.length == int(state.length) - new_len
        assert planned.slots.end < planned.key.shape[2]
        expected = [torch.cat(parts, dim=2) for parts in zip(*chunks, strict=True)]
        for filled in (planned.write(*chunks[-1]).filled(), state.filled()):
            for mine, theirs in zip(filled, expected, strict=True):
                assert torch.equal(mine, theirs)
