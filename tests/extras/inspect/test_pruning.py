"""Pruned models compute what masked ones compute: in one pass, in segments, and in a search."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.architectures.head_names import Head, all_heads, parse_heads, prunable
from manyheads.architectures.pretrained import load, save_pretrained
from manyheads.architectures.reformer.presets import SEQ2SEQ_PRESETS
from manyheads.architectures.transformer.config import TransformerConfig
from manyheads.architectures.transformer.presets import PRESETS
from manyheads.architectures.transformer_xl.config import TransformerXLConfig
from manyheads.catalogue import build_model
from manyheads.errors import ConfigError, RequestError, ShapeError
from manyheads.extras.inspect.pruning import attention_layers, masks_without, prune
from manyheads.nn.attention.head_masks import HeadMasks
from manyheads.nn.attention.kinds import AdditiveAttentionConfig

REMOVED = ("encoder.0.self:0", "encoder.1.self", "decoder.0.self", "decoder.0.cross", "decoder.1.cross:1")


def built(config: Any) -> Any:
    """A model in evaluation mode, with biases and norms that are not those of a new one."""
    torch.manual_seed(0)
    model = build_model(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def translator(**changes: Any) -> Any:
    return built(dataclasses.replace(PRESETS["debug"], source_vocab_size=30, target_vocab_size=30, **changes))


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(3, 30, (3, 7)), torch.tensor([7, 4, 5]), torch.randint(3, 30, (3, 9))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_position": "pre", "bias": False},
        {"attention": AdditiveAttentionConfig(), "num_decoder_heads": 2},
        {"head_dim": 5, "value_dim": 3},
    ],
)
def test_a_pruned_translator_equals_the_masked_one(changes: dict[str, Any], tmp_path: Path) -> None:
    model = translator(**changes)
    source, lengths, target = inputs()
    removed = parse_heads(REMOVED, model.config)
    smaller = prune(model, removed)
    assert smaller.config.encoder_heads == (3, 0)
    assert smaller.config.decoder_heads[0] == smaller.config.cross_heads[0] == 0
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        masked = model.body(source, lengths, target, masks_without(model, removed))
        pruned = smaller.body(source, lengths, target)
        torch.testing.assert_close(pruned, masked, atol=1e-5, rtol=0)
        assert (pruned - model.body(source, lengths, target)).abs().max() > 0.01
        # A search: other rows are continued, a sentence ends, and the buffers grow.
        state = smaller.start(source, lengths)
        beams = torch.tensor([[0, 0], [1, 1], [2, 2]])
        for place in range(target.shape[1]):
            chosen = target[:, place : place + 1].repeat_interleave(1 if place == 0 else 2, 0)
            found, state = smaller.step(chosen, state)
            state = state.reorder(beams if place == 0 else torch.tensor([[1, 0], [2, 3], [4, 4]]))
        wanted = smaller.log_probs(source, lengths, target)[:, -1]
        torch.testing.assert_close(found[::2], wanted, atol=1e-5, rtol=0)
        assert len(state.reorder(torch.tensor([[0, 1], [4, 5]])).source.keys[0]) == 2
    save_pretrained(smaller, tmp_path / "small")
    again = load(tmp_path / "small")
    with torch.no_grad():
        torch.testing.assert_close(again.body(source, lengths, target), pruned, atol=0, rtol=0)
    twice = prune(again, parse_heads(["encoder.0.self:1"], again.config))
    assert twice.config.encoder_heads == (2, 0)


XL = TransformerXLConfig(
    vocab_size=30, d_model=16, num_heads=3, head_dim=5, d_ff=24, num_layers=3, memory_len=6, share_biases=True
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_position": "pre", "share_biases": False},
        {"attention": "relative_learned", "max_len": 8},
        {"attention": "absolute"},
        {"attention": "absolute_learned", "max_len": 8},
    ],
)
def test_a_pruned_language_model_equals_the_masked_one(changes: dict[str, Any]) -> None:
    model = built(dataclasses.replace(XL, **changes))
    torch.manual_seed(1)
    for attention in attention_layers(model)["decoder"]:
        for parameter in attention.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(0, 30, (2, 11))
    lengths = torch.tensor([6, 3])
    removed = parse_heads(["decoder.0.self:0,2", "decoder.1.self"], model.config)
    smaller, masks = prune(model, removed), masks_without(model, removed)
    assert smaller.config.layer_heads == (1, 0, 3)
    states: list[Any] = [None, None, model.start(2), smaller.start(2)]
    with torch.no_grad():
        for segment, real in ((tokens[:, :5], None), (tokens[:, 5:], lengths)):
            hidden = []
            for number, (one, factors) in enumerate(((model, masks), (smaller, None)) * 2):
                out, states[number] = one.body(segment, real, states[number], head_masks=factors)
                hidden.append(out[:, :3])
            assert max((other - hidden[0]).abs().max() for other in hidden[1:]) < 1e-5
            assert (hidden[0] - model.body(segment)[0][:, :3]).abs().max() > 1e-3
        # Token by token, with lanes in another order in between.
        whole, state = model.start(2), smaller.start(2)
        for place in range(11):
            new = tokens[:, place : place + 1]
            masked, whole = model.body(new, None, whole, masks)
            pruned, state = smaller.body(new, None, state)
            torch.testing.assert_close(pruned, masked, atol=1e-5, rtol=0)
            if place == 5:
                whole, state = (one.reorder(torch.tensor([1, 0])) for one in (whole, state))


def test_factors_between_zero_and_one_and_a_row_each() -> None:
    model = translator()
    source, lengths, target = inputs()
    masks = masks_without(model, rows=3)
    assert masks.cross is not None
    masks.cross[1][1, 2] = 0.0  # for the second row only
    alone = masks_without(model, [Head("cross", 1, 2)])
    with torch.no_grad():
        found = model.body(source, lengths, target, masks)
        whole, without = model.body(source, lengths, target), model.body(source, lengths, target, alone)
    torch.testing.assert_close(found[[0, 2]], whole[[0, 2]], atol=1e-6, rtol=0)
    torch.testing.assert_close(found[1], without[1], atol=1e-6, rtol=0)
    assert not torch.allclose(found[1], whole[1], atol=1e-3)


def test_names_of_heads() -> None:
    config = TransformerConfig(num_encoder_layers=2, num_decoder_layers=1, d_model=8, num_heads=2, encoder_heads=(2, 0))
    assert [str(head) for head in all_heads(config)] == [
        "encoder.0.self:0",
        "encoder.0.self:1",
        "decoder.0.self:0",
        "decoder.0.self:1",
        "decoder.0.cross:0",
        "decoder.0.cross:1",
    ]
    asked = ["decoder.0.cross", "encoder.0.self:1,0", "encoder.0.self:1"]
    assert parse_heads(asked, config) == [head for head in all_heads(config) if head.kind != "decoder"]
    wrongs = ("encoder.0.self:2", "encoder.1.self", "encoder.0.cross", "encoder.0.self:", "decoder.0.cross:0,2", "")
    for wrong in wrongs:
        with pytest.raises(RequestError, match=r"there is no head .*encoder.0.self:0 to 1, encoder.1.self none"):
            parse_heads([wrong], config)


def test_mistakes() -> None:
    model = translator()
    with pytest.raises(RequestError, match="no head is removed"):
        prune(model, [])
    with pytest.raises(RequestError, match=r"there is no head encoder\.2\.self:0"):
        prune(model, [Head("encoder", 2, 0)])
    with pytest.raises(RequestError, match="this model is a reformer-seq2seq, whose heads can be neither"):
        prunable(SEQ2SEQ_PRESETS["debug"])
    with pytest.raises(ConfigError, match=r"cross_heads is \[1, 2\]; give 6 numbers"):
        TransformerConfig(cross_heads=(1, 2))
    with pytest.raises(ConfigError, match="from 0 to 8"):
        TransformerConfig(encoder_heads=(9, 8, 8, 8, 8, 8))
    with pytest.raises(ConfigError, match=r"layer_heads is \[4, 3, 3\]; give 3 numbers.*from 0 to 3"):
        dataclasses.replace(XL, layer_heads=(4, 3, 3))
    with pytest.raises(ConfigError, match=r"cannot share u and v; set model.share_biases to false"):
        dataclasses.replace(XL, layer_heads=(1, 3, 3))
    source, lengths, target = inputs()
    with pytest.raises(ShapeError, match=r"head mask of shape \(3,\) does not fit 3 rows of 4 heads"):
        model.body(source, lengths, target, HeadMasks(encoder=[torch.ones(3)] * 2))
    with pytest.raises(ShapeError, match="1 head masks for 2 layers"):
        model.body(source, lengths, target, HeadMasks(cross=[torch.ones(4)]))
