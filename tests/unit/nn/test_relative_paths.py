"""The implementation of relative attention for GPUs, run on a CPU, against the loop in float64.

It is SDPA with an additive mask. `tests/gpu` runs it on a GPU.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from naive_attention import naive_relative_attention
from torch import Tensor

from manyheads.nn.attention.masks import Causal, Mask, dense_mask
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.relative import relative_attention, relative_weights

B, H, D, E = 3, 2, 4, 5
MakeMask = Callable[[int, int, int], Mask | None]
SIZES = [(5, 5), (3, 8), (1, 4), (1, 1)]


def inputs(q_len: int, k_len: int, learned: bool, causal: bool, dtype: torch.dtype = torch.float32) -> list[Any]:
    """query, key, value, positions, u, v, distance bias"""
    distances = k_len if causal else k_len + q_len - 1
    heads = [(B, H, q_len, D), (B, H, k_len, D), (B, H, k_len, E), (H, distances, D)]
    parts: list[Any] = [torch.randn(shape, dtype=dtype) for shape in heads]
    return [*parts, torch.randn(H, D), None if learned else torch.randn(H, D), torch.randn(H, distances)]


def slow(given: list[Any], mask: Mask | None, causal: bool) -> Tensor:
    query, key, value, positions, u, v, bias = given
    q_len, k_len = query.shape[2], key.shape[2]
    return naive_relative_attention(
        query,
        key,
        value,
        lambda distance: positions[:, k_len - 1 - distance],
        u,
        torch.zeros_like(u) if v is None else v,
        lambda distance: bias[:, k_len - 1 - distance],
        dense_mask(Causal() & mask if causal else mask, q_len, k_len, query.device, k_len - q_len),
    )


def by_sdpa(given: list[Any], mask: Mask | None, causal: bool, rate: float = 0.0) -> Tensor:
    with modes.using_relative_path("sdpa"):
        return relative_attention(*given, mask, rate, causal)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("q_len", "k_len"), SIZES)
def test_against_the_loop(make_mask: MakeMask, q_len: int, k_len: int, learned: bool, causal: bool) -> None:
    given = inputs(q_len, k_len, learned, causal)
    mask = make_mask(B, q_len, k_len)
    with torch.no_grad():
        found = by_sdpa(given, mask, causal)
    torch.testing.assert_close(found.double(), slow(given, mask, causal), atol=1e-5, rtol=1e-5)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("q_len", "k_len"), SIZES)
def test_gradients_of_sdpa_against_the_loop(make_mask, q_len, k_len, learned, causal):
    """Those of queries that may attend to nothing are zeros."""
    given = inputs(q_len, k_len, learned, causal)
    mask = make_mask(B, q_len, k_len)
    factor = torch.randn(B, H, q_len, E)

    def grads(attend: Callable[[list[Any]], Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [None if x is None else x.to(dtype).requires_grad_() for x in given]
        out = attend(leaves)
        wanted = [x for x in leaves if x is not None]
        if not out.requires_grad:
            return [torch.zeros_like(x) for x in wanted]
        found = torch.autograd.grad((out * factor).sum(), wanted, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]

    exact = grads(lambda leaves: slow(leaves, mask, causal), torch.float64)
    found = grads(lambda leaves: by_sdpa(leaves, mask, causal), torch.float32)
    for one, wanted in zip(found, exact, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("learned", [False, True])
def test_gradcheck_of_sdpa_in_float64(learned: bool) -> None:
    given = [x if x is None else x.double().requires_grad_() for x in inputs(3, 5, learned, True)]
    assert torch.autograd.gradcheck(lambda *xs: by_sdpa(list(xs), None, True), given)


def test_bf16_within_twice_the_plain_error(make_mask: MakeMask) -> None:
    given = inputs(6, 9, False, True, torch.bfloat16)
    mask = make_mask(B, 6, 9)
    exact = slow(given, mask, True)
    plain = torch.matmul(relative_weights(*given[:2], *given[3:], mask), given[2])
    with torch.no_grad():
        found = by_sdpa(given, mask, True)
    assert found.dtype == torch.bfloat16
    error = (plain.double() - exact).abs().max().item()
    assert (found.double() - exact).abs().max().item() <= 2 * error + 1e-9


def test_dropout_is_on_the_weights() -> None:
    given = inputs(5, 5, False, True)
    given[2] = torch.eye(5).expand(B, H, 5, 5)
    weights = relative_weights(*given[:2], *given[3:])
    dropped = by_sdpa(given, None, True, rate=0.5)
    kept = dropped != 0
    assert 0.2 < kept[weights > 0].float().mean() < 0.8
    torch.testing.assert_close(dropped[kept], weights[kept] * 2, atol=1e-5, rtol=1e-5)


def test_which_path_is_taken_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes SDPA in any case."""
    cpu = torch.zeros(1, 1, 1, 1)

    class OnCUDA:
        device = torch.device("cuda")
        shape = cpu.shape

    for causal in (True, False):
        assert policy.relative_path(OnCUDA(), causal) == "sdpa"  # type: ignore[arg-type]
    assert policy.relative_path(cpu, True) == "tiles"
    assert policy.relative_path(cpu, False) == "products"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert policy.relative_path(cpu, True) == "products"
    with modes.compiling_a_step():
        assert policy.relative_path(cpu, True) == "sums"
