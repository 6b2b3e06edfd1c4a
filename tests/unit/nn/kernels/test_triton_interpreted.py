"""Relative attention by Triton kernels, interpreted on a CPU, against loops and formulas in float64.

bfloat16 cannot be interpreted.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from naive_attention import naive_relative_attention
from torch import Tensor

from manyheads.errors import RequestError, ShapeError
from manyheads.nn import fused_relative_attention, fused_relative_attention_of_segments
from manyheads.nn.attention.masks import Causal, Dense, Lengths, Mask, Segments, Window, dense_mask
from manyheads.nn.attention.relative import LearnedRelativeAttention, RelativeAttention
from manyheads.nn.attention.relative_bias import RelativeBias
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.attention import dot_product_attention
from manyheads.nn.kernels.loss import smoothed_loss
from manyheads.nn.kernels.relative import relative_attention

pytest.importorskip("triton", reason="the package triton is not installed; make check-triton installs it")

pytestmark = [
    pytest.mark.unhooked,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="make check-triton sets TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
WIDTH = 8


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Up to a part of the largest number, because every number is a sum of numbers as large as it."""
    assert found.isfinite().all()
    atol = TOLERANCE[dtype] * max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found.double(), wanted.double(), atol=atol, rtol=0)


def inputs(q_len: int, k_len: int, width: int, value: int, causal: bool, dtype: torch.dtype) -> list[Any]:
    """query, key, value, positions, u, v, distance bias, for 2 rows and 2 heads; in memory heads follow the length."""
    distances = k_len if causal else k_len + q_len - 1
    parts = [torch.randn(2, n, 2, w).transpose(1, 2) for n, w in ((q_len, width), (k_len, width), (k_len, value))]
    more = [torch.randn(2, distances, width), torch.randn(2, width), torch.randn(2, width), torch.randn(2, distances)]
    return [x.to(dtype).requires_grad_() for x in [*parts, *more]]


def compare(attend: Callable[..., Tensor], exact: Callable[..., Tensor], given: list[Any]) -> None:
    """Compare results and gradients with those in float64."""
    dtype = given[0].dtype
    wide = [None if x is None else x.detach().double().requires_grad_() for x in given]
    found, wanted = attend(*given), exact(*wide)
    assert found.dtype == dtype
    close(found, wanted, dtype)
    factor = torch.randn_like(found)
    leaves, exact_leaves = ([x for x in all_ if x is not None] for all_ in (given, wide))
    grads = torch.autograd.grad((found * factor).sum(), leaves)
    for one, other in zip(grads, torch.autograd.grad((wanted * factor).sum(), exact_leaves), strict=True):
        assert one.dtype == dtype
        close(one, other, dtype)


CASES: dict[str, tuple[tuple[int, int, int, int], bool, Mask | None, torch.dtype]] = {
    "several tiles": ((70, 90, 16, 16), True, None, torch.float16),
    "several tiles in float32": ((35, 70, 16, 24), True, None, torch.float32),
    "both ways": ((40, 33, 20, 16), False, None, torch.float32),
    "one query": ((1, 40, 8, 8), True, None, torch.float32),
    "lengths, one of them 0": ((33, 33, 8, 8), True, Lengths(torch.tensor([0, 20])), torch.float32),
    "both ways, any mask": ((5, 40, 8, 8), False, Dense(torch.arange(400).view(2, 1, 5, 40) % 3 > 0), torch.float16),
}


@pytest.mark.parametrize(("sizes", "causal", "mask", "dtype"), CASES.values(), ids=CASES)
def test_relative_attention(sizes, causal, mask, dtype):
    compare(
        lambda *given: fused_relative_attention(*given, mask, causal),
        lambda *given: relative_attention(*given, mask, 0.0, causal),
        inputs(*sizes, causal, dtype),
    )


