"""The cache of keys and values as a value: rows of equal and of different lengths, and hypotheses that share slots."""

from contextlib import nullcontext
from copy import deepcopy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from naive_attention import naive_dot_product_attention
from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.nn import Causal, MultiHeadAttention, fast, merge_heads, observe
from manyheads.nn.attention.cache import KeyValueCache

R, H, D = 3, 2, 4


def chunk(new_len: int, rows: int = R) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, H, new_len, D), torch.randn(rows, H, new_len, D)


def empty(rows: int = R) -> KeyValueCache:
    return KeyValueCache.empty(rows, H, D, like=torch.zeros(1))


def real(cache: KeyValueCache, row: int) -> tuple[Tensor, Tensor]:
    """The keys and values of one row, without what it lacks."""
    count = min(int(cache.row_lengths()[row]), cache.columns)
    keys, values = cache.filled()
    return keys[row, :, cache.columns - count :], values[row, :, cache.columns - count :]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_appending_is_concatenating(new_lens: list[int]) -> None:
    cache, keys, values = empty(), [], []
    for new_len in new_lens:
        key, value = chunk(new_len)
        keys.append(key)
        values.append(value)
        cache = cache.append(key, value)
    key, value = cache.filled()
    assert torch.equal(key, torch.cat(keys, dim=2))
    assert torch.equal(value, torch.cat(values, dim=2))
    assert int(cache.length) == sum(new_lens)
    assert cache.length.device.type == "cpu"
    assert cache.valid() is None


def test_growth_is_by_doubling() -> None:
    """A hundred steps copy the whole a handful of times, not a hundred."""
    cache, capacities = empty(), set()
    for _ in range(100):
        cache = cache.append(*chunk(1))
        capacities.add(cache.keys[0].shape[2])
    assert max(capacities) <= 200
    assert len(capacities) <= 5


def test_a_window_takes_no_more_space_than_it_needs() -> None:
    """Of a thousand positions the last 20 are kept, in buffers that stop growing; values may have another width."""
    cache, seen = KeyValueCache.empty(2, 1, 3, torch.zeros(1), value_dim=5), []
    for _ in range(500):
        key, value = torch.randn(2, 1, 2, 3), torch.randn(2, 1, 2, 5)
        seen.append((key, value))
        (step,), cache = cache.prepare(2, keep=20)
        step.write(key, value)
        cache = cache.after(2, keep=20)
    assert cache.columns == 20
    assert int(cache.length) == 1000
    assert cache.keys[0].shape[2] <= 50
    for mine, parts in zip(cache.filled(), zip(*seen, strict=True), strict=True):
        assert torch.equal(mine, torch.cat(parts, dim=2)[:, :, -20:])


def test_layers_have_the_same_slots() -> None:
    """With heads and widths of their own; one without heads."""
    like = torch.zeros(1)
    cache = KeyValueCache.of_layers([KeyValueCache.empty(2, *sizes, like) for sizes in ((2, 4), (0, 4), (1, 8))])
    new = [(torch.randn(2, heads, 3, width),) * 2 for heads, width in ((2, 4), (0, 4), (1, 8))]
    for _ in range(9):
        steps, cache = cache.prepare(3)
        for step, pair in zip(steps, new, strict=True):
            step.write(*pair)
        cache = cache.after(3).reorder(torch.tensor([[0, 0], [1, 1]])[:, :1], together=True)
    for layer, (key, value) in enumerate(new):
        for mine, theirs in zip(cache.filled(layer), (key, value), strict=True):
            assert torch.equal(mine, theirs.repeat(1, 1, 9, 1))


def test_reorder_takes_rows_in_the_order_given() -> None:
    cache = empty().append(*chunk(5))
    key, value = (x.clone() for x in cache.filled())
    rows = torch.tensor([2, 0, 2, 1])
    after = cache.reorder(rows)
    assert torch.equal(after.filled()[0], key[rows])
    assert torch.equal(after.filled()[1], value[rows])
    new = chunk(1, rows=4)
    grown = after.append(*new)
    assert torch.equal(grown.filled()[0], torch.cat([key[rows], new[0]], dim=2))
    assert torch.equal(cache.filled()[0], key)  # the old one was only read


