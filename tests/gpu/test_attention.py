"""Every kind of attention on the device against the loop in float64, forward and gradients, in float32 and bfloat16."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from naive_attention import (
    naive_additive_attention,
    naive_dot_product_attention,
    naive_lsh_attention,
    naive_relative_attention,
)
from torch import Tensor

from manyheads.nn.attention.local import local_attention
from manyheads.nn.attention.masks import ByDistance, Causal, Lengths, Mask, Segments, dense_mask
from manyheads.nn.attention.scores import AdditiveScore
from manyheads.nn.attention.settings import LSHSettings
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.attention import dot_product_attention, masked_weights
from manyheads.nn.kernels.lsh import attend_pairs, chunked_attention, sorting_order
from manyheads.nn.kernels.relative import relative_attention, relative_weights

B, H, Q, K, D = 2, 2, 6, 9, 8
CHUNK = 4


@dataclass(frozen=True)
class Case:
    """One kind of attention.

    Attributes:
        inputs: the tensors that get gradients, by their shapes.
        fast: those tensors -> what users get.
        plain: the formula in the same type; its error in bfloat16 is the measure of the fast one's.
        exact: the loop, in float64 on the CPU.
    """

    inputs: list[tuple[int, ...]]
    fast: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    exact: Callable[..., Tensor]


def _mask(name: str, device: torch.device) -> Mask | None:
    lengths = torch.tensor([K, K - 2], device=device)
    return {"none": None, "causal": Causal(), "lengths": Lengths(lengths), "empty": Lengths(lengths - K + 2)}[name]


def _allowed(mask: str, causal: bool = False) -> Tensor | None:
    given = _mask(mask, torch.device("cpu"))
    return dense_mask(Causal() & given if causal else given, Q, K, torch.device("cpu"), K - Q)


def _dot_product(mask: str) -> Case:
    def fast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dot_product_attention(q, k, v, _mask(mask, q.device), first_query=K - Q)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q * D**-0.5, k.transpose(-1, -2))
        return torch.matmul(masked_weights(scores, _mask(mask, q.device), K - Q), v)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return naive_dot_product_attention(q, k, v, _allowed(mask))

    return Case([(B, H, Q, D), (B, H, K, D), (B, H, K, D)], fast, plain, exact)


def _packed(causal: bool) -> Case:
    """Two sequences and an empty one; in bfloat16 on a GPU by torch's kernel."""
    starts = [torch.tensor(bounds) for bounds in ([0, 2, 2, Q], [0, 2, 2, Q] if causal else [0, 4, 4, K])]
    sizes = Q, int(starts[1][-1])
    of_query, of_key = (torch.arange(size) >= bounds[2] for size, bounds in zip(sizes, starts, strict=True))
    seen = of_query[:, None] == of_key
    if causal:
        seen = seen & (torch.arange(Q) <= torch.arange(Q)[:, None])

    def attend(q: Tensor, k: Tensor, v: Tensor, is_fast: bool) -> Tensor:
        bounds = [one.int().to(q.device) for one in starts]
        with modes.fast(is_fast and q.dtype is torch.bfloat16):
            return dot_product_attention(q, k, v, Segments(*bounds, longest=Q, causal=causal))

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return naive_dot_product_attention(q, k, v, seen[None, None])

    shapes = [(1, H, Q, D), (1, H, sizes[1], D), (1, H, sizes[1], D)]
    return Case(shapes, partial(attend, is_fast=True), partial(attend, is_fast=False), exact)


def _packed_with_bias(causal: bool) -> Case:
    """Self-attention with numbers for distances up to 3; by the Triton kernel where it can be used."""
    starts, before = torch.tensor([0, 2, 2, Q]), 3
    places = torch.arange(Q)
    seen = (places[:, None] >= 2) == (places >= 2)
    if causal:
        seen = seen & (places <= places[:, None])

    def attend(q: Tensor, k: Tensor, v: Tensor, values: Tensor, is_fast: bool) -> Tensor:
        is_fast = is_fast and policy.triton_lack(q.device, q.dtype) is None
        bounds = starts.int().to(q.device)
        with modes.fast(is_fast), modes.using_triton(is_fast):
            mask = ByDistance(values, before) & Segments(bounds, bounds, longest=Q, causal=causal)
            return dot_product_attention(q, k, v, mask)

    def exact(q: Tensor, k: Tensor, v: Tensor, values: Tensor) -> Tensor:
        column = (places - places[:, None] + before).clamp(0, values.shape[1] - 1)
        heads = [
            torch.stack([_row(q[:, h, i], k[:, h], v[:, h], values[h, column[i]], seen[i]) for i in range(Q)], 1)
            for h in range(H)
        ]
        return torch.stack(heads, 1)

    shapes = [(1, H, Q, D)] * 3 + [(H, 4 if causal else 7)]
    return Case(shapes, partial(attend, is_fast=True), partial(attend, is_fast=False), exact)


def _row(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    """(1, D), (1, Q, D), (1, Q, D), (Q,), (Q,) -> (1, D)"""
    scores = ((keys * query[:, None]).sum(-1) * D**-0.5 + bias).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1)[..., None] * values).sum(1)