@pytest.mark.parametrize("causal", [True, False])
def test_relative_attention_against_the_loop(causal: bool) -> None:
    given = inputs(3, 5, 4, 5, causal, torch.float32)

    def loop(*parts: Tensor) -> Tensor:
        positions, u, v, bias = parts[3:]
        allowed = dense_mask(Causal(), 3, 5, torch.device("cpu"), 2) if causal else None
        return naive_relative_attention(
            *parts[:3], lambda d: positions[:, 4 - d], u, v, lambda d: bias[:, 4 - d], allowed
        )

    compare(lambda *parts: fused_relative_attention(*parts, causal=causal), loop, given)


EMPTY = {
    "no keys": (3, 0, False, 2),
    "no queries": (0, 4, True, 2),
    "nothing": (0, 0, True, 2),
    "no rows": (3, 4, True, 0),
}


@pytest.mark.parametrize(("q_len", "k_len", "causal", "rows"), EMPTY.values(), ids=EMPTY)
def test_nothing_to_attend_to(q_len: int, k_len: int, causal: bool, rows: int) -> None:
    """The result is empty or zero, and all gradients are zeros."""
    given = inputs(q_len, k_len, 8, 8, causal, torch.float32)
    given = [x if n > 2 else x.detach()[:rows].requires_grad_() for n, x in enumerate(given)]
    out = fused_relative_attention(*given, causal=causal)
    assert out.shape == (rows, 2, q_len, 8)
    assert not out.any()
    for x, grad in zip(given, torch.autograd.grad(out.sum(), given), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()


@pytest.mark.parametrize("causal", [True, False])
def test_a_query_that_sees_nothing_and_a_key_that_nothing_sees(causal: bool) -> None:
    given = inputs(20, 37, 8, 8, causal, torch.float32)
    shown = torch.rand(2, 2, 20, 37) > 0.3
    shown[0, :, 3], shown[1, :, :, 5] = False, False
    attend = lambda *parts: fused_relative_attention(*parts, Dense(shown), causal)  # noqa: E731
    compare(attend, lambda *parts: relative_attention(*parts, Dense(shown), 0.0, causal), given)
    out = attend(*given)
    grads = torch.autograd.grad(out.sum(), given)
    assert not out[0, :, 3].any()
    assert not grads[0][0, :, 3].any()
    assert not grads[1][1, :, 5].any()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 3, 2, 0), (3, 2, 1, 0)])
