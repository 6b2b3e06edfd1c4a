"""The Triton kernels, interpreted on a CPU, against the formulas in float64. bfloat16 cannot be interpreted."""

from __future__ import annotations

import math
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
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.attention import dot_product_attention
from manyheads.nn.kernels.loss import plain_loss, smoothed_loss
from manyheads.nn.kernels.relative import relative_attention

pytest.importorskip("triton", reason="the package triton is not installed; make check-triton installs it")

pytestmark = [
    pytest.mark.unhooked,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="make check-triton sets TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
ROWS, WIDTH, VOCAB, PAD = 6, 8, 4100, 3  # one and a bit of the columns that a program reads at once


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Up to a part of the largest number, because every number is a sum of numbers as large as it."""
    assert found.isfinite().all()
    atol = TOLERANCE[dtype] * max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found.double(), wanted.double(), atol=atol, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("smoothing", "kind", "padding"), [(0.0, "all", -math.inf), (0.1, "all", 0.0), (0.3, "others", -math.inf)]
)
def test_loss(dtype, smoothing, kind, padding):
    """Padding has a bias of -inf where it has no share; one row has no loss."""
    hidden, weight, bias = torch.randn(ROWS, WIDTH), torch.randn(VOCAB, WIDTH), torch.randn(VOCAB)
    bias[PAD], bias[-1] = padding, 9.0  # the maximum changes in the last columns
    targets = torch.tensor([4, VOCAB - 1, 9, 9, 4096, 5])
    keep = torch.arange(ROWS) != 2
    wide = [x.to(dtype).double().requires_grad_() for x in (hidden, weight, bias)]
    loss, nll = plain_loss(wide[0][keep], targets[keep], *wide[1:], smoothing, kind, PAD)
    wanted = torch.autograd.grad(loss * 0.5, wide)
    given = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    with modes.using_triton():
        found, found_nll = smoothed_loss(given[0], targets, *given[1:], smoothing, 2048, kind, PAD, keep)
        without_error, _ = smoothed_loss(*[x.detach() for x in given[:1]], targets, *[x.detach() for x in given[1:]],
                                         smoothing, 2048, kind, PAD, keep)  # fmt: skip
    grads = torch.autograd.grad(found * 0.5, given)
    assert found.dtype == torch.float32
    close(found, loss, dtype)
    close(found_nll, nll, dtype)
    assert without_error == found
    for one, other in zip(grads, wanted, strict=True):
        close(one, other, dtype)


def test_a_row_without_loss_is_not_read_and_another_nan_is_kept() -> None:
    from manyheads.nn.kernels.triton.loss import loss_of_rows
    from manyheads.nn.smoothing import spread

    logits = torch.randn(3, 10)
    logits[1], logits[2, 4] = math.nan, math.nan
    sums = loss_of_rows(
        logits[:2], torch.tensor([1, -100]), torch.tensor([True, False]), spread("all", 0.1, 10), None, True
    )
    assert sums.isfinite().all()
    assert logits[0].any()
    assert not logits[1].any()
    whole = loss_of_rows(logits[2:], torch.tensor([1]), None, spread("all", 0.0, 10), None, True)
    assert whole[0].isnan()


def test_loss_of_a_head_in_the_fast_mode() -> None:
    head, hidden = LinearHead(WIDTH, 11, bias=True), torch.randn(2, 3, WIDTH)
    keep = torch.tensor([[True] * 3, [True, False, False]])
    targets = torch.randint(4, 11, (2, 3))
    wanted = head.loss(hidden, targets, keep, label_smoothing=0.1)
    with modes.fast(), modes.using_triton():
        found = head.loss(hidden, targets, keep, label_smoothing=0.1)
    torch.testing.assert_close(found, wanted)


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


def test_relative_attention_against_the_loop() -> None:
    given = inputs(3, 5, 4, 5, True, torch.float32)
    found = fused_relative_attention(*given)
    positions, u, v, bias = given[3:]
    wanted = naive_relative_attention(
        *given[:3], lambda d: positions[:, 4 - d], u, v, lambda d: bias[:, 4 - d],
        dense_mask(Causal(), 3, 5, torch.device("cpu"), 2),
    )  # fmt: skip
    close(found, wanted, torch.float32)


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
