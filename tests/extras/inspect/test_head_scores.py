"""Figures of heads: against the definition, and on heads whose behaviour is known by construction."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.data.batch import PairBatch, SegmentBatch
from manyheads.errors import DataError
from manyheads.extras.inspect.heads.names import Head, all_heads
from manyheads.extras.inspect.heads.scores import (
    attention_layers,
    head_ablations,
    head_importance,
    head_looks,
    masked_heads,
    masks_without,
    nats_per_token,
    normalised_importance,
)
from manyheads.models.composites import LanguageModel, Seq2Seq
from manyheads.models.transformer.config import PRESETS
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.nn.kernels.modes import fast


@pytest.fixture(scope="module")
def model() -> Seq2Seq:
    torch.manual_seed(0)
    built: Seq2Seq = build_model(dataclasses.replace(PRESETS["debug"], source_vocab_size=20, target_vocab_size=20))
    return built.double().eval()


@pytest.fixture(scope="module")
def batch() -> PairBatch:
    torch.manual_seed(1)
    source, target = torch.randint(3, 20, (3, 6)), torch.randint(3, 20, (3, 7))
    return PairBatch(source, torch.tensor([6, 3, 5]), target, torch.tensor([7, 4, 6]), torch.arange(3))


def test_importance_is_the_change_of_the_loss(model: Seq2Seq, batch: PairBatch) -> None:
    found = head_importance(model, [batch])
    step, tokens = 1e-4, batch.num_target_tokens()  # short, because ReLU has kinks
    for head in (Head("encoder", 0, 1), Head("decoder", 1, 3), Head("cross", 0, 0)):
        changes = []
        for row in range(3):
            one = batch.rows(slice(row, row + 1))
            losses = []
            for sign in (-1, 1):
                masks = masks_without(model)
                masks[attention_layers(model)[head.kind][head.layer]][head.number] += sign * step
                with torch.no_grad(), masked_heads(model, masks):
                    losses.append(float(model(one).loss_sum))
            changes.append(abs(losses[1] - losses[0]) / (2 * step))
        assert found[head] == pytest.approx(sum(changes) / tokens, rel=0.005, abs=2e-5)
    assert list(found) == all_heads(model.config)
    norms = normalised_importance(found)
    assert math.hypot(*(norms[head] for head in norms if head[:2] == ("cross", 1))) == pytest.approx(1)
    with pytest.raises(DataError, match="no target token"):
        head_importance(model, [])


def test_a_head_without_effect_costs_nothing(model: Seq2Seq, batch: PairBatch) -> None:
    layer = model.body.encoder.layers[0].self_attn
    weight = layer.out_proj.weight.detach().clone()
    try:
        with torch.no_grad():
            layer.out_proj.weight[:, : layer.head_dim] = 0.0  # head 0 is not read
        importance, (nats, ablations) = head_importance(model, [batch]), head_ablations(model, [batch])
    finally:
        layer.out_proj.weight.data.copy_(weight)
    dead = Head("encoder", 0, 0)
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
        even = head_looks(model, [batch])[Head("decoder", 0, 0)]
    finally:
        for parameter, value in zip(attention.parameters(), weights, strict=True):
            parameter.data.copy_(value)
    counts = [place + 1 for length in (6, 3, 5) for place in range(length)]  # keys that each real query sees
    assert even.entropy == pytest.approx(sum(math.log2(count) for count in counts) / len(counts), abs=1e-5)
    assert even.confidence == pytest.approx(sum(1 / count for count in counts) / len(counts), abs=1e-5)
    assert looks[Head("cross", 0, 0)].offset is None
    one = looks[Head("encoder", 0, 0)]
    assert one.offset is not None
    assert one.offset_share is not None
    assert 0 < one.offset_share <= 1


SEGMENTS = [
    SegmentBatch(
        tokens=torch.randint(0, 20, (2, 4), generator=torch.Generator().manual_seed(number)),
        targets=torch.randint(0, 20, (2, 4), generator=torch.Generator().manual_seed(number + 9)),
        lengths=torch.tensor([4, 4 - number]),
        resets=torch.zeros(2, dtype=torch.bool),
        sample_ids=torch.arange(2),
    )
    for number in range(2)
]


@pytest.fixture(scope="module")
def language_model() -> LanguageModel:
    torch.manual_seed(0)
    config = TransformerXLConfig(vocab_size=20, d_model=16, num_heads=2, d_ff=16, num_layers=2, memory_len=4)
    built: LanguageModel = build_model(config)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return built.double().eval()


def test_heads_of_a_language_model_are_judged_with_its_memory(language_model: LanguageModel) -> None:
    found, looks = head_importance(language_model, SEGMENTS), head_looks(language_model, SEGMENTS)
    assert list(found) == list(looks) == all_heads(language_model.config)
    tokens = sum(batch.num_target_tokens() for batch in SEGMENTS)
    head, step, changes = Head("decoder", 1, 0), 1e-4, 0.0
    for row in range(2):
        # Factors of the second segment's row only: memory has no gradient.
        with torch.no_grad():
            state = None
            for batch in SEGMENTS:
                losses = []
                for sign in (-1, 1):
                    masks = masks_without(language_model, rows=2)
                    masks[attention_layers(language_model)[head.kind][head.layer]][row, head.number] += sign * step
                    with masked_heads(language_model, masks):
                        losses.append(float(language_model(batch, state).loss_sum))
                state = language_model(batch, state).state
                changes += abs(losses[1] - losses[0]) / (2 * step)
    assert found[head] == pytest.approx(changes / tokens, rel=0.005, abs=2e-5)
    whole = nats_per_token(language_model, SEGMENTS)
    first = float(language_model(SEGMENTS[1]).nll_sum)  # without memory
    with torch.no_grad():
        state = language_model(SEGMENTS[0]).state
        second = float(language_model(SEGMENTS[1], state).nll_sum)
        sums = float(language_model(SEGMENTS[0]).nll_sum) + second
    assert abs(first - second) > 1e-3
    assert whole == pytest.approx(sums / tokens, abs=1e-6)
    assert all(look.offset is not None and -7 <= look.offset <= 0 for look in looks.values())


GOLDEN = json.loads((Path(__file__).resolve().parents[2] / "golden" / "head_scores.json").read_text("utf-8"))


def known(name: str) -> tuple[Any, list[Any]]:
    """A model and its batches, without random numbers. `GOLDEN` has figures that an earlier version computed."""
    config: Any = dataclasses.replace(PRESETS["debug"], source_vocab_size=20, target_vocab_size=20)
    if name != "transformer":
        sizes = {"d_model": 16, "num_heads": 2, "d_ff": 16, "num_layers": 2, "memory_len": 4, "max_len": 8}
        config = TransformerXLConfig(vocab_size=20, **sizes, attention=name)  # type: ignore[arg-type]
    model = build_model(config).double().eval()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            waves = torch.sin(1.7 * torch.arange(parameter.numel(), dtype=torch.float64) + index)
            parameter.copy_((parameter.dim() == 1) + 0.4 * waves.view_as(parameter))

    def ids(rows: int, length: int, size: int, first: int) -> torch.Tensor:
        return first + torch.arange(rows * length).view(rows, length) * 7 % size

    if name == "transformer":
        lengths = (torch.tensor([6, 3, 5]), torch.tensor([7, 4, 6]))
        return model, [PairBatch(ids(3, 6, 17, 3), lengths[0], ids(3, 7, 13, 5), lengths[1], torch.arange(3))]
    return model, [
        SegmentBatch(
            tokens=ids(2, 4, 19, number),
            targets=ids(2, 4, 17, number + 1),
            lengths=torch.tensor([4, 4 - number]),
            resets=torch.zeros(2, dtype=torch.bool),
            sample_ids=torch.arange(2),
        )
        for number in range(2)
    ]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_figures_are_what_they_were(name: str) -> None:
    model, batches = known(name)
    nats, ablations = head_ablations(model, batches)
    assert nats == pytest.approx(GOLDEN[name]["nats"], rel=1e-9)
    for figures, key in ((ablations, "ablation"), (head_importance(model, batches), "importance")):
        assert {str(head): value for head, value in figures.items()} == pytest.approx(GOLDEN[name][key], rel=1e-6)
    for is_fast in (False, True):
        state = None
        for batch, wanted in zip(batches, GOLDEN[name]["masked"], strict=True):
            masks = masks_without(model, rows=len(batch.sample_ids))
            for index, factors in enumerate(masks.values()):  # factors of any size, of each row and head its own
                factors.copy_(torch.cos(torch.arange(factors.numel()) + index).view_as(factors))
            with torch.no_grad(), masked_heads(model, masks), fast(is_fast):
                output = model(batch, state)
            state = output.state
            assert float(output.nll_sum) == pytest.approx(wanted, rel=1e-9)