def test_inputs_that_lie_in_any_order(order: tuple[int, ...]) -> None:
    """Also in masks, and in the gradient of the result; heads may share keys, and keys may lie far apart."""

    def moved(x: Tensor) -> Tensor:
        back = sorted(range(4), key=order.__getitem__)
        return x.detach().permute(order).contiguous().permute(back)

    given = inputs(6, 20, 8, 24, False, torch.float32)
    given = [moved(x).requires_grad_() if n < 3 else x for n, x in enumerate(given)]
    mask = Dense(moved(torch.rand(2, 2, 6, 20) > 0.2))
    compare(
        lambda *parts: fused_relative_attention(*parts, mask, False),
        lambda *parts: relative_attention(*parts, mask, 0.0, False), given,
    )  # fmt: skip
    shared = [x.detach()[:, :1].expand(-1, 2, -1, -1) for x in given[1:3]]
    out = fused_relative_attention(given[0], *shared, *given[3:], mask, False)
    wanted = relative_attention(given[0], *shared, *given[3:], mask, 0.0, False)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    factor = moved(torch.randn(2, 2, 6, 24))
    for one, other in zip(*(torch.autograd.grad(x, given[0], factor) for x in (out, wanted)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_rows_more_than_two_to_the_31_numbers_apart() -> None:
    """The memory between them is never touched."""
    apart, k_len = 1 << 25, 70
    memory = torch.empty(k_len * apart, dtype=torch.float16)  # 4.7 GB of addresses
    query, key, value, *parts = (x.detach() for x in inputs(3, k_len, 8, 8, True, torch.float16))
    given = [query[:1], key[:1], value[:1]]
    wanted = fused_relative_attention(*given, *parts)
    for n in (1, 2):
        far = memory.view(k_len, apart)[:, 16 * n : 16 * n + 16].view(k_len, 2, 8).transpose(0, 1)[None]
        given[n] = far.copy_(given[n])
    assert torch.equal(fused_relative_attention(*given, *parts), wanted)


def test_addresses_of_scores_have_64_bits() -> None:
    import triton
    import triton.language as tl

    from manyheads.nn.kernels.triton.relative import _addresses
    from manyheads.nn.kernels.triton.tiles import Kind

    globals().update(tl=tl, _addresses=_addresses)

    @triton.jit
    def distances(x, out, row, column, row_stride, column_stride, KIND: tl.constexpr):  # noqa: N803
        at = _addresses(x, row, column, row_stride, column_stride, KIND).to(tl.int64) - x.to(tl.int64)
        tl.store(out + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], at)

    kind = Kind(16, 16, 16, 16, 16, 16, "ieee", causal=True, has_bias=False)
    out, x = torch.zeros(16, 16, dtype=torch.int64), torch.zeros(1, dtype=torch.float16)
    far = 1 << 17
    distances[(1,)](x, out, far, 2 * far, far - 1, far + 1, KIND=kind)
    steps = torch.arange(16)
    assert torch.equal(out, 2 * ((far + steps[:, None]) * (far - 1) + (2 * far + steps) * (far + 1)))


def test_float32_is_multiplied_as_torch_multiplies_it() -> None:
    """In full precision unless the user allows TF32, by the older setting or the newer one."""
    from manyheads.nn.kernels.triton.tiles import precision

    assert precision() == "ieee"
    try:
        torch.set_float32_matmul_precision("high")
        assert precision() == "tf32"
        torch.set_float32_matmul_precision("highest")
        assert precision() == "ieee"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert precision() == "tf32"
        given = [x.detach() for x in inputs(3, 5, 8, 8, True, torch.float32)]
        torch.testing.assert_close(fused_relative_attention(*given), relative_attention(*given), atol=1e-2, rtol=1e-2)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")


def test_without_biases_of_distances() -> None:
    given = inputs(5, 9, 8, 8, True, torch.float32)
    given[5] = given[6] = None
    compare(fused_relative_attention, relative_attention, given)


@pytest.mark.parametrize("causal", [True, False])
def test_segments(causal: bool) -> None:
    """One of them is empty, one as long as the bound; the last rows belong to none."""
    q_starts, k_starts, max_q, max_k = torch.tensor([0, 5, 5, 40, 42]), torch.tensor([0, 8, 8, 48, 50]), 35, 40
    distances = max_k if causal else max_k + max_q - 1
    shapes = [(44, 2, 8), (51, 2, 8), (51, 2, 8), (2, distances, 8), (2, 8), (2, 8), (2, distances)]
    given = [torch.randn(shape).requires_grad_() for shape in shapes]

    def loop(query: Tensor, key: Tensor, value: Tensor, r: Tensor, u: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        out = []
        for n in range(4):
            queries, keys = slice(*q_starts[n : n + 2].tolist()), slice(*k_starts[n : n + 2].tolist())
            q_len, k_len = queries.stop - queries.start, keys.stop - keys.start
            rows = slice(max_k - k_len, max_k if causal else max_k + q_len - 1)
            if q_len:
                parts = [x.transpose(0, 1)[None] for x in (query[queries], key[keys], value[keys])]
                found = relative_attention(*parts, r[:, rows], u, v, bias[:, rows], causal=causal)
                out.append(found[0].transpose(0, 1))
        return torch.cat([*out, torch.zeros_like(query[42:])])

    starts = (q_starts, k_starts, max_q, max_k, causal)
    compare(lambda *parts: fused_relative_attention_of_segments(*parts, *starts), loop, given)
    longer = [*given[:3], given[3][:, 1:], *given[4:6], given[6][:, 1:]]
    with pytest.raises(ShapeError, match="a segment has length 40, which is more than max_k 39"):
        fused_relative_attention_of_segments(*longer, q_starts, k_starts, max_q, 39, causal)
    with pytest.raises(ShapeError, match="cu_seqlens_k ends at 50, but there are 49 rows"):
        fused_relative_attention_of_segments(given[0], given[1][:49], given[2][:49], *given[3:], *starts)
    spread = [torch.stack([x.int(), x.int() + 7], 1)[:, 0] for x in (q_starts, k_starts)]  # not adjacent in memory
    wanted = fused_relative_attention_of_segments(*given, *starts)
    assert torch.equal(fused_relative_attention_of_segments(*given, *spread, *starts[2:]), wanted)
    with pytest.raises(ShapeError, match="give both one number more than there are segments"):
        fused_relative_attention_of_segments(*given, q_starts[:-1], *starts[1:])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_packed_sequences_with_numbers_of_distances(causal, scale, monkeypatch):
    """Attention over packed sequences uses the kernel where it is asked for, and the loop elsewhere."""
    from manyheads.nn.kernels.triton.relative import FusedAttention

    calls: list[bool] = []
    apply = FusedAttention.apply
    monkeypatch.setattr(FusedAttention, "apply", lambda *given: calls.append(True) or apply(*given))
    starts = torch.tensor([0, 5, 5, 40, 42], dtype=torch.int32)
    mask = Segments(starts, starts, longest=36, causal=causal)
    given = [torch.randn(1, 2, 42, 8).requires_grad_() for _ in range(3)]
    bias = RelativeBias(2, 9, causal=causal)
    found = []
    for by_name in (True, False):
        with modes.using_triton(by_name):
            out = dot_product_attention(*given, bias() & mask, scale=scale)
        found.append([out, *torch.autograd.grad(out.square().sum(), [*given, bias.table])])
    assert len(calls) == 1
    for mine, other in zip(*found, strict=True):
        close(mine, other, torch.float32)


def test_a_segment_over_the_bound_reads_nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nobody looks at the lengths; a distance without a row counts as masked."""
    query, key, value, *parts = (x.detach() for x in inputs(5, 12, 8, 8, True, torch.float32))
    wanted = relative_attention(query, key, value, *parts, Window(left=7, right=0))[0]
    monkeypatch.setattr(policy, "can_look", lambda x: False)
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    near = parts[0][:, 4:], *parts[1:3], parts[3][:, 4:]
    found = fused_relative_attention_of_segments(*rows, *near, torch.tensor([0, 5]), torch.tensor([0, 12]), 5, 8)
    close(found.transpose(0, 1), wanted, torch.float32)


@pytest.mark.parametrize("kind", [RelativeAttention, LearnedRelativeAttention])
def test_the_module(kind: Any) -> None:
    module = kind(16, 2, **({"max_len": 9} if kind is LearnedRelativeAttention else {}))
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    wanted = module(x, memory)
    plain = torch.autograd.grad(wanted.square().sum(), list(module.parameters()))
    module.fused = True
    found = module(x, memory)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    fused = torch.autograd.grad(found.square().sum(), list(module.parameters()))
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_second_derivatives_are_refused() -> None:
    given = inputs(3, 5, 8, 8, True, torch.float32)
    x, weight = torch.randn(3, WIDTH, requires_grad=True), torch.randn(5, WIDTH)
    with modes.using_triton():
        loss = smoothed_loss(x, torch.arange(3), weight, None)[0]
    for total, leaf in ((fused_relative_attention(*given).square().sum(), given[0]), (loss, x)):
        [first] = torch.autograd.grad(total, leaf, create_graph=True)
        with pytest.raises(RequestError, match="cannot be differentiated again"):
            first.square().sum().backward()


def test_transforms_compute_the_formula() -> None:
    given = [x.detach() for x in inputs(3, 5, 8, 8, True, torch.float32)]
    attend = lambda query: relative_attention(query, *given[1:], fused=True).sum()  # noqa: E731
    wanted = torch.func.grad(lambda query: relative_attention(query, *given[1:]).sum())(given[0])
    torch.testing.assert_close(torch.func.grad(attend)(given[0]), wanted)
