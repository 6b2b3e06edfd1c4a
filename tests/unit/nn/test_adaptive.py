"""Adaptive embedding and softmax against the plain formulas."""

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from manyheads.errors import ConfigError
from manyheads.nn.heads.adaptive import AdaptiveEmbedding, AdaptiveHead, Clusters

V, D, N = 30, 8, 40
KINDS = [
    {"cutoffs": (), "d_embed": 8, "div_value": 1},
    {"cutoffs": (), "d_embed": 5, "div_value": 1},
    {"cutoffs": (7, 16), "d_embed": 8, "div_value": 1},
    {"cutoffs": (7, 16), "d_embed": 5, "div_value": 1},
    {"cutoffs": (7, 16), "d_embed": 8, "div_value": 2},
    {"cutoffs": (4, 10), "d_embed": 16, "div_value": 4},
]


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def head_of(kind: Any) -> AdaptiveHead:
    torch.manual_seed(0)
    head = AdaptiveHead(V, D, **kind).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


def test_probabilities_sum_to_one(kind: Any) -> None:
    log_probs = head_of(kind).log_probs(torch.randn(3, N, D, dtype=torch.float64))
    assert log_probs.shape == (3, N, V)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3, N, dtype=torch.float64))


def test_a_head_begins_at_the_shares_of_counts(kind: Any) -> None:
    counts = torch.randint(0, 9, (V,), dtype=torch.float64)
    counts[3] = 0
    head = head_of(kind)
    head.begin_at(counts)
    shares = counts.clamp(min=0.5)
    torch.testing.assert_close(head.log_probs(torch.zeros(D, dtype=torch.float64)), (shares / shares.sum()).log())


def test_losses_are_those_of_the_probabilities_in_the_order_of_tokens(kind: Any) -> None:
    head = head_of(kind)
    hidden, targets = torch.randn(N, D, dtype=torch.float64), torch.randint(0, V, (N,))
    wanted = -head.log_probs(hidden).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(head.token_losses(hidden, targets), wanted)


def test_loss_and_gradients_are_those_of_the_probabilities(kind: Any) -> None:
    head = head_of(kind)
    hidden = torch.randn(4, 10, D, dtype=torch.float64, requires_grad=True)
    targets, keep = torch.randint(0, V, (4, 10)), torch.rand(4, 10) < 0.8
    plain = -head.log_probs(hidden).gather(2, targets[..., None])[..., 0][keep].sum()
    loss, nll = head.loss(hidden, targets, keep, chunk_tokens=7)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(nll, plain)
    inputs = (hidden, *head.parameters())
    for mine, wanted in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(plain, inputs), strict=True):
        torch.testing.assert_close(mine, wanted)


def test_a_batch_of_the_shortlist_alone_leaves_the_tails_alone() -> None:
    head = head_of(KINDS[4])
    loss, _ = head.loss(
        torch.randn(1, 5, D, dtype=torch.float64), torch.tensor([[0, 3, 6, 1, 2]]), torch.ones(1, 5).bool()
    )
    loss.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in head.tables[1:])


def test_embedding_is_a_lookup_and_a_projection(kind: Any) -> None:
    torch.manual_seed(0)
    embedding = AdaptiveEmbedding(V, D, **kind)
    ids = torch.randint(0, V, (2, 9))
    out = embedding(ids)
    assert out.shape == (2, 9, D)
    for row, position in ((0, 0), (1, 8), (0, 4)):
        token = int(ids[row, position])
        index = next(i for i, (low, high) in enumerate(embedding.clusters.ranges) if low <= token < high)
        vector = embedding.tables[index][token - embedding.clusters.ranges[index][0]]
        if embedding.projections is not None:
            vector = embedding.projections[index] @ vector
        torch.testing.assert_close(out[row, position], vector * D**0.5)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in embedding.parameters())


def test_tables_can_be_shared() -> None:
    kind = KINDS[4]
    embedding, head = AdaptiveEmbedding(V, D, **kind), AdaptiveHead(V, D, **kind)
    assert [table.shape for table in embedding.tables] == [table.shape for table in head.tables]
    head.tables = embedding.tables
    assert all(a is b for a, b in zip(embedding.tables, head.tables, strict=True))


def test_bfloat16_has_float32_statistics() -> None:
    head = AdaptiveHead(V, D, **KINDS[4])
    hidden, targets = torch.randn(N, D), torch.randint(0, V, (N,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head.log_probs(hidden).dtype == torch.float32
        loss, _ = head.loss(hidden[None], targets[None], torch.ones(1, N).bool())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, head.token_losses(hidden, targets).sum(), rtol=2e-2, atol=0.0)


def test_gradient_check() -> None:
    head = head_of(KINDS[5])
    hidden = torch.randn(1, 6, D, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[0, 5, 11, 29, 3, 9]])
    assert torch.autograd.gradcheck(lambda h: head.loss(h, targets, torch.ones(1, 6).bool())[0], hidden)


@pytest.mark.parametrize("cutoffs", [(5, 5), (7, 3), (0, 4), (30,), (31,)])
def test_cutoffs_that_do_not_rise(cutoffs: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must increase"):
        inspect.unwrap(Clusters.__init__)(object.__new__(Clusters), V, cutoffs, 8, 1)


@pytest.mark.parametrize("stray", [-100, -1, V, V + 5])
def test_an_id_outside_the_vocabulary_is_refused(kind: Any, stray: int) -> None:
    """As by any table; no vector of zeros, and no loss that nobody wrote."""
    ids, head = torch.tensor([3, stray]), head_of(kind)
    embedding = AdaptiveEmbedding(V, D, cutoffs=kind["cutoffs"], d_embed=kind["d_embed"], div_value=kind["div_value"])
    for refused in (
        lambda: embedding(ids),
        lambda: head.token_losses(torch.zeros(2, D, dtype=torch.float64), ids),
        lambda: head.loss(torch.zeros(2, D, dtype=torch.float64), ids, torch.ones(2, dtype=torch.bool)),
    ):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            refused()


@pytest.mark.parametrize("div_value", [0, -2])
def test_a_div_value_below_one(div_value: int) -> None:
    with pytest.raises(ConfigError, match=f"div_value is {div_value}; it must be at least 1"):
        AdaptiveEmbedding(V, D, cutoffs=(4, 10), d_embed=8, div_value=div_value)


def test_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="no width"):
        inspect.unwrap(Clusters.__init__)(object.__new__(Clusters), V, (4, 10), 8, 4)
    with pytest.raises(ConfigError, match=r"label_smoothing is 0\.1"):
        head_of(KINDS[2]).loss(
            torch.randn(1, 1, D), torch.zeros(1, 1).long(), torch.ones(1, 1).bool(), label_smoothing=0.1
        )


def test_the_oracle_is_not_the_subject() -> None:
    """One token by hand: cluster 2 of three."""
    head = head_of(KINDS[4])
    hidden = torch.randn(D, dtype=torch.float64)
    assert head.cluster_weight is not None
    assert head.cluster_bias is not None
    first = torch.cat([head.tables[0], head.cluster_weight]) @ (hidden @ head.projections[0])
    first = F.log_softmax(first + torch.cat([head.biases[0], head.cluster_bias]), 0)
    tail = F.log_softmax(head.tables[2] @ (hidden @ head.projections[2]) + head.biases[2], 0)
    torch.testing.assert_close(head.log_probs(hidden)[20], first[7 + 1] + tail[20 - 16])
