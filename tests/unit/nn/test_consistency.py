"""R-Drop's loss against its formula under autograd, and what a training step makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import RequestError
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.consistency import consistent_loss, plain_consistent_loss
from manyheads.nn.kernels.loss import smoothed_loss
from manyheads.nn.smoothing import SmoothingKind

N, D, V = 23, 6, 11


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()

    return draw(N, D), draw(N, D), torch.randint(0, V, (N,), generator=generator), draw(V, D), draw(V)


def reference(first: Any, second: Any, targets: Any, weight: Any, bias: Any, alpha: float, smoothing: float) -> Any:
    """Liang et al. 2021, eq. 4, halved: word for word, one position at a time."""
    total = torch.zeros((), dtype=first.dtype)
    for h, g, target in zip(first, second, targets, strict=True):
        log_p, log_q = (torch.log_softmax(F.linear(x, weight, bias), -1) for x in (h, g))
        wanted = torch.full_like(log_p, smoothing / V)
        wanted[target] += 1 - smoothing
        likelihood = -(wanted * log_p).sum() - (wanted * log_q).sum()
        divergence = (log_p.exp() * (log_p - log_q)).sum() + (log_q.exp() * (log_q - log_p)).sum()
        total = total + 0.5 * (likelihood + alpha / 2 * divergence)
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 5.0])
@pytest.mark.parametrize(("chunk", "tile"), [(1, 1 << 18), (4, 30), (23, 30), (1000, 100)])
def test_loss_and_gradients_are_the_papers(
    smoothing: float, alpha: float, chunk: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "logit_rows_in_a_tile", lambda rows, vocab_size, device: max(1, tile // vocab_size))
    first, second, targets, weight, bias = tensors()
    loss, nll = consistent_loss(first, second, targets, weight, bias, alpha, smoothing, chunk)
    wanted = reference(first, second, targets, weight, bias, alpha, smoothing)
    torch.testing.assert_close(loss, wanted, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(plain_consistent_loss(first, second, targets, weight, bias, alpha, smoothing), wanted)
    torch.testing.assert_close(nll, reference(first, second, targets, weight, bias, 0.0, 0.0), atol=1e-10, rtol=1e-10)
    assert not nll.requires_grad
    inputs = (first, second, weight, bias)
    ours, theirs = torch.autograd.grad(loss * 0.37, inputs), torch.autograd.grad(wanted * 0.37, inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", ["without_padding", "others"])
def test_smoothing_without_padding(kind: SmoothingKind) -> None:
    first, second, targets, weight, bias = tensors()
    given = (first, second, targets.where(targets != 7, 8), weight, bias, 5.0, 0.3)
    inputs = (first, second, weight, bias)
    loss, wanted = consistent_loss(*given, 4, kind, 7)[0], plain_consistent_loss(*given, kind, 7)
    torch.testing.assert_close(loss, wanted, atol=1e-10, rtol=1e-10)
    assert not torch.isclose(loss, plain_consistent_loss(*given))
    for one, other in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def test_two_equal_passes_are_one() -> None:
    first, _, targets, weight, bias = tensors()
    loss, nll = consistent_loss(first, first, targets, weight, bias, 5.0, 0.1, 7)
    plain, plain_nll = smoothed_loss(first, targets, weight, bias, 0.1, 7)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(nll, plain_nll)


@pytest.mark.parametrize("frozen", range(4))
def test_a_part_that_needs_no_gradient(frozen: int) -> None:
    first, second, targets, weight, bias = tensors()
    parts = [first, second, weight, bias]
    parts[frozen] = parts[frozen].detach()
    inputs = [part for part in parts if part.requires_grad]
    loss, _ = consistent_loss(*parts[:2], targets, *parts[2:], 5.0, 0.1, 7)
    wanted = reference(*parts[:2], targets, *parts[2:], 5.0, 0.1)
    for one, other in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def test_a_second_derivative_is_refused_and_not_taken_for_zero() -> None:
    first, second, targets, weight, bias = tensors()
    loss, _ = consistent_loss(first, second, targets, weight, bias, 5.0, 0.1, 7)
    [grad] = torch.autograd.grad(loss, first, create_graph=True)
    with pytest.raises(RequestError, match="cannot be differentiated again"):
        (grad.square().sum() + weight.sum()).backward()


def test_bfloat16_loses_no_more_than_the_plain_formula() -> None:
    first, second, targets, weight, bias = tensors(torch.float32)
    inputs = (first, second, weight, bias)
    exact_in = [x.detach().double().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(reference(*exact_in[:2], targets, *exact_in[2:], 5.0, 0.1), exact_in)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, nll = consistent_loss(first, second, targets, weight, bias, 5.0, 0.1, 8)
        logs = [torch.log_softmax(F.linear(x, weight, bias).float(), -1) for x in (first, second)]
    assert loss.dtype == nll.dtype == torch.float32
    plain = sum(F.nll_loss(0.9 * log + 0.1 * log.mean(-1, keepdim=True), targets, reduction="sum") for log in logs) / 2
    plain = plain + 1.25 * sum(F.kl_div(b, a, log_target=True, reduction="sum") for a, b in (logs, reversed(logs)))
    theirs = torch.autograd.grad(plain, inputs)
    for one, other, wanted in zip(torch.autograd.grad(loss, inputs), theirs, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one - wanted).abs().max() <= 2 * (other - wanted).abs().max() + 1e-6


def test_padding_is_never_multiplied_and_no_token_is_no_loss() -> None:
    head = LinearHead(D, V)
    hidden, again = torch.randn(2, 2, 4, D).unbind()
    hidden[1, 2:] = again[1, 2:] = float("nan")
    keep = torch.tensor([[True] * 4, [True, True, False, False]])
    targets = torch.randint(0, V, (2, 4))
    loss, _ = head.loss(hidden, targets, keep, chunk_tokens=3, again=again, r_drop=5.0)
    wanted = reference(hidden[keep], again[keep], targets[keep], head.weight, None, 5.0, 0.0)
    torch.testing.assert_close(loss, wanted)
    none, _ = head.loss(hidden, targets, torch.zeros_like(keep), again=again, r_drop=5.0)
    assert none.item() == 0.0
