"""Sampled softmax: how candidates are drawn, and that the loss tends to the full softmax's."""

import inspect

import pytest
import torch
import torch.nn.functional as F

from manyheads.errors import ConfigError
from manyheads.nn.heads.adaptive import AdaptiveHead
from manyheads.nn.heads.linear import LinearHead, LogUniformCandidates, sampled_loss

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
            for _ in range(3000)
        ]
    )
    estimate = (losses + true).double().exp().mean(0)
    torch.testing.assert_close(estimate, full.double().logsumexp(1).exp(), rtol=0.1, atol=0.0)


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


def test_a_head_takes_candidates_in_place_of_its_vocabulary() -> None:
    torch.manual_seed(0)
    head = LinearHead(D, V, bias=True)
    hidden, targets = torch.randn(N, D, requires_grad=True), torch.randint(0, V, (N,))
    keep = torch.arange(N) != 3
    torch.manual_seed(5)
    loss, nll = head.loss(hidden, targets, keep, num_sampled=12)
    candidates = LogUniformCandidates(V, 12)
    torch.manual_seed(5)
    drawn = candidates.draw()
    wanted = sampled_loss(hidden[keep], targets[keep], head.weight, head.bias, drawn, candidates.log_inclusion)
    torch.testing.assert_close(loss, wanted.sum())
    assert nll.item() == loss.item()
    assert not nll.requires_grad
    loss.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad[3].eq(0).all()
    assert hidden.grad[keep].ne(0).any()


def test_candidates_go_with_no_loss_over_the_whole_vocabulary() -> None:
    head, keep = LinearHead(D, V), torch.ones(N, dtype=torch.bool)
    with pytest.raises(ConfigError, match="num_sampled is 12"):
        head.loss(torch.randn(N, D), torch.randint(0, V, (N,)), keep, num_sampled=12, label_smoothing=0.1)


def test_an_adaptive_softmax_has_no_candidates() -> None:
    head = AdaptiveHead(V, D, cutoffs=(10,), d_embed=D, div_value=1)
    with pytest.raises(ConfigError, match="leave cutoffs empty"):
        head.loss(torch.randn(N, D), torch.randint(0, V, (N,)), torch.ones(N, dtype=torch.bool), num_sampled=12)
