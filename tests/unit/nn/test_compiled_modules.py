"""The modules alone under torch.compile(fullgraph=True) and torch.export: the same numbers and gradients as eager.

Dynamo cannot trace the shape checks, hence `unhooked`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads.nn import (
    AdditiveAttention,
    AdditiveScore,
    Bias,
    Causal,
    Dense,
    DotProductAttention,
    FeedForward,
    KeyPadding,
    LearnedRelativeMultiHeadAttention,
    Lengths,
    LocalSelfAttention,
    LSHSelfAttention,
    LSHSettings,
    MultiHeadAttention,
    RelativeMultiHeadAttention,
    ReversibleSequence,
    TorchMultiheadAttention,
    Window,
)
from manyheads.nn.heads.linear import LinearHead

pytestmark = pytest.mark.unhooked
B, L, D, H = 2, 6, 12, 3
LENGTHS = torch.tensor([4, 0])  # the second row may attend to nothing
PADDING = torch.arange(L)[None] >= LENGTHS[:, None]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Doubled(MultiHeadAttention):
    """With scores of its own."""

    def get_scores(self, q: Tensor, k: Tensor) -> Tensor:
        return 2 * super().get_scores(q, k)


class Called(nn.Module):
    """A module and how it is called, with tensors alone."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.call(self.module, x, lengths)


def hashed(num_hashes: int) -> LSHSelfAttention:
    return LSHSelfAttention(D, H, settings=LSHSettings(num_hashes=num_hashes, chunk_len=2), max_len=16)


def layers(reversible: bool) -> ReversibleSequence:
    return ReversibleSequence([(MultiHeadAttention(D, H), FeedForward(D, 20))], reversible=reversible)


