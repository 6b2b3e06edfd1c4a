"""Modules that somebody has changed from outside: hooks, adapters, pruning, parametrisations, quantised weights.

A child of a module is called, not read, wherever a call may mean something else.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.flop_counter import FlopCounterMode

from manyheads.nn import Causal, KeyValueCache, MultiHeadAttention, TorchMultiheadAttention
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.relative import LearnedRelativeAttention, RelativeAttention
from manyheads.nn.attention.settings import LSHSettings
from manyheads.nn.kernels.modes import fast
from manyheads.nn.layers import FeedForward, Linear


@pytest.fixture(params=["plain", "fast"], autouse=True)
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """What is true outside of `fast()` and within it."""
    with fast(request.param == "fast"):
        yield request.param


WIDTH = 8
Call = Callable[[nn.Module, Tensor], Tensor]


def across(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = module(x, x.flip(1))[0]
    return out


def stepwise(module: nn.Module, x: Tensor) -> Tensor:
    state = KeyValueCache.empty(rows=len(x), num_heads=2, head_dim=4, like=x)
    out: Tensor = module(x, mask=Causal(), state=state)[0]
    return out


def alone(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = module(x)
    return out


MODULES: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "self-attention": (lambda: MultiHeadAttention(WIDTH, 2), lambda module, x: module(x, mask=Causal())[0]),
    "attention to others": (lambda: MultiHeadAttention(WIDTH, 2), across),
    "attention with a state": (lambda: MultiHeadAttention(WIDTH, 2), stepwise),
    "without biases": (lambda: MultiHeadAttention(WIDTH, 2, bias=False), lambda module, x: module(x)[0]),
    "torch's interface": (
        lambda: TorchMultiheadAttention(WIDTH, 2, batch_first=True),
        lambda module, x: module(x, x, x, need_weights=False)[0],
    ),
    "relative": (lambda: RelativeAttention(WIDTH, 2), alone),
    "relative with memory": (lambda: RelativeAttention(WIDTH, 2), lambda module, x: module(x, x.flip(1))),
    "learned distances": (lambda: LearnedRelativeAttention(WIDTH, 2, max_len=64), alone),
    "hashed": (
        lambda: LSHSelfAttention(WIDTH, 2, settings=LSHSettings(num_hashes=2, chunk_len=4), max_len=64),
        lambda module, x: module(x, seed=3),
    ),
    "local": (lambda: LocalSelfAttention(WIDTH, 2, chunk_len=4), alone),
    "feed-forward": (lambda: FeedForward(WIDTH, 16), alone),
}
ROWS = pytest.mark.parametrize("rows", [1, 40])
EACH = pytest.mark.parametrize(("make", "call"), MODULES.values(), ids=MODULES)


def maps_of(module: nn.Module) -> dict[str, nn.Linear]:
    found = {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)}
    assert found
    return found


def inputs(rows: int) -> Tensor:
    return torch.randn(rows, 8, WIDTH, generator=torch.Generator().manual_seed(rows))


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], object]] = {
    "before": lambda child, hook: child.register_forward_pre_hook(hook),
    "after": lambda child, hook: child.register_forward_hook(hook),
    "before backward": lambda child, hook: child.register_full_backward_pre_hook(hook),
    "after backward": lambda child, hook: child.register_full_backward_hook(hook),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of the map of positions, which have no gradient
@pytest.mark.thinned(2)
@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
@ROWS
@EACH
def test_hooks_of_every_child_are_called(make, call, rows, register):
    module, hits = make(), []  # type: ignore[var-annotated]
    for name, child in maps_of(module).items():
        register(child, lambda *_, name=name: hits.append(name))
    call(module, inputs(rows).requires_grad_()).sum().backward()
    assert sorted(hits) == sorted(maps_of(module))


@ROWS
@EACH
def test_hooks_of_all_modules_are_called(make: Callable[[], nn.Module], call: Call, rows: int) -> None:
    module, hits = make(), []  # type: ignore[var-annotated]
    handle = nn.modules.module.register_module_forward_hook(lambda child, *_: hits.append(child))
    try:
        call(module, inputs(rows))
    finally:
        handle.remove()
    assert {id(child) for child in maps_of(module).values()} <= {id(child) for child in hits}


@ROWS
@EACH
def test_a_changed_child_changes_the_result(make: Callable[[], nn.Module], call: Call, rows: int) -> None:
    """Each child in turn gets another class, another `forward`, or a wrapper around it that still has a weight."""
    torch.manual_seed(0)
    module, x = make(), inputs(rows)
    expected = call(module, x)
    for name, child in maps_of(module).items():
        owner, _, place = name.rpartition(".")
        parent = module.get_submodule(owner)
        changed = copy.deepcopy(child)
        changed.__class__ = type("Doubled", (type(child),), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})
        setattr(parent, place, changed)
        by_class = call(module, x)
        setattr(parent, place, child)
        child.forward = lambda x, child=child: 2 * nn.Linear.forward(child, x)  # type: ignore[method-assign,misc]
        by_forward = call(module, x)
        del child.forward
        setattr(parent, place, Wrapped(child))
        by_wrapper = call(module, x)
        setattr(parent, place, child)
        assert not torch.allclose(by_class, expected), name
        torch.testing.assert_close(by_forward, by_class)
        torch.testing.assert_close(by_wrapper, by_class)
    torch.testing.assert_close(call(module, x), expected)


class Wrapped(nn.Module):
    """Like an adapter of PEFT: it offers the weight and the widths of the layer in it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor:
        return self.base_layer.bias

    @property
    def in_features(self) -> int:
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        return self.base_layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        return 2 * nn.functional.linear(x, self.weight, self.bias)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "prune": lambda child: prune.random_unstructured(child, "weight", 0.5),
    "weight_norm": lambda child: parametrizations.weight_norm(child),
    "old weight_norm": lambda child: torch.nn.utils.weight_norm(child),
    "spectral_norm": lambda child: parametrizations.spectral_norm(child),
    "a parametrisation": lambda child: parametrize.register_parametrization(child, "weight", Halved()),
}


