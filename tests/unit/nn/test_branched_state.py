"""The cache of hypotheses that branch, beside one that copies every row."""

from __future__ import annotations

from contextlib import nullcontext

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.nn import Causal, MultiHeadAttention, observe
from manyheads.nn.attention.branches import BranchedKeyValueState
from manyheads.nn.attention.state import KeyValueState

H, D = 2, 4


def chunk(rows: int, new_len: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, H, new_len, D), torch.randn(rows, H, new_len, D)


def begun(groups: int, length: int) -> tuple[KeyValueState, BranchedKeyValueState]:
    plain = KeyValueState.empty(groups, H, D, like=torch.zeros(1)).append(*chunk(groups, length))
    return plain, BranchedKeyValueState.of(plain.clone())


def choose(generator: torch.Generator, groups: int, branches: int, after: int) -> Tensor:
    """Rows that live on: of some groups, any of the branches."""
    kept = torch.randperm(groups, generator=generator)[: max(1, groups - int(torch.rand(1, generator=generator) < 0.2))]
    parents = torch.randint(branches, (len(kept), after), generator=generator)
    return kept.sort().values[:, None] * branches + parents


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**31))
def test_each_row_has_its_own_past(groups: int, length: int, seed: int) -> None:
    """Appended, chosen from, grown: after each step every row reads what a cache of rows would."""
    generator = torch.Generator().manual_seed(seed)
    plain, branched = begun(groups, length)
    branches = 1
    for step in range(40):
        after = branches if step else 4
        if int(torch.rand(1, generator=generator) < 0.1):
            after = 1 + int(torch.randint(5, (1,), generator=generator))
        rows = choose(generator, groups, branches, after)
        groups, branches = rows.shape
        plain, branched = plain.reorder(rows.flatten()), branched.reorder(rows)
        new = chunk(groups * branches, 1 + (step % 7 == 3))
        plain, branched = plain.append(*new), branched.append(*new)
        assert branched.rows == groups * branches
        assert int(branched.length) == int(plain.length)
        for mine, theirs in zip(branched.filled(), plain.filled(), strict=True):
            assert torch.equal(mine, theirs)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**31))
def test_planned_steps_hold_the_keys_of_separate_rows(groups: int, length: int, seed: int) -> None:
    """Two layers that share a table of branches, beside a cache in which each row has its own keys."""
    generator = torch.Generator().manual_seed(seed)
    plain, first = begun(groups, length)
    second = BranchedKeyValueState(first.key.clone(), first.value.clone(), first.branches)
    branches = 1
    for _ in range(30):
        rows = choose(generator, groups, branches, 1 + int(torch.randint(4, (1,), generator=generator)))
        groups, branches = rows.shape
        plain, first, second = plain.reorder(rows.flatten()), first.reorder(rows), second.reorder(rows)
        new = chunk(groups * branches, 1)
        plain = plain.append(*new)
        planned, first = first.plan(1)
        other, second = second.plan(1, planned.slots)
        assert first.branches is second.branches
        assert planned.slots.end < planned.key.shape[2]
        for one in (planned, other):
            shared = one.write(*new).shared()
            assert shared is not None
            assert torch.equal(shared[2], first.branches.seen[:, None, :, : int(first.branches.slots)])
            for found, wanted in zip(one.filled(), plain.filled(), strict=True):
                assert torch.equal(found, wanted)


def test_what_nobody_sees_is_dropped() -> None:
    """If one hypothesis wins every time, a group keeps little more than one row's keys."""
    _, state = begun(3, 1)
    state = state.reorder(torch.arange(3)[:, None].expand(-1, 4))
    for _ in range(200):
        state = state.append(*chunk(12, 1)).reorder((torch.arange(3) * 4)[:, None].expand(-1, 4))
    assert int(state.length) == 201
    assert state.key.shape[2] <= 600  # and not 800


@pytest.mark.parametrize("new_len", [1, 3])
@pytest.mark.parametrize("openly", [False, True])
def test_attention_is_the_same(new_len: int, openly: bool) -> None:
    """For a group in one product or row by row, for any number of new tokens; the weights are those of each row."""
    torch.manual_seed(0)
    attention = MultiHeadAttention(H * D, H).eval()
    plain, branched = begun(3, 5)
    rows = torch.tensor([[0, 0, 0], [2, 2, 2]])
    plain, branched = plain.reorder(rows.flatten()), branched.reorder(rows)
    for _ in range(6):
        x = torch.randn(6, new_len, H * D)
        mask = Causal() if new_len > 1 else None
        planned, branched = branched.plan(new_len)
        with observe(attention) if openly else nullcontext({}) as weights:
            expected, plain = attention(x, mask=mask, state=plain)
            found = attention.step(x, planned, mask)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
        if openly:
            torch.testing.assert_close(*weights[""], atol=1e-6, rtol=1e-5)
        rows = torch.tensor([[1, 0, 1], [5, 4, 3]])
        plain, branched = plain.reorder(rows.flatten()), branched.reorder(rows)


def test_a_clone_shares_nothing_and_it_is_a_pytree() -> None:
    _, state = begun(2, 3)
    branch = state.clone()
    before = branch.filled()[0].clone()
    state.append(*chunk(2, 1)).key.zero_()
    assert torch.equal(branch.filled()[0], before)
    leaves, spec = pytree.tree_flatten(branch)
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, BranchedKeyValueState)
    assert torch.equal(again.filled()[0], before)


def test_layers_share_one_table_of_branches() -> None:
    """What the first of them works out serves the others, and each has its own keys; also where buffers grow."""
    plain, first = begun(2, 3)
    other_plain = KeyValueState.empty(2, H, D, like=torch.zeros(1)).append(*chunk(2, 3))
    layers = [first, BranchedKeyValueState.of(other_plain.clone(), first.branches)]
    caches = [plain, other_plain]
    generator = torch.Generator().manual_seed(0)
    branches = 1
    for _ in range(40):
        rows = choose(generator, caches[0].rows // branches, branches, 4)
        branches = 4
        caches = [cache.reorder(rows.flatten()).append(*chunk(rows.numel(), 1)) for cache in caches]
        layers = [layer.reorder(rows) for layer in layers]
        layers = [
            layer.append(cache.filled()[0][:, :, -1:], cache.filled()[1][:, :, -1:])
            for layer, cache in zip(layers, caches, strict=True)
        ]
        assert layers[0].branches is layers[1].branches
        for layer, cache in zip(layers, caches, strict=True):
            for mine, theirs in zip(layer.filled(), cache.filled(), strict=True):
                assert torch.equal(mine, theirs)


def test_a_table_answers_what_it_is_asked() -> None:
    """What it worked out before is for the same rows only."""
    _, state = begun(2, 3)
    one, other = torch.tensor([[0, 0], [1, 1]]), torch.tensor([[1, 1, 1]])
    assert state.reorder(one).rows == 4
    assert state.reorder(other).rows == 3
    assert torch.equal(state.reorder(other).filled()[0], state.filled()[0][1:].expand(3, -1, -1, -1))