def _additive(mask: str) -> Case:
    def fast(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        score = AdditiveScore(H, D).to(q)
        eye = torch.eye(D, dtype=q.dtype, device=q.device).expand(H, D, D)
        given = {"query_weight": eye, "key_weight": eye, "score_weight": weight}
        scores = torch.func.functional_call(score, given, (q, k))
        return torch.matmul(masked_weights(scores, _mask(mask, q.device), K - Q), v)

    def exact(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        return naive_additive_attention(q, k, v, weight, _allowed(mask))

    return Case([(B, H, Q, D), (B, H, K, D), (B, H, K, D), (H, D)], fast, fast, exact)


def _relative(mask: str, path: Any, causal: bool = True) -> Case:
    distances = K if causal else K + Q - 1

    def fast(q: Tensor, k: Tensor, v: Tensor, *parts: Tensor) -> Tensor:
        with modes.using_relative_path(path):
            return relative_attention(q, k, v, *parts, _mask(mask, q.device), causal=causal)

    def plain(q: Tensor, k: Tensor, v: Tensor, *parts: Tensor) -> Tensor:
        return torch.matmul(relative_weights(q, k, *parts, _mask(mask, q.device), causal), v)

    def exact(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor, b: Tensor) -> Tensor:
        def row(distance: int) -> Tensor:
            return r[:, K - 1 - distance]

        return naive_relative_attention(
            q, k, v, row, u, w, lambda distance: b[:, K - 1 - distance], _allowed(mask, causal)
        )

    shapes = [(B, H, Q, D), (B, H, K, D), (B, H, K, D), (H, distances, D), (H, D), (H, D), (H, distances)]
    return Case(shapes, fast, plain, exact)


def _hashed(num_hashes: int) -> Case:
    length = 16
    settings = LSHSettings(chunk_len=CHUNK, num_hashes=num_hashes, key_eps=0.0)
    buckets = torch.arange(B * H * num_hashes * length).view(B, H, num_hashes, length) * 7 % 11 % 3

    def fast(qk: Tensor, v: Tensor) -> Tensor:
        order = sorting_order(buckets.to(qk.device), settings)
        return chunked_attention(qk, v, order, settings)[0]

    def plain(qk: Tensor, v: Tensor) -> Tensor:
        return attend_pairs(qk, v, buckets.to(qk.device), settings)

    def exact(qk: Tensor, v: Tensor) -> Tensor:
        return naive_lsh_attention(qk, v, buckets, CHUNK, scale=settings.scale)

    return Case([(B, H, length, D), (B, H, length, D)], fast, plain, exact)


def _local() -> Case:
    length = 12
    places = torch.arange(length)
    behind = places[:, None] // CHUNK - places // CHUNK
    seen = ((behind == 0) | (behind == 1)) & (places <= places[:, None])

    def fast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return local_attention(q, k, v, chunk_len=CHUNK)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q * D**-0.5, k.transpose(-1, -2)).masked_fill(~seen.to(q.device), -torch.inf)
        return torch.matmul(torch.softmax(scores, dim=-1), v)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return naive_dot_product_attention(q, k, v, seen[None, None])

    return Case([(B, H, length, D)] * 3, fast, plain, exact)


MASKS = ["none", "causal", "lengths", "empty"]
CASES: dict[str, Case] = {
    **{f"dot product, {mask}": _dot_product(mask) for mask in MASKS},
    "packed": _packed(causal=False),
    "packed, causal": _packed(causal=True),
    "packed, relative bias": _packed_with_bias(causal=False),
    "packed, relative bias, causal": _packed_with_bias(causal=True),
    **{f"additive, {mask}": _additive(mask) for mask in MASKS},
    **{
        f"relative by {path}, {mask}": _relative(mask, path)
        for path in ("tiles", "products", "sdpa")
        for mask in ("none", "lengths", "empty")
    },
    "relative both ways by sdpa": _relative("lengths", "sdpa", causal=False),
    "hashed, one round": _hashed(1),
    "hashed, three rounds": _hashed(3),
    "local": _local(),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


def _given(case: Case, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in case.inputs]


def _results(attend: Callable[..., Tensor], given: list[Tensor], factor: Tensor | None) -> list[Tensor]:
    """The output and, with a factor, the gradient of every input; in float64 on the CPU."""
    leaves = [x.detach().requires_grad_(factor is not None) for x in given]
    out = attend(*leaves)
    found = [out.detach()]
    if factor is not None:
        if out.requires_grad:
            grads = torch.autograd.grad((out * factor.to(out)).sum(), leaves, allow_unused=True)
        else:
            grads = (None,) * len(leaves)
        found += [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True)]
    return [x.double().cpu() for x in found]


def test_forward_and_gradients_in_float32(case: Case, device: torch.device) -> None:
    given = _given(case, torch.float32)
    factor = torch.randn(case.exact(*given).shape)
    wanted = _results(case.exact, [x.double() for x in given], factor)
    found = _results(case.fast, [x.to(device) for x in given], factor)
    for one, true in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, true, atol=2e-5, rtol=2e-5)


@pytest.mark.thinned(2)
def test_bfloat16_within_twice_the_error_of_the_formula(case: Case, device: torch.device) -> None:
    given = _given(case, torch.bfloat16)
    factor = torch.randn(case.exact(*given).shape)
    wanted = _results(case.exact, [x.double() for x in given], factor)
    there = [x.to(device) for x in given]
    rough, found = _results(case.plain, there, factor), _results(case.fast, there, factor)
    for one, other, true in zip(found, rough, wanted, strict=True):
        scale = max(1.0, true.abs().max().item())
        assert one.isfinite().all()
        assert (one - true).abs().max().item() <= 2 * (other - true).abs().max().item() + 8e-3 * scale