@pytest.mark.thinned(2)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@ROWS
@EACH
def test_changed_weights_are_trained(make, call, rows, change):
    torch.manual_seed(0)
    module, x = make(), inputs(rows)
    for child in maps_of(module).values():
        change(child)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):  # the second step fails where an old weight is kept
        optimiser.zero_grad()
        call(module, x).square().mean().backward()
        for child in maps_of(module).values():
            assert any(one.grad is not None and one.grad.any() for one in child.parameters())
        optimiser.step()


def test_flops_are_counted_by_module() -> None:
    module = MultiHeadAttention(WIDTH, 2)
    with FlopCounterMode(display=False) as counter:
        module(inputs(40))
    counted = counter.get_flop_counts()
    flops = 2 * 40 * 8 * WIDTH * WIDTH
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        assert sum(counted[f"MultiHeadAttention.{name}"].values()) == flops, name


@ROWS
def test_weights_that_torchao_quantises(rows: int) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torch.manual_seed(0)
    module, x = MultiHeadAttention(32, 2).eval(), torch.randn(rows, 8, 32)
    with torch.no_grad():
        expected = module(x)[0]
        quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
        found = module(x)[0]
    assert type(module.q_proj.weight) is not nn.Parameter
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)


@ROWS
def test_hooks_of_accelerate_are_called(rows: int) -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    seen = []

    class Seen(hooks.ModelHook):  # type: ignore[misc,name-defined]
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            seen.append(module)
            return output

    module = MultiHeadAttention(WIDTH, 2)
    for child in maps_of(module).values():
        hooks.add_hook_to_module(child, Seen())
    module(inputs(rows))
    assert seen == [module.q_proj, module.k_proj, module.v_proj, module.out_proj]


def test_a_plain_child_is_read() -> None:
    """The condition holds for what it is meant for; otherwise the joined product would never be used."""
    from manyheads.nn.kernels.linear import is_readable

    assert is_readable(Linear(2, 3))
    assert is_readable(Linear(2, 3, bias=False))
    assert is_readable(nn.Linear(2, 3))
