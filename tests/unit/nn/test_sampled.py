"""Sampled softmax: how candidates are drawn, and that the loss tends to the full softmax's."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F

from manyheads.errors import ConfigError
from manyheads.nn.heads.sampled import LogUniformCandidates, sampled_loss

V, D, N = 40, 6, 9


def test_frequencies_are_log_uniform() -> None:
    candidates = LogUniformCandidates(V, 1)
    assert candidates.probabilities.sum().item() == pytest.approx(1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([candidates.draw(generator) for _ in range(20_000)])
    seen = torch.bincount(drawn, minlength=V).double() / len(drawn)
    torch.testing.assert_close(seen, candidates.probabilities, atol=0.012, rtol=0.0)


def test_chance_to_be_among_the_candidates() -> None:
    candidates = LogUniformCandidates(V, 12)
    generator = torch.Generator().manual_seed(0)
    seen = torch.zeros(V)
    for _ in range(4000):
        drawn = candidates.draw(generator)
        assert len(drawn) == len(drawn.unique()) <= 12
        seen[drawn] += 1
    torch.testing.assert_close(seen / 4000, candidates.log_inclusion.exp(), atol=0.035, rtol=0.0)


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_partition_function_is_unbiased(with_bias: bool) -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(N, D), torch.randn(V, D), torch.randint(0, V, (N,))
    bias = torch.randn(V) if with_bias else None
    full = F.linear(hidden, weight, bias)
    true = full.gather(1, targets[:, None])[:, 0]
    candidates, generator = LogUniformCandidates(V, 20), torch.Generator().manual_seed(1)
    losses = torch.stack(
        [
            sampled_loss(hidden, targets, weight, bias, candidates.draw(generator), candidates.log_inclusion)
            for _ in range(8000)
        ]
    )
    estimate = (losses + true).double().exp().mean(0)
    torch.testing.assert_close(estimate, full.double().logsumexp(1).exp(), rtol=0.06, atol=0.0)


def test_with_all_candidates_it_is_the_full_softmax() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(N, D, requires_grad=True)
    weight, targets = torch.randn(V, D, requires_grad=True), torch.randint(0, V, (N,))
    sampled = sampled_loss(hidden, targets, weight, None, torch.arange(V), torch.zeros(V))
    full = F.cross_entropy(F.linear(hidden, weight), targets, reduction="none")
    torch.testing.assert_close(sampled, full)
    ours = torch.autograd.grad(sampled.sum(), (hidden, weight), retain_graph=True)
    for mine, wanted in zip(ours, torch.autograd.grad(full.sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(mine, wanted)


def test_more_draws_come_nearer() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(N, D), torch.randn(V, D), torch.randint(0, V, (N,))
    full = F.cross_entropy(F.linear(hidden, weight), targets).item()
    gaps = []
    for draws in (5, 50, 500):
        candidates, generator = LogUniformCandidates(V, draws), torch.Generator().manual_seed(2)
        losses = [
            sampled_loss(hidden, targets, weight, None, candidates.draw(generator), candidates.log_inclusion).mean()
            for _ in range(300)
        ]
        gaps.append(abs(torch.stack(losses).mean().item() - full))
    assert gaps[0] > gaps[1] > gaps[2]


@pytest.mark.parametrize(("vocab_size", "num_draws"), [(1, 5), (10, 0)])
def test_sizes_that_make_no_sense(vocab_size: int, num_draws: int) -> None:
    with pytest.raises(ConfigError, match=f"{vocab_size} and num_draws {num_draws}"):
        inspect.unwrap(LogUniformCandidates.__init__)(object.__new__(LogUniformCandidates), vocab_size, num_draws)
