"""Reversible layers: the gradients of plain backpropagation, whatever has to be replayed."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyheads.nn.chunking import chunk_slices, in_chunks
from manyheads.nn.kernels.reversible import recomputed, through_sublayers
from manyheads.nn.layers import Dropout, FeedForward


class Mixing(nn.Module):
    """Mixes positions, drops out, adds what is shared; decides by its input's sign, as hashing does, and keeps that."""

    chunk_len = 0

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.norm, self.map, self.dropout = nn.LayerNorm(width), nn.Linear(width, width), Dropout(rate)
        self.unused = nn.Parameter(torch.ones(2))
        self.calls = 0

    def forward(
        self, x: Tensor, context: Any, shared: tuple[Tensor, ...], kept: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        self.calls += 1
        signs = x > 0.3 if kept is None else kept[0]
        out = self.dropout(self.map(self.norm(x))).cumsum(dim=1) * context + torch.where(signs, x, -x)
        for one in shared:
            out = out + one.mean(dim=1, keepdim=True)
        return out, (signs,)


class Alike(nn.Module):
    """Treats positions alike, in chunks."""

    def __init__(self, width: int, rate: float, chunk_len: int) -> None:
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(width, 9), nn.Linear(9, width), Dropout(rate)
        self.chunk_len = chunk_len

    def forward(
        self, x: Tensor, context: Any, shared: tuple[Tensor, ...], kept: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.dropout(self.outer(torch.tanh(self.inner(x)))), ()


class ReversibleSequence(nn.Module):
    """Sublayers with the choice between the two ways back."""

    def __init__(self, sublayers: list[nn.Module], *, reversible: bool) -> None:
        super().__init__()
        self.sublayers, self.reversible = nn.ModuleList(sublayers), reversible

    def forward(self, x1: Tensor, x2: Tensor, context: Any, shared: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        return through_sublayers(self.sublayers, x1, x2, context, shared, reversible=self.reversible)


def build(depth: int = 3, rate: float = 0.3, chunk_len: int = 0, *, reversible: bool = True) -> ReversibleSequence:
    torch.manual_seed(3)
    sublayers = [Mixing(6, rate) if i % 2 == 0 else Alike(6, rate, chunk_len) for i in range(2 * depth)]
    return ReversibleSequence(sublayers, reversible=reversible)


def gradients(model: ReversibleSequence, inputs: list[Tensor], *, low: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Of a scalar of both streams; and the scalar."""
    x1, x2, shared = (one.detach().clone().requires_grad_() for one in inputs)
    torch.manual_seed(11)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        a, b = model(x1, x2, 0.7, (shared,))
    scalar = (a * torch.linspace(-1, 1, 6)).sum() + (b * b).sum() / 7
    torch.manual_seed(12)  # the replay must not depend on where the generator stands now
    wanted = [x1, x2, shared, *model.parameters()]
    found = torch.autograd.grad(scalar, wanted, allow_unused=True)
    return scalar.detach(), [torch.zeros_like(w) if g is None else g for g, w in zip(found, wanted, strict=True)]


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(5)
    return [torch.randn(2, 7, 6, dtype=dtype), torch.randn(2, 7, 6, dtype=dtype), torch.randn(2, 4, 6, dtype=dtype)]


@pytest.mark.parametrize("chunk_len", [0, 1, 3, 7, 20])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_those_of_plain_backpropagation(chunk_len: int, training: bool) -> None:
    """In float64, with dropout, kept decisions and shared tensors; in evaluation mode too."""
    model = build(chunk_len=chunk_len).double().train(training)
    plain = copy.deepcopy(model)
    plain.reversible = False
    scalar, found = gradients(model, inputs())
    wanted_scalar, wanted = gradients(plain, inputs())
    torch.testing.assert_close(scalar, wanted_scalar, atol=1e-12, rtol=1e-12)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)
    assert plain.sublayers[0].calls == 1
    assert model.sublayers[0].calls == 2  # nothing was kept, so it was computed again


def test_gradcheck() -> None:
    """Against finite differences: neither path is taken on trust."""
    model = build(depth=1, rate=0.0, chunk_len=2).double()
    given = [one.requires_grad_() for one in inputs()]

    def function(x1: Tensor, x2: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = model(x1, x2, 0.7, (shared,))
        return found

    assert torch.autograd.gradcheck(function, given)


def test_under_autocast_the_replay_is_in_low_precision_and_weights_have_gradients() -> None:
    """Inside and outside of the autocast block, which may have a cache of weights that have no gradient."""
    model = build(chunk_len=3)
    plain = copy.deepcopy(model)
    plain.reversible = False
    scalar, found = gradients(model, inputs(torch.float32), low=True)
    wanted_scalar, wanted = gradients(plain, inputs(torch.float32), low=True)
    torch.testing.assert_close(scalar, wanted_scalar, atol=1e-4, rtol=1e-4)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=2e-2 * float(other.abs().max()) + 1e-6, rtol=0.0)
    x1, x2, shared = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        a, _ = model(x1, x2, 0.7, (shared,))
        a.sum().backward()
    assert float(model.sublayers[0].map.weight.grad.abs().sum()) > 0


def test_kept_decisions_are_those_of_the_forward_pass() -> None:
    """A stream that sits on a decision's edge comes back a rounding away; the decision must not."""
    model = build(depth=2, rate=0.0)
    x1, x2, shared = inputs(torch.float32)
    seen: list[Any] = []
    for sublayer in model.sublayers[::2]:
        sublayer.register_forward_hook(lambda module, given, out: seen.append((given[3], out[1][0])))
    a, b = model(x1.requires_grad_(), x2, 0.7, (shared,))
    (a.sum() + b.sum()).backward()
    (none_1, first), (none_2, second), (second_given, _), (first_given, _) = seen
    assert none_1 is None
    assert none_2 is None
    assert second_given[0] is second
    assert first_given[0] is first


def test_hooks_on_parameters_run_once() -> None:
    """As DistributedDataParallel's must."""
    model, runs = build(depth=2, chunk_len=2), Counter[str]()

    def counted(name: str) -> Any:
        return lambda _: runs.update([name])

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(counted(name))
    a, b = model(*inputs(torch.float32)[:2], 1.0)
    (a.sum() + b.sum()).backward()
    assert set(runs.values()) == {1}
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} <= runs.keys()


def test_backward_twice_and_streams_left_alone() -> None:
    """A kept graph can be gone through again; what the caller holds is not overwritten by the restoring."""
    model = build()
    x1, x2, shared = (one.requires_grad_() for one in inputs(torch.float32))
    torch.manual_seed(1)
    a, b = model(x1, x2, 0.7, (shared,))
    before = a.detach().clone(), b.detach().clone(), x1.detach().clone(), x2.detach().clone()
    first = torch.autograd.grad(a.sum() + b.sum(), [x1, x2, shared], retain_graph=True)
    second = torch.autograd.grad(a.sum() + b.sum(), [x1, x2, shared])
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(before, (a, b, x1, x2), strict=True))


@pytest.mark.parametrize("is_reversible", [False, True])
def test_weights_that_change_before_the_backward_pass_are_an_error(is_reversible: bool) -> None:
    model = build(reversible=is_reversible).double()
    x1, x2, *_ = inputs()
    one, two = model(x1, x2, 0.5)
    with torch.no_grad():
        model.sublayers[1].outer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (one.sum() + two.sum()).backward()


@pytest.mark.parametrize("restores", [True, False])
def test_a_mode_that_changes_before_the_backward_pass(restores: bool) -> None:
    """As when a model is validated in between: the gradients are those of the forward pass, as of autograd."""
    model, found = build(chunk_len=3, reversible=restores).double(), []
    for changes in (False, True):
        x1, x2, shared = (one.requires_grad_() for one in inputs())
        torch.manual_seed(1)
        a, b = model.train()(x1, x2, 0.7, (shared,))
        model.sublayers[2:].train(not changes)  # and what is in another mode stays in it
        found.append(torch.autograd.grad((a * b).sum(), [x1, x2, shared, *model.parameters()], allow_unused=True))
        assert [one.dropout.training for one in model.sublayers] == [True] * 2 + [not changes] * 4
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)


def test_recomputation_in_a_mode_that_changes_before_the_backward_pass() -> None:
    module, found = nn.Sequential(nn.Linear(6, 6), Dropout(0.5)), []
    for changes in (False, True):
        x = torch.ones(2, 7, 6, requires_grad=True)
        torch.manual_seed(1)
        out = recomputed(module.train(), [x], [module], chunk_len=3)
        module.train(not changes)
        found.append(torch.autograd.grad(out.square().sum(), [x, *module.parameters()]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("low", [True, False])
def test_within_torchs_checkpoint(low: bool) -> None:
    """It computes the forward pass once more, and gives out what was saved once."""
    model, found = build(), []
    for saves in (True, False):
        x1, x2, shared = (one.requires_grad_() for one in inputs(torch.float32))
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            given = (x1, x2, 0.7, (shared,))
            a, b = model(*given) if saves else checkpoint(model, *given, use_reentrant=False)
        found.append(torch.autograd.grad((a * b).sum(), [x1, x2, shared]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("which", [0, 1])
def test_a_loss_of_one_stream_alone(which: int) -> None:
    model = build(rate=0.0).double()
    plain = copy.deepcopy(model)
    plain.reversible = False
    found = []
    for one in (model, plain):
        x1, x2, shared = (given.requires_grad_() for given in inputs())
        one(x1, x2, 0.7, (shared,))[which].square().sum().backward()
        found.append((x1.grad, x2.grad, shared.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)


def test_frozen_weights_and_inputs_without_gradients() -> None:
    model = build(rate=0.0)
    for parameter in model.sublayers[0].parameters():
        parameter.requires_grad_(False)
    a, _ = model(*inputs(torch.float32)[:2], 1.0)
    a.sum().backward()
    assert model.sublayers[0].map.weight.grad is None
    assert model.sublayers[1].inner.weight.grad is not None


def test_without_gradients_nothing_is_replayed() -> None:
    model = build(depth=1)
    with torch.no_grad():
        a, _ = model(*inputs(torch.float32)[:2], 1.0)
    assert not a.requires_grad
    assert model.sublayers[0].calls == 1


def test_the_generator_stands_where_plain_backpropagation_leaves_it() -> None:
    """A replay takes nothing from the caller's stream of random numbers."""
    after = []
    for reversible in (True, False):
        model = build(reversible=reversible, chunk_len=2)
        torch.manual_seed(2)
        a, b = model(*(one.requires_grad_() for one in inputs(torch.float32)[:2]), 1.0)
        torch.manual_seed(9)
        (a.sum() + b.sum()).backward()
        after.append(torch.rand(3))
    assert torch.equal(*after)


def test_memory_does_not_grow_with_depth() -> None:
    """Numbers that autograd keeps: the same for 2 and for 12 layers, but for small decisions."""

    def kept(depth: int, *, reversible: bool) -> int:
        model, sizes = build(depth, reversible=reversible), {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter):
                sizes[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            a, b = model(*(one.requires_grad_() for one in inputs(torch.float32)[:2]), 1.0)
        held = sum(sizes.values())
        del a, b
        return held

    assert kept(2, reversible=True) == kept(12, reversible=True)
    assert kept(12, reversible=False) > 3 * kept(2, reversible=False)


@pytest.mark.parametrize(("length", "chunk_len", "sizes"), [(5, 0, [5]), (5, 2, [2, 2, 1]), (0, 2, [0]), (4, 9, [4])])
def test_chunks_cover_the_length(length: int, chunk_len: int, sizes: list[int]) -> None:
    parts = list(chunk_slices(length, chunk_len))
    assert [part.stop - part.start for part in parts] == sizes
    assert parts[-1].stop == length


@pytest.mark.parametrize("chunk_len", [0, 1, 2, 5, 9])
def test_in_chunks(chunk_len: int) -> None:
    """The same numbers, and never more than chunk_len positions at once."""
    seen: list[int] = []
    linear = nn.Linear(3, 4)

    def function(x: Tensor) -> Tensor:
        seen.append(x.shape[1])
        return linear(x)  # type: ignore[no-any-return]

    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(in_chunks(function, x, chunk_len), linear(x))
    with torch.no_grad():
        torch.testing.assert_close(in_chunks(function, x, chunk_len), linear(x))
    assert max(seen) <= (chunk_len or 5)
    assert in_chunks(function, x[:, :0], chunk_len).shape == (2, 0, 4)


def test_feed_forward_in_chunks() -> None:
    whole, parts = FeedForward(6, 9), FeedForward(6, 9, chunk_len=2)
    parts.load_state_dict(whole.state_dict())
    x = torch.randn(2, 5, 6)
    torch.testing.assert_close(parts(x), whole(x))
