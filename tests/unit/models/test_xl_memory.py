"""The two forms of memory as values: what they own, what appending costs, how lanes of unlike lengths stand in them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.errors import ConfigError
from manyheads.models.transformer_xl.config import Attending, TransformerXLConfig
from manyheads.models.transformer_xl.state import LayerInputs, XLState
from manyheads.nn.attention.cache import KeyValueCache

torch.set_num_threads(1)


def empty(lanes: int, num_layers: int, **attending: int) -> XLState:
    """A memory of layers' inputs without positions."""
    memory = LayerInputs((torch.zeros(lanes, 0, 2),) * num_layers, torch.zeros(lanes, dtype=torch.int64))
    return XLState(memory, Attending(**attending))  # type: ignore[arg-type]


def layers_of(state: XLState) -> tuple[Tensor, ...]:
    assert isinstance(state.memory, LayerInputs)
    return state.memory.layers


def numbered(lanes: int, first: int, count: int) -> Tensor:
    """Positions first, first + 1, ... of every lane, two numbers each."""
    return torch.arange(float(first), first + count)[None, :, None].repeat(lanes, 1, 2)


def test_lanes_are_aligned_on_the_right() -> None:
    state = empty(3, 1, memory_len=4)
    state = state.after(3, torch.tensor([3, 1, 0]), [numbered(3, 0, 3)])
    assert state.lengths.tolist() == [3, 1, 0]
    assert layers_of(state)[0][0, :, 0].tolist() == [0, 1, 2]
    assert layers_of(state)[0][1, 2:, 0].tolist() == [0]
    assert state.valid() is not None
    assert state.valid().tolist() == [[True] * 3, [False, False, True], [False] * 3]  # type: ignore[union-attr]
    state = state.after(2, torch.tensor([2, 1, 2]), [numbered(3, 10, 2)])
    assert state.lengths.tolist() == [4, 2, 2]
    assert layers_of(state)[0][0, :, 0].tolist() == [1, 2, 10, 11]
    assert layers_of(state)[0][1, 2:, 0].tolist() == [0, 10]
    assert layers_of(state)[0][2, 2:, 0].tolist() == [10, 11]
    state = state.after(4, None, [numbered(3, 20, 4)])
    assert state.valid() is None
    assert layers_of(state)[0][:, :, 0].tolist() == [[20, 21, 22, 23]] * 3


@pytest.mark.parametrize("new_len", [1, 3, 5, 9])
@pytest.mark.parametrize("ext_len", [0, 2])
def test_a_memory_is_the_last_of_all_positions(new_len: int, ext_len: int) -> None:
    """And has storage of its own: neither the segment nor the older memory is kept alive, or changed with it."""
    state = empty(2, 2, memory_len=5, ext_len=ext_len)
    seen: list[float] = []
    for step in range(4):
        new = numbered(2, 100 * step, new_len)
        before = state
        state = before.after(new_len, None, [new, new + 0.5])
        seen += new[0, : max(0, new_len - ext_len), 0].tolist()
        assert state.columns == min(5, len(seen))
        assert layers_of(state)[0][1, :, 0].tolist() == seen[len(seen) - state.columns :]
        assert layers_of(state)[1][1, :, 0].tolist() == [x + 0.5 for x in seen[len(seen) - state.columns :]]
        for layer in layers_of(state):
            assert layer.is_contiguous()
            assert layer.untyped_storage().nbytes() == layer.nbytes
            assert layer.data_ptr() != new.data_ptr() or not layer.numel()


def test_reset_is_of_some_lanes_and_leaves_the_value_alone() -> None:
    state = empty(2, 1, memory_len=4).after(3, None, [numbered(2, 0, 3)])
    after = state.reset(torch.tensor([True, False]))
    assert after.lengths.tolist() == [0, 3]
    assert state.lengths.tolist() == [3, 3]
    after = after.after(1, None, [numbered(2, 10, 1)])
    assert after.lengths.tolist() == [1, 4]


def test_memory_follows_the_type_of_what_is_read() -> None:
    """bfloat16 while autocast is on, float32 again after it."""
    config = replace(ARCHITECTURES["transformer-xl"].presets["debug"], vocab_size=23)
    model: Any = build_model(config).eval()
    tokens = torch.arange(10).view(2, 5)
    for projected in (False, True):
        with torch.no_grad():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                _, state = model.read(tokens, None, model.start(2, projected=projected))
            kept = state.memory.keys if projected else state.memory.layers
            assert {tensor.dtype for tensor in kept} == {torch.bfloat16}
            _, state = model.read(tokens, None, state)
            kept = state.memory.keys if projected else state.memory.layers
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
    config = replace(ARCHITECTURES["transformer-xl"].presets["debug"], vocab_size=23, memory_len=memory_len)
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
    assert state.memory.keys[0].shape[2] <= 2 * (memory_len + 1)
    assert state.reach <= memory_len + 3  # two more than are needed, see `XLStep`
    assert max(costs[2:]) == min(costs[2:])


