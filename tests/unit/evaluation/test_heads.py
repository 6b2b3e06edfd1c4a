"""Figures of heads: against the definition, and on heads whose behaviour is known by construction."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.table import build_model
from manyheads.architectures.transformer.presets import debug
from manyheads.architectures.transformer.pruning import Head, heads_of, masks_without
from manyheads.data.batch import PairBatch
from manyheads.errors import DataError
from manyheads.evaluation.heads import (
    head_ablations,
    head_importance,
    head_looks,
    least_important,
    normalised_importance,
)


@pytest.fixture(scope="module")
def model() -> Seq2Seq:
    torch.manual_seed(0)
    built: Seq2Seq = build_model(dataclasses.replace(debug(), source_vocab_size=20, target_vocab_size=20))
    return built.eval()


@pytest.fixture(scope="module")
def batch() -> PairBatch:
    torch.manual_seed(1)
    source, target = torch.randint(3, 20, (3, 6)), torch.randint(3, 20, (3, 7))
    return PairBatch(source, torch.tensor([6, 3, 5]), target, torch.tensor([7, 4, 6]), torch.arange(3))


def test_importance_is_the_change_of_the_loss(model: Seq2Seq, batch: PairBatch) -> None:
    found = head_importance(model, [batch])
    step, tokens = 1e-2, batch.num_target_tokens()
    for head in (Head("encoder", 1, 2), Head("decoder", 2, 4), Head("cross", 1, 1)):
        changes = []
        for row in range(3):
            one = batch.rows(slice(row, row + 1))
            losses = []
            for sign in (-1, 1):
                masks = masks_without(model.config, (), model.head.weight)
                getattr(masks, head.kind)[head.layer - 1][head.number - 1] += sign * step
                with torch.no_grad():
                    losses.append(float(model(one, head_masks=masks).loss_sum))
            changes.append(abs(losses[1] - losses[0]) / (2 * step))
        assert found[head] == pytest.approx(sum(changes) / tokens, rel=0.02, abs=2e-5)
    assert list(found) == heads_of(model.config)
    norms = normalised_importance(found)
    assert math.hypot(*(norms[head] for head in norms if head[:2] == ("cross", 2))) == pytest.approx(1)
    [first, *_] = least_important(found, 3)
    assert norms[first] == min(norms.values())
    with pytest.raises(DataError, match="no target token"):
        head_importance(model, [])


def test_a_head_without_effect_costs_nothing(model: Seq2Seq, batch: PairBatch) -> None:
    layer = model.body.encoder.layers[0].self_attn
    weight = layer.out_proj.weight.detach().clone()
    try:
        with torch.no_grad():
            layer.out_proj.weight[:, : layer.head_dim] = 0.0  # head 1 is not read
        importance, (nats, ablations) = head_importance(model, [batch]), head_ablations(model, [batch])
    finally:
        layer.out_proj.weight.data.copy_(weight)
    dead = Head("encoder", 1, 1)
    assert importance[dead] == ablations[dead] == 0.0
    assert nats > 1
    assert sum(abs(change) > 1e-6 for change in ablations.values()) > 20


def test_where_heads_look(model: Seq2Seq, batch: PairBatch) -> None:
    looks = head_looks(model, [batch])
    attention = model.body.decoder.layers[0].self_attn
    weights = [p.detach().clone() for p in attention.parameters()]
    try:
        with torch.no_grad():
            attention.q_proj.weight.zero_()
            attention.q_proj.bias.zero_()  # every weight of a query is equal
        even = head_looks(model, [batch])[Head("decoder", 1, 1)]
    finally:
        for parameter, value in zip(attention.parameters(), weights, strict=True):
            parameter.data.copy_(value)
    counts = [place + 1 for length in (6, 3, 5) for place in range(length)]  # keys that each real query sees
    assert even.entropy == pytest.approx(sum(math.log2(count) for count in counts) / len(counts), abs=1e-5)
    assert even.confidence == pytest.approx(sum(1 / count for count in counts) / len(counts), abs=1e-5)
    assert looks[Head("cross", 1, 1)].offset is None
    one = looks[Head("encoder", 1, 1)]
    assert one.offset is not None
    assert one.offset_share is not None
    assert 0 < one.offset_share <= 1