def test_a_clone_shares_nothing() -> None:
    cache = empty().append(*chunk(3))
    branch = cache.clone()
    kept = branch.filled()[0].clone()
    copied = deepcopy(branch)
    cache.append(*chunk(1))
    cache.keys[0].zero_()
    assert torch.equal(branch.filled()[0], kept)
    assert int(branch.length) == 3
    one, other = chunk(1), chunk(1)
    left, right = branch.clone().append(*one), branch.append(*other)
    assert torch.equal(left.filled()[0][:, :, 3:], one[0])
    assert torch.equal(right.filled()[0][:, :, 3:], other[0])
    assert torch.equal(copied.append(*one).filled()[0], left.filled()[0])


@pytest.mark.parametrize("lengths", [None, torch.tensor([2, 0, 1])])
def test_it_is_a_pytree(lengths: Tensor | None) -> None:
    """Its leaves are tensors; what is None is no leaf."""
    cache = empty().append(*chunk(2), lengths=lengths)
    leaves, spec = pytree.tree_flatten(cache)
    assert len(leaves) == 5 + (lengths is not None)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, KeyValueCache)
    assert torch.equal(again.filled()[0], cache.filled()[0])
    assert again.row_lengths().tolist() == cache.row_lengths().tolist()


def test_a_change_of_type_is_followed() -> None:
    """A cache begun in float32 and continued under autocast takes the new type, and keeps what it had."""
    key, value = chunk(2)
    cache = empty().append(key, value).append(*(x.bfloat16() for x in chunk(1)))
    assert cache.keys[0].dtype == torch.bfloat16
    torch.testing.assert_close(cache.filled()[0][:, :, :2].float(), key, atol=0.02, rtol=0.01)
    assert int(cache.length) == 3
    assert value.dtype == torch.float32


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 3))
def test_steps_show_all_keys(steps: int, new_len: int) -> None:
    """In their order; and no view is ever the whole buffer, and no slot 0 or 1."""
    cache, chunks = empty(), []
    for _ in range(steps):
        chunks.append(chunk(new_len))
        (step,), cache = cache.prepare(new_len)
        assert step.length == int(cache.length)
        assert 1 < step.slots.first <= step.slots.start < step.slots.end < step.key.shape[2] - 1
        expected = [torch.cat(parts, dim=2) for parts in zip(*chunks, strict=True)]
        filled = step.write(*chunks[-1]).filled()
        cache = cache.after(new_len)
        for found in (filled, cache.filled()):
            for mine, theirs in zip(found, expected, strict=True):
                assert torch.equal(mine, theirs)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([None, 7]))