def keys_of(state: XLState) -> KeyValueCache:
    assert isinstance(state.memory, KeyValueCache)
    return state.memory


def write(state: XLState, keys: Tensor, values: Tensor) -> XLState:
    """The state before it counts these keys and values, which were written."""
    (step,), memory = keys_of(state).prepare(keys.shape[2], keep=state.attending.memory_len)
    step.write(keys, values)
    return replace(state, memory=memory)


def test_appending_copies_a_position_a_constant_number_of_times() -> None:
    """Also while the memory grows without bound: doubling, not one more each time."""
    state = XLState(KeyValueCache.empty(1, 1, 1, torch.zeros(1)), Attending(memory_len=10**9))
    with Count() as count:
        for _ in range(1000):
            state = write(state, torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)).after(1, None)
    assert state.columns == 1000
    assert count.numbers < 60 * 1000


def test_keys_of_unlike_lanes_are_aligned_and_roll() -> None:
    state = XLState(KeyValueCache.empty(2, 1, 2, torch.zeros(1)), Attending(memory_len=3))
    for first, lengths in ((0, [2, 1]), (10, [0, 2]), (20, [1, 0]), (30, [2, 2])):
        new = numbered(2, first, 2)[:, None]
        state = write(state, new, -new).after(2, torch.tensor(lengths))
    assert state.lengths.tolist() == [3, 3]
    memory = keys_of(state)
    keys, values = memory.filled()
    assert keys[:, 0, :, 0].tolist() == [[20, 30, 31], [11, 30, 31]]
    assert torch.equal(values, -keys)


@pytest.mark.parametrize("same_length", [False, True])
def test_a_memory_of_zeros_is_the_same_in_both_forms_and_after_a_reset(same_length: bool) -> None:
    config = TransformerXLConfig(
        vocab_size=11, d_model=8, num_heads=2, d_ff=16, num_layers=2, memory_len=6, initial_memory="zeros",
        same_length=same_length, same_length_extra_key=same_length,
    )  # fmt: skip
    torch.manual_seed(1)
    body = build_model(config).eval().body
    first, second = torch.randint(11, (2, 3, 4)).unbind()
    with torch.no_grad():
        found = {}
        for projected in (True, False):
            state = body.start(3, projected=projected)
            assert state.valid() is None
            hidden, state = body(first, None, state)
            state = state.reset(torch.tensor([False, True, False]))
            found[projected] = torch.cat([hidden, body(second, None, state)[0]], dim=1)
        torch.testing.assert_close(found[True], found[False])
        torch.testing.assert_close(found[True][1, 4:], body(second, None, body.start(3))[0][1])
        nothing = body.start(3, replace(config.attending, initial_memory="empty"))
        assert not torch.allclose(body(first, None, nothing)[0], found[True][:, :4])


def test_the_extra_key_is_one_more() -> None:
    attending = Attending(memory_len=5, same_length=True)
    assert (attending.window, replace(attending, same_length_extra_key=True).window) == (4, 5)


@pytest.mark.parametrize("other", [{"norm_position": "pre"}, {"attention": "absolute"}])
def test_a_memory_of_zeros_needs_projections_that_keep_zeros(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="initial_memory zeros needs norm_position post and attention relative"):
        TransformerXLConfig(initial_memory="zeros", **other)


@pytest.mark.parametrize("attention", ["relative", "relative_learned", "absolute"])
def test_a_model_trained_with_ext_len_forgets_no_token_of_a_search(attention: Any) -> None:
    """A search gives each token once; in training the end of a segment would come again."""
    torch.manual_seed(0)
    config = TransformerXLConfig(
        vocab_size=20, d_model=16, num_heads=2, d_ff=16, num_layers=2, memory_len=40, ext_len=4, attention=attention
    )
    plain, extended = (build_model(replace(config, ext_len=ext_len)).eval() for ext_len in (0, 4))
    extended.load_state_dict(plain.state_dict())
    tokens = torch.randint(20, (2, 12))
    with torch.no_grad():
        found = []
        for model in (plain, extended):
            state = model.start(2)
            for token in tokens.split(1, dim=1):
                log_probs, state = model.step(token, state)
            found.append(log_probs)
    assert torch.equal(*found)
