"""The linear map by oneDNN, forced here whatever the machine, against float64 and against `F.linear`."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from manyheads.decoding.model_runner import inference, narrow, pack
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.relative import RelativeAttention
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels import linear as module
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.linear import Packed, linear, product, product_of_rows
from manyheads.nn.kernels.policy import onednn_is_faster
from manyheads.nn.layers import Linear

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="this build of torch has no oneDNN",
)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """oneDNN is the faster one here, and for small products too; the shapes that it is asked for."""
    shapes: list[tuple[int, ...]] = []
    by_onednn = module.onednn_linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append((*x.shape, weight.shape[0]))
        return by_onednn(x, weight, bias)

    monkeypatch.setattr(policy, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(policy, "_LEAST_WORK", 1)
    monkeypatch.setattr(policy, "_LEAST_PACKED_WORK", 1)
    monkeypatch.setattr(module, "onednn_linear", counted)
    return shapes


def given(*shape: int, width: int = 24, out: int = 40, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    x = torch.randn(*shape, width, requires_grad=True)
    return x, torch.randn(out, width, requires_grad=True), torch.randn(out, requires_grad=True) if bias else None


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(24, 40), (40, 24), (16, 16)])
def test_equals_float64_forwards_and_backwards(shape, bias, sizes, asked):
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
    for one, other in ((rows, right), (right, rows)):
        torch.testing.assert_close(product_of_rows(one, other), one.t() @ other)


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
    monkeypatch.setattr(policy.Path, "read_text", lambda *_, **__: facts)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    onednn_is_faster.cache_clear()
    assert onednn_is_faster() is faster
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    onednn_is_faster.cache_clear()
    assert not onednn_is_faster()
    onednn_is_faster.cache_clear()


CPU = torch.device("cpu")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products were made by packed weights."""
    count = [0]
    made = Packed.linear

    def counted(self: Packed, x: Tensor) -> Tensor:
        count[0] += 1
        return made(self, x)

    monkeypatch.setattr(Packed, "linear", counted)
    return count


def modules(bias: bool = True) -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict(
        {
            "map": Linear(24, 40, bias=bias),
            "head": LinearHead(24, 90, bias=bias),
            "attention": MultiHeadAttention(24, 2),
        }
    )


def said(of: torch.nn.ModuleDict, x: Tensor) -> list[Tensor]:
    return [of["map"](x), of["head"].logits(x), of["attention"](x)[0]]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_packed_weights_give_the_same(precision: str, bias: bool, rows: int, served: list[int]) -> None:
    """A map, a head, and an attention's projections as one and its last one: four products."""
    if precision == "bf16" and not policy.has_bf16():
        pytest.skip("oneDNN has no bf16 on this processor")
    plain, x = modules(bias), torch.randn(rows, 2, 24)
    narrow(plain, precision)  # type: ignore[arg-type]
    with inference(CPU, precision):  # type: ignore[arg-type]
        expected = said(plain, x)
        assert not served[0]
        pack(plain)
        for mine, theirs in zip(said(plain, x), expected, strict=True):
            assert mine.dtype is theirs.dtype
            torch.testing.assert_close(mine, theirs, **({} if precision == "fp32" else {"rtol": 2e-2, "atol": 2e-2}))
    assert served[0] == 4


def test_a_changed_weight_is_not_served_from_its_old_copy(served: list[int]) -> None:
    x = torch.randn(5, 24)
    changes = {
        "in place": lambda one: one.weight.mul_(2),
        "loaded": lambda one: one.load_state_dict({name: value * 2 for name, value in one.state_dict().items()}),
        "exchanged": lambda one: setattr(one, "weight", torch.nn.Parameter(one.weight * 2)),
        "its bias": lambda one: one.bias.add_(1),
    }
    for name, change in changes.items():
        one = Linear(24, 40)
        pack(one)
        with torch.no_grad():
            before = one(x)
            assert served[0] == 1, name
            change(one)
            torch.testing.assert_close(one(x), F.linear(x, one.weight, one.bias))
            assert not torch.equal(one(x), before)
            assert served[0] == 1, name
            pack(one)
            one(x)
            assert served[0] == 2, name
        served[0] = 0


def test_packed_weights_serve_no_training_and_travel_nowhere(served: list[int]) -> None:
    one, x = Linear(24, 40), torch.randn(5, 24)
    pack(one)
    one(x).sum().backward()
    assert one.weight.grad is not None
    with torch.no_grad():
        one(x.double().float())
        assert served[0] == 1
        for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):  # noqa: S301
            assert copied.packed is None
            torch.testing.assert_close(copied(x), one(x))
        with FlopCounterMode(display=False) as counter:
            one(x)
    assert counter.get_total_flops() == 2 * 5 * 24 * 40
    assert set(one.state_dict()) == {"weight", "bias"}
    assert not Packed.is_worthwhile(Linear(3, 4, device="meta"))
    assert not Packed.is_worthwhile(Linear(3, 4), Linear(3, 4, bias=False))
    assert not Packed.is_worthwhile(Linear(3, 4), Linear(5, 4))
    assert not Packed.is_worthwhile(Linear(3, 4).double())


def test_an_exchanged_projection_is_not_served_from_the_old_copy(served: list[int]) -> None:
    attention, x = MultiHeadAttention(24, 2), torch.randn(2, 5, 24)
    pack(attention)
    with torch.no_grad():
        attention(x)
        assert served[0] == 2
        attention.q_proj = Linear(24, 24)
        found = attention(x)[0]
        assert served[0] == 5  # keys, values and the last projection, each by itself
        plain = copy.deepcopy(attention)
        torch.testing.assert_close(found, plain(x)[0])


def test_relative_projections_are_one_packed_product(served: list[int]) -> None:
    attention, x = RelativeAttention(24, 2, 8), torch.randn(3, 5, 24)
    with torch.no_grad():
        plain = attention.project_together(x)
        assert not served[0]
        pack(attention)
        for mine, theirs in zip(attention.project_together(x), plain, strict=True):
            assert mine.shape == (3, 2, 5, 8)
            torch.testing.assert_close(mine, theirs)
        assert served[0] == 1
        attention.v_proj = Linear(24, 16, bias=False)
        found = attention.project_together(x)[2]
        assert served[0] == 3  # queries and keys, each by itself
        torch.testing.assert_close(found, attention.v_proj(x).view(3, 5, 2, 8).transpose(1, 2))