def test_rows_of_different_lengths_beside_lists(seed: int, keep: int | None) -> None:
    """Appended with padding, cut, emptied and reordered: every row has the keys that a list of its own would have."""
    generator = torch.Generator().manual_seed(seed)

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    cache, lists = empty(), [(torch.empty(H, 0, D), torch.empty(H, 0, D)) for _ in range(R)]
    for _ in range(12):
        count = len(lists)
        match number(6):
            case 0:
                rows = torch.randint(count, (1 + number(4),), generator=generator)
                cache, lists = cache.reorder(rows), [lists[row] for row in rows]
            case 1 if keep is None:
                lengths = torch.randint(9, (count,), generator=generator)
                wanted = int(lengths[0]) if number(2) else lengths
                cache = cache.truncate(wanted)
                ends = [wanted] * count if isinstance(wanted, int) else wanted.tolist()
                lists = [(key[:, :end], value[:, :end]) for (key, value), end in zip(lists, ends, strict=True)]
            case 2:
                marks = torch.rand(count, generator=generator) < 0.3
                cache = cache.reset(marks)
                lists = [
                    (key[:, :0], value[:, :0]) if mark else (key, value)
                    for (key, value), mark in zip(lists, marks, strict=True)
                ]
            case _:
                new_len = 1 + number(5)
                lengths = torch.randint(new_len + 1, (count,), generator=generator) if number(2) else None
                new = chunk(new_len, rows=count)
                (step,), cache = cache.prepare(new_len, keep=keep)
                step.write(*new)
                cache = cache.after(new_len, lengths, keep)
                ends = [new_len] * count if lengths is None else lengths.tolist()
                lists = [
                    (torch.cat([key, new[0][row, :, :end]], 1), torch.cat([value, new[1][row, :, :end]], 1))
                    for row, ((key, value), end) in enumerate(zip(lists, ends, strict=True))
                ]
        assert cache.row_lengths().tolist() == [key.shape[1] for key, _ in lists]
        assert int(cache.length) >= max(key.shape[1] for key, _ in lists)
        valid = cache.valid()
        for row, pair in enumerate(lists):
            for mine, theirs in zip(real(cache, row), pair, strict=True):
                theirs = theirs if keep is None else theirs[:, max(0, theirs.shape[1] - keep) :]
                assert torch.equal(mine, theirs)
            if valid is not None:
                assert int(valid[row].sum()) == min(len(pair[0][0]), cache.columns)


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tokens_one_by_one_are_full_attention_of_each_row(dtype: torch.dtype, is_fast: bool) -> None:
    """Prompts of 5, 1 and 3 tokens, then tokens one by one, one guess that is taken back, then several at once."""
    torch.manual_seed(0)
    module = MultiHeadAttention(H * D, H).eval().to(dtype)
    x = torch.randn(R, 12, H * D, dtype=dtype)
    lengths = torch.tensor([5, 1, 3])

    def whole(row: int, count: int) -> Tensor:
        """One row alone, by the formula, without a cache."""
        seen = x[row : row + 1, :count]
        attended = naive_dot_product_attention(
            module.project_query(seen), *module.project_memory(seen), torch.ones(count, count, dtype=torch.bool).tril()
        )
        return module.out_proj(merge_heads(attended.to(dtype)))[0]  # type: ignore[no-any-return]

    def step(tokens: Tensor, cache: KeyValueCache) -> tuple[Tensor, KeyValueCache]:
        (layer,), cache = cache.prepare(tokens.shape[1])
        return module.step(tokens, layer, Causal() if tokens.shape[1] > 1 else None), cache

    def of_rows(first: Tensor, count: int) -> Tensor:
        return torch.stack([x[row, start : start + count] for row, start in enumerate(first.tolist())])

    accuracy = {torch.bfloat16: {"atol": 0.02, "rtol": 0.02}}.get(dtype, {})
    with torch.no_grad(), fast() if is_fast else nullcontext():
        out, cache = step(x[:, :5], module.empty_cache(R, like=x))
        cache = cache.after(5, lengths)
        for row, count in enumerate(lengths.tolist()):
            torch.testing.assert_close(out[row, :count], whole(row, count), **accuracy)
        for number in range(4):
            if number == 2:  # a guess of three tokens, of which each row keeps another number
                _, guessed = step(torch.randn(R, 3, H * D, dtype=dtype), cache)
                cache = guessed.after(3).truncate(lengths)
            out, cache = step(of_rows(lengths, 1), cache)
            cache, lengths = cache.after(1), lengths + 1
            for row, count in enumerate(lengths.tolist()):
                torch.testing.assert_close(out[row], whole(row, count)[-1:], **accuracy)
        out, _ = step(of_rows(lengths, 3), cache)
        for row, count in enumerate(lengths.tolist()):
            torch.testing.assert_close(out[row], whole(row, count + 3)[-3:], **accuracy)
        again, after = module(of_rows(lengths, 3), mask=Causal(), state=cache)
        torch.testing.assert_close(again, out)
        assert after.row_lengths().tolist() == (lengths + 3).tolist()