def stacked(module: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat(module(x, x.flip(1)), dim=-1) + lengths[0]


ROTATIONS = hashed(num_hashes=2).draw(3)
FIXED_BATCH = {"multi-head, no batch", "hashed, exact", "hashed, weights"}
"""Exported for the example's batch alone: one sequence, or how much is done at once follows from the batch."""


def cases() -> dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]]:
    def padded(m: Any, x: Tensor, lengths: Tensor) -> Any:
        return m(x, mask=Causal() & Lengths(lengths))[0]

    def with_weights(m: Any, x: Tensor, lengths: Tensor) -> Any:
        out, _, weights = m(x, x.flip(1), mask=Lengths(lengths) & Window(left=2, right=2), need_weights=True)
        return out, weights

    def added(m: Any, x: Tensor, lengths: Tensor) -> Any:
        return m(x, mask=Bias(x @ x.transpose(1, 2)) & KeyPadding(torch.arange(x.shape[1]) < lengths[:, None]))[0]

    def one_head(m: Any, x: Tensor, lengths: Tensor) -> Any:
        return m(x, x, x, mask=Lengths(lengths), need_weights=True)

    def like_torch(m: Any, x: Tensor, lengths: Tensor) -> Any:
        padding = torch.arange(x.shape[1]) >= lengths[:, None]
        weighted = m(x, x, x, key_padding_mask=padding, attn_mask=x[0] @ x[0].t())
        return *weighted, m(x, x, x, key_padding_mask=padding, need_weights=False, is_causal=True)[0]

    extra = {"batch_first": True, "add_bias_kv": True, "add_zero_attn": True}
    return {
        "multi-head": (lambda: MultiHeadAttention(D, H), padded),
        "multi-head, weights": (lambda: MultiHeadAttention(D, H), with_weights),
        "multi-head, bias": (lambda: MultiHeadAttention(D, H), added),
        "multi-head, no batch": (lambda: MultiHeadAttention(D, H), lambda m, x, n: m(x[0], mask=Causal())[0] + n[0]),
        "a score of its own": (lambda: MultiHeadAttention(D, H, score=AdditiveScore(H, D // H)), padded),
        "a subclass": (lambda: Doubled(D, H), padded),
        "relative": (lambda: RelativeMultiHeadAttention(D, H), lambda m, x, n: m(x, x, mask=None) + n[0]),
        "relative both ways": (
            lambda: LearnedRelativeMultiHeadAttention(D, H, max_len=4, num_future=2),
            lambda m, x, n: m(x, mask=Lengths(n), need_weights=True),
        ),
        "local": (lambda: LocalSelfAttention(D, H, chunk_len=2), lambda m, x, n: m(x, lengths=n, need_weights=True)),
        "hashed, exact": (lambda: hashed(num_hashes=0), lambda m, x, n: m(x, lengths=n)),
        "hashed, weights": (
            lambda: hashed(num_hashes=2),
            lambda m, x, n: m(x, lengths=n, rotations=ROTATIONS, need_weights=True),
        ),
        "reversible layers, plainly": (lambda: layers(reversible=False), lambda m, x, n: stacked(m, x, n)),
        "dot product": (DotProductAttention, one_head),
        "additive": (lambda: AdditiveAttention(D, D, 5), one_head),
        "torch's": (lambda: TorchMultiheadAttention(D, H, batch_first=True), like_torch),
        "torch's, extra keys": (lambda: TorchMultiheadAttention(D, H, **extra), like_torch),
    }


def flat(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def assert_same(one: Any, other: Any) -> None:
    assert len(flat(one)) == len(flat(other))
    for found, wanted in zip(flat(one), flat(other), strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", cases())
def test_compiled_whole(case: str) -> None:
    """In one graph, forward and backward."""
    build, call = cases()[case]
    module = Called(build(), call).eval()
    x = torch.randn(B, L, D, requires_grad=True)
    eager, compiled = module(x, LENGTHS), torch.compile(module, backend="aot_eager", fullgraph=True)(x, LENGTHS)
    assert_same(compiled, eager)
    leaves = [x, *module.parameters()]
    gradients = [
        torch.autograd.grad(sum(y.square().sum() for y in flat(found)), leaves, allow_unused=True)
        for found in (compiled, eager)
    ]
    for found, wanted in zip(*gradients, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", cases())
def test_exported(case: str) -> None:
    """A program for any batch; asked about other numbers than it was made with."""
    build, call = cases()[case]
    module = Called(build(), call).eval()
    example = (torch.randn(B + 1, L, D), torch.tensor([4, 0, 6]))
    shapes = ({0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC})
    program = torch.export.export(module, example, dynamic_shapes=None if case in FIXED_BATCH else shapes)
    x, lengths = torch.randn(B, L, D), LENGTHS
    if case in FIXED_BATCH:
        x, lengths = torch.randn(B + 1, L, D), torch.tensor([1, 2, 3])
    assert_same(program.module()(x, lengths), module(x, lengths))


@pytest.mark.parametrize(
    "mask",
    [
        Causal() & Lengths(LENGTHS),
        KeyPadding(~PADDING),
        Dense(torch.ones(L, L).tril()) & Bias(torch.randn(L, L)),
        Window(left=1, right=2),
    ],
    ids=lambda mask: type(mask).__name__,
)
def test_masks_are_inputs_of_a_program(mask: Any) -> None:
    """A description goes in as what it holds."""
    module = MultiHeadAttention(D, H).eval()
    x = torch.randn(B, L, D)
    program = torch.export.export(module, (x,), {"mask": mask})
    assert_same(program.module()(x, mask=mask)[0], module(x, mask=mask)[0])


def test_in_training_with_dropout() -> None:
    """One graph, too; other draws than eager, the same mean."""
    for module in (MultiHeadAttention(D, H, dropout=0.5), TorchMultiheadAttention(D, H, 0.5, batch_first=True)):
        compiled = torch.compile(
            Called(module, lambda m, x, n: m(x, x, x)[0] + n[0]), backend="aot_eager", fullgraph=True
        )
        x = torch.randn(1, L, D)
        out = compiled(x.expand(3000, L, D), LENGTHS)
        assert not torch.equal(out[0], out[1])
        wanted = module.eval()(x, x, x)[0] + LENGTHS[0]
        torch.testing.assert_close(out.mean(0), wanted[0], atol=0.1, rtol=0.1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", ["reversible", "hashed"])
def test_what_has_a_backward_pass_of_its_own_compiles_in_parts(case: str) -> None:
    """Not in one graph, as the docstrings say; in several, with the same numbers and gradients."""
    if case == "reversible":
        module = Called(layers(reversible=True), stacked).eval()
    else:
        module = Called(hashed(num_hashes=2), lambda m, x, n: m(x, lengths=n, rotations=ROTATIONS)).eval()
    x = torch.randn(B, L, D, requires_grad=True)
    with pytest.raises((torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)):
        torch.compile(module, backend="aot_eager", fullgraph=True)(x, LENGTHS)
    torch._dynamo.reset()
    eager, compiled = module(x, LENGTHS), torch.compile(module, backend="aot_eager")(x, LENGTHS)
    assert_same(compiled, eager)
    found, wanted = (torch.autograd.grad(y.square().sum(), [x, *module.parameters()]) for y in (compiled, eager))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_reversible_layers_without_gradients() -> None:
    """In one graph, and as a program."""
    module = Called(layers(reversible=True), stacked).eval()
    x = torch.randn(B, L, D)
    eager = module(x, LENGTHS)
    with torch.no_grad():
        assert_same(torch.compile(module, backend="aot_eager", fullgraph=True)(x, LENGTHS), eager)
        assert_same(torch.export.export(module, (x, LENGTHS)).module()(x, LENGTHS), eager)


def test_losses_of_tokens_are_one_graph() -> None:
    """How many rows are multiplied at once is asked of the machine, which no compiler can do."""
    head, hidden, targets = LinearHead(D, 50), torch.randn(7, D), torch.randint(50, (7,))
    compiled = torch.compile(head.token_losses, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, targets), head.token_losses(hidden, targets))
