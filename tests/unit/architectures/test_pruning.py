"""Pruned models compute what masked ones compute, in one pass and in a search."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.architectures.pretrained import load, save_pretrained
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.table import build_model
from manyheads.architectures.transformer.config import TransformerConfig
from manyheads.architectures.transformer.presets import debug
from manyheads.architectures.transformer.pruning import (
    Head,
    masks_without,
    parse_heads,
    prune,
    transformer_of,
)
from manyheads.errors import ConfigError, RequestError
from manyheads.nn.attention.kinds import AdditiveAttentionConfig

REMOVED = ("encoder.1.1", "encoder.2", "decoder.1", "cross.1", "cross.2.2")


def model_of(**changes: Any) -> Seq2Seq:
    torch.manual_seed(0)
    config = dataclasses.replace(debug(), source_vocab_size=30, target_vocab_size=30, **changes)
    model: Seq2Seq = build_model(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source, target = torch.randint(3, 30, (3, 7)), torch.randint(3, 30, (3, 6))
    return source, torch.tensor([7, 4, 5]), target


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_position": "pre", "bias": False},
        {"attention": AdditiveAttentionConfig(), "num_decoder_heads": 2},
        {"head_dim": 5, "value_dim": 3},
    ],
)
def test_a_pruned_model_equals_the_masked_one(changes: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(**changes)
    source, lengths, target = inputs()
    removed = parse_heads(REMOVED, model.config)
    smaller = prune(model, removed)
    assert smaller.config.encoder_heads == (3, 0)
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        masked = model.body(source, lengths, target, masks_without(model.config, removed, model.head.weight))
        pruned = smaller.body(source, lengths, target)
        torch.testing.assert_close(pruned, masked, atol=1e-5, rtol=0)
        assert (pruned - model.body(source, lengths, target)).abs().max() > 0.01
        state = smaller.start(source, lengths).reorder(torch.tensor([[0, 0], [1, 1], [2, 2]]))
        for place in range(target.shape[1]):
            found, state = smaller.step(target[:, place : place + 1].repeat_interleave(2, 0), state)
        wanted = smaller.log_probs(source, lengths, target)[:, -1]
        torch.testing.assert_close(found[::2], wanted, atol=1e-5, rtol=0)
    save_pretrained(smaller, tmp_path / "small")
    again = load(tmp_path / "small")
    with torch.no_grad():
        torch.testing.assert_close(again.body(source, lengths, target), pruned, atol=0, rtol=0)
    twice = prune(again, parse_heads(["encoder.1.2"], again.config))
    assert twice.config.encoder_heads == (2, 0)


def test_factors_between_zero_and_one_and_a_row_each() -> None:
    model = model_of()
    source, lengths, target = inputs()
    masks = masks_without(model.config, (), model.head.weight, rows=3)
    assert masks.cross is not None
    masks.cross[1][1, 2] = 0.0  # for the second row only
    alone = masks_without(model.config, [Head("cross", 2, 3)], model.head.weight)
    with torch.no_grad():
        found = model.body(source, lengths, target, masks)
        whole, without = model.body(source, lengths, target), model.body(source, lengths, target, alone)
    torch.testing.assert_close(found[[0, 2]], whole[[0, 2]], atol=1e-6, rtol=0)
    torch.testing.assert_close(found[1], without[1], atol=1e-6, rtol=0)
    assert not torch.allclose(found[1], whole[1], atol=1e-3)


def test_mistakes() -> None:
    model = model_of()
    with pytest.raises(RequestError, match=r"no head 'encoder.3.1'.*encoder 4 4, decoder 4 4, cross 4 4"):
        parse_heads(["encoder.3.1"], model.config)
    with pytest.raises(ConfigError, match="no head is removed"):
        prune(model, [])
    with pytest.raises(RequestError, match="is a Linear; heads can be"):
        transformer_of(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"cross_heads is \[1, 2\]; give 6 numbers"):
        TransformerConfig(cross_heads=(1, 2))
    with pytest.raises(ConfigError, match="from 0 to 8"):
        TransformerConfig(encoder_heads=(9, 8, 8, 8, 8, 8))