def begun(groups: int, length: int) -> tuple[KeyValueCache, KeyValueCache]:
    """A cache, and one whose rows will share slots."""
    plain = empty(groups).append(*chunk(length, groups))
    return plain, plain.clone().reorder(torch.arange(groups)[:, None], together=True)


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
    plain, shared = begun(groups, length)
    branches = 1
    for number in range(40):
        after = branches if number else 4
        if int(torch.rand(1, generator=generator) < 0.1):
            after = 1 + int(torch.randint(5, (1,), generator=generator))
        rows = choose(generator, groups, branches, after)
        groups, branches = rows.shape
        plain, shared = plain.reorder(rows), shared.reorder(rows)
        new_len = 1 + (number % 7 == 3)
        new = chunk(new_len, groups * branches)
        plain = plain.append(*new)
        (step,), shared = shared.prepare(new_len)
        assert 1 < step.slots.first < step.slots.end < step.key.shape[2] - 1
        by_group = step.write(*new).shared()
        assert by_group[0].shape[0] == groups
        shared = shared.after(new_len)
        assert shared.rows == groups * branches
        assert int(shared.length) == int(plain.length) == step.length + new_len
        for found in (step.filled(), shared.filled()):
            for mine, theirs in zip(found, plain.filled(), strict=True):
                assert torch.equal(mine, theirs)


def test_what_nobody_sees_is_dropped() -> None:
    """If one hypothesis wins every time, a group keeps little more than one row's keys."""
    _, cache = begun(3, 1)
    cache = cache.reorder(torch.arange(3)[:, None].expand(-1, 4))
    for _ in range(200):
        cache = cache.append(*chunk(1, 12)).reorder((torch.arange(3) * 4)[:, None].expand(-1, 4))
    assert int(cache.length) == 201
    assert cache.keys[0].shape[2] <= 600  # and not 800


@pytest.mark.parametrize("new_len", [1, 3])
@pytest.mark.parametrize("openly", [False, True])
def test_attention_is_the_same(new_len: int, openly: bool) -> None:
    """For a group in one product or row by row, for any number of new tokens; the weights are those of each row."""
    torch.manual_seed(0)
    attention = MultiHeadAttention(H * D, H).eval()
    plain, shared = begun(3, 5)
    rows = torch.tensor([[0, 0, 0], [2, 2, 2]])
    plain, shared = plain.reorder(rows), shared.reorder(rows)
    for _ in range(6):
        x = torch.randn(6, new_len, H * D)
        mask = Causal() if new_len > 1 else None
        (step,), shared = shared.prepare(new_len)
        with observe(attention) if openly else nullcontext({}) as weights:
            expected, plain = attention(x, mask=mask, state=plain)
            found = attention.step(x, step, mask)
        shared = shared.after(new_len)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
        if openly:
            torch.testing.assert_close(*weights[""], atol=1e-6, rtol=1e-5)
        rows = torch.tensor([[1, 0, 1], [5, 4, 3]])
        plain, shared = plain.reorder(rows), shared.reorder(rows)


def test_rows_that_share_slots_can_be_copied() -> None:
    _, cache = begun(2, 3)
    branch = cache.clone()
    before = branch.filled()[0].clone()
    cache.append(*chunk(1, 2)).keys[0].zero_()
    assert torch.equal(branch.filled()[0], before)
    leaves, spec = pytree.tree_flatten(branch)
    again = pytree.tree_unflatten(leaves, spec)
    assert torch.equal(again.filled()[0], before)
    one, other = torch.tensor([[0, 0], [1, 1]]), torch.tensor([[1, 1, 1]])
    assert branch.reorder(one).rows == 4
    assert branch.reorder(other).rows == 3
    assert torch.equal(branch.reorder(other).filled()[0], before[1:].expand(3, -1, -1, -1))


def test_rows_of_different_lengths_never_share_slots() -> None:
    """They are copied; the outputs of a search are the same."""
    cache = empty().append(*chunk(4), lengths=torch.tensor([4, 1, 2]))
    rows = torch.tensor([[0, 0], [2, 2]])
    after = cache.reorder(rows, together=True)
    assert after.seen is None
    assert after.row_lengths().tolist() == [4, 4, 2, 2]
    assert torch.equal(after.filled()[0], cache.filled()[0][rows.flatten()])
