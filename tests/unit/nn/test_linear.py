"""The linear map by oneDNN, forced here whatever the machine, against float64 and against `F.linear`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from manyheads.nn import linear as module
from manyheads.nn.linear import Linear, linear, onednn_is_faster, product, product_of_rows

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="this build of torch has no oneDNN",
)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """oneDNN is the faster one here, and for small products too; the shapes that it is asked for."""
    shapes: list[tuple[int, ...]] = []
    by_onednn = module._by_onednn

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append((*x.shape, weight.shape[0]))
        return by_onednn(x, weight, bias)

    monkeypatch.setattr(module, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(module, "_LEAST_WORK", 1)
    monkeypatch.setattr(module, "_by_onednn", counted)
    return shapes


def given(*shape: int, width: int = 24, out: int = 40, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    x = torch.randn(*shape, width, requires_grad=True)
    return x, torch.randn(out, width, requires_grad=True), torch.randn(out, requires_grad=True) if bias else None


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(24, 40), (40, 24), (16, 16)])
def test_equals_float64_forwards_and_backwards(
    shape: tuple[int, ...], bias: bool, sizes: tuple[int, int], asked: list[tuple[int, ...]]
) -> None:
    leaves = [one for one in given(*shape, width=sizes[0], out=sizes[1], bias=bias) if one is not None]
    wide = [one.detach().double().requires_grad_() for one in leaves]
    out, expected = linear(*leaves), F.linear(*wide)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, grad)
    assert len(asked) == 3
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        assert mine.is_contiguous()
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def test_is_differentiable_twice() -> None:
    leaves = given(5)
    wide = tuple(one.detach().double().requires_grad_() for one in leaves if one is not None)

    def curvature(of: tuple[Tensor, ...], f: object) -> tuple[Tensor, ...]:
        (slope,) = torch.autograd.grad(f(*of).pow(3).sum(), of[:1], create_graph=True)  # type: ignore[operator]
        return torch.autograd.grad(slope.square().sum(), of)

    for mine, theirs in zip(curvature(leaves, linear), curvature(wide, F.linear), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-3)


def test_products_of_strided_and_expanded_matrices() -> None:
    left, right = torch.randn(30, 6).t(), torch.randn(30, 8)
    torch.testing.assert_close(product(left, right), left @ right)
    torch.testing.assert_close(product(left[:, ::3], right[::3]), left[:, ::3] @ right[::3])
    rows = torch.ones(1, 9).expand(30, 9)
    for narrow, wide in ((rows, right), (right, rows)):
        torch.testing.assert_close(product_of_rows(narrow, wide), narrow.t() @ wide)


def test_the_module_is_an_nn_linear(asked: list[tuple[int, ...]]) -> None:
    mine, theirs = Linear(24, 40), torch.nn.Linear(24, 40)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 24)
    torch.testing.assert_close(mine(x), theirs(x))
    assert isinstance(mine, torch.nn.Linear)
    assert asked


def test_others_are_left_alone(asked: list[tuple[int, ...]]) -> None:
    """Other types, and whatever looks at operations: it must see the ones that it knows."""
    x, weight, bias = given(2, 5)
    assert bias is not None
    linear(x.double(), weight.double(), bias.double())
    linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype is torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        linear(x, weight, bias)
    assert counter.get_total_flops() == 2 * 10 * 24 * 40
    torch.testing.assert_close(torch.vmap(linear, (0, None, None))(x, weight, bias), F.linear(x, weight, bias))
    slopes = torch.func.grad(lambda w: linear(x, w, bias).sum())(weight)
    assert slopes.shape == weight.shape
    with torch.backends.mkldnn.flags(enabled=False):
        linear(x, weight, bias)
    assert torch.export.export(Linear(24, 40), (torch.randn(3, 24),)) is not None
    assert not asked


@pytest.mark.parametrize(
    ("facts", "faster"),
    [
        ("vendor_id\t: AuthenticAMD\n", True),
        ("processor\t: 0\nvendor_id\t: HygonGenuine\n", True),
        ("vendor_id\t: GenuineIntel\n", False),
        ("Features\t: neon\n", False),
    ],
)
def test_who_is_faster(facts: str, faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Path, "read_text", lambda *_, **__: facts)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    onednn_is_faster.cache_clear()
    assert onednn_is_faster() is faster
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    onednn_is_faster.cache_clear()
    assert not onednn_is_faster()
    onednn_is_faster.cache_clear()
