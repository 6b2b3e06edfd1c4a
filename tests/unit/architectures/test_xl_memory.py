"""The two forms of memory as values: what they own, what appending costs, how lanes of unlike lengths stand in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads.architectures.table import ARCHITECTURES, build_model
from manyheads.architectures.transformer_xl.config import Attending
from manyheads.architectures.transformer_xl.state import XLKeyValues, XLMemory

torch.set_num_threads(1)


def numbered(lanes: int, first: int, count: int) -> Tensor:
    """Positions first, first + 1, ... of every lane, two numbers each."""
    return torch.arange(float(first), first + count)[None, :, None].repeat(lanes, 1, 2)


def test_lanes_are_aligned_on_the_right() -> None:
    state = XLMemory.empty(3, 1, 2, torch.zeros(1), Attending(memory_len=4))
    state = state.after([numbered(3, 0, 3)], torch.tensor([3, 1, 0]))
    assert state.lengths.tolist() == [3, 1, 0]
    assert state.layers[0][0, :, 0].tolist() == [0, 1, 2]
    assert state.layers[0][1, 2:, 0].tolist() == [0]
    assert state.valid() is not None
    assert state.valid().tolist() == [[True] * 3, [False, False, True], [False] * 3]  # type: ignore[union-attr]
    state = state.after([numbered(3, 10, 2)], torch.tensor([2, 1, 2]))
    assert state.lengths.tolist() == [4, 2, 2]
    assert state.layers[0][0, :, 0].tolist() == [1, 2, 10, 11]
    assert state.layers[0][1, 2:, 0].tolist() == [0, 10]
    assert state.layers[0][2, 2:, 0].tolist() == [10, 11]
    state = state.after([numbered(3, 20, 4)], None)
    assert state.valid() is None
    assert state.layers[0][:, :, 0].tolist() == [[20, 21, 22, 23]] * 3


@pytest.mark.parametrize("new_len", [1, 3, 5, 9])
@pytest.mark.parametrize("ext_len", [0, 2])
def test_a_memory_is_the_last_of_all_positions(new_len: int, ext_len: int) -> None:
    """And has storage of its own: neither the segment nor the older memory is kept alive, or changed with it."""
    state = XLMemory.empty(2, 2, 2, torch.zeros(1), Attending(memory_len=5, ext_len=ext_len))
    seen: list[float] = []
    for step in range(4):
        new = numbered(2, 100 * step, new_len)
        before = state
        state = before.after([new, new + 0.5], None)
        seen += new[0, : max(0, new_len - ext_len), 0].tolist()
        assert state.columns == min(5, len(seen))
        assert state.layers[0][1, :, 0].tolist() == seen[len(seen) - state.columns :]
        assert state.layers[1][1, :, 0].tolist() == [x + 0.5 for x in seen[len(seen) - state.columns :]]
        for layer in state.layers:
            assert layer.is_contiguous()
            assert layer.untyped_storage().nbytes() == layer.nbytes
            assert layer.data_ptr() != new.data_ptr() or not layer.numel()


def test_reset_is_of_some_lanes_and_leaves_the_value_alone() -> None:
    state = XLMemory.empty(2, 1, 2, torch.zeros(1), Attending(memory_len=4)).after([numbered(2, 0, 3)], None)
    after = state.reset(torch.tensor([True, False]))
    assert after.lengths.tolist() == [0, 3]
    assert state.lengths.tolist() == [3, 3]
    after = after.after([numbered(2, 10, 1)], None)
    assert after.lengths.tolist() == [1, 4]


def test_memory_follows_the_type_of_what_is_read() -> None:
    """bfloat16 while autocast is on, float32 again after it."""
    config = replace(ARCHITECTURES["transformer-xl"].presets["debug"](), vocab_size=23)
    model: Any = build_model(config).eval()
    tokens = torch.arange(10).view(2, 5)
    for projected in (False, True):
        with torch.no_grad():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                _, state = model.read(tokens, None, model.start(2, projected=projected))
            kept = state.keys if projected else state.layers
            assert {tensor.dtype for tensor in kept} == {torch.bfloat16}
            _, state = model.read(tokens, None, state)
            kept = state.keys if projected else state.layers
            assert {tensor.dtype for tensor in kept} == {torch.float32}


class Count(TorchDispatchMode):
    """Numbers that operations made or filled, views not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for one in out if isinstance(out, tuple | list) else [out]:
                self.numbers += one.numel() if isinstance(one, Tensor) else 0
        return out


def test_a_token_costs_the_same_however_many_were_read() -> None:
    """Counted in numbers written, over whole turns of the buffer: its moves cost no more a token late than early."""
    memory_len, turns = 32, 8
    config = replace(ARCHITECTURES["transformer-xl"].presets["debug"](), vocab_size=23, memory_len=memory_len)
    model: Any = build_model(config).eval()
    costs = []
    with torch.no_grad():
        state = model.start(2)
        for _ in range(turns):
            with Count() as count:
                for _ in range(memory_len + 1):
                    _, state = model.step(torch.ones(2, 1, dtype=torch.int64), state)
            costs.append(count.numbers)
    assert state.columns == memory_len
    assert state.keys[0].shape[2] <= 2 * (memory_len + 1)
    assert state.reach <= memory_len + 3  # two more than are needed, see `XLStep`
    assert max(costs[2:]) == min(costs[2:])


def write(state: XLKeyValues, keys: Tensor, values: Tensor) -> None:
    """As `XLStep.write` in the first layer, behind the last position."""
    new = slice(int(state.last), int(state.last) + keys.shape[2])
    state.keys[0][:, :, new] = keys
    state.values[0][:, :, new] = values


def test_appending_copies_a_position_a_constant_number_of_times() -> None:
    """Also while the memory grows without bound: doubling, not one more each time."""
    state = XLKeyValues.empty(1, 1, 1, 1, torch.zeros(1), Attending(memory_len=10**9))
    with Count() as count:
        for _ in range(1000):
            state = state.with_room(1, torch.float32)
            write(state, torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))
            state = state.after(1, None)
    assert state.columns == 1000
    assert count.numbers < 60 * 1000


def test_keys_of_unlike_lanes_are_aligned_and_roll() -> None:
    state = XLKeyValues.empty(2, 1, 1, 2, torch.zeros(1), Attending(memory_len=3))
    for first, lengths in ((0, [2, 1]), (10, [0, 2]), (20, [1, 0]), (30, [2, 2])):
        state = state.with_room(2, torch.float32)
        new = numbered(2, first, 2)[:, None]
        write(state, new, -new)
        state = state.after(2, torch.tensor(lengths))
    assert state.lengths.tolist() == [3, 3]
    window = slice(int(state.first), int(state.last))
    assert state.keys[0][:, 0, window, 0].tolist() == [[20, 30, 31], [11, 30, 31]]
    assert torch.equal(state.values[0][:, :, window], -state.keys[0][:, :, window])
