"""Pruned models compute what masked ones compute: in one pass, in segments, and in a search."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.decoding.model_runner import CompiledSteps
from manyheads.errors import ConfigError, RequestError, ShapeError
from manyheads.extras.inspect.heads.names import Head, all_heads, parse_heads, prunable
from manyheads.extras.inspect.heads.pruning import prune
from manyheads.extras.inspect.heads.scores import attention_layers, masked_heads, masks_without
from manyheads.models.pretrained import load, save_pretrained
from manyheads.models.reformer.config import PRESETS as REFORMERS
from manyheads.models.reformer.config import SEQ2SEQ_PRESETS
from manyheads.models.transformer.config import PRESETS, TransformerConfig
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.nn.attention.settings import AdditiveAttentionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MappedAttentionConfig:
    """A score of another package: queries go through a map that all heads share, and each head has a factor."""

    kind: Literal["mapped"] = "mapped"

    def score(self, num_heads: int, head_dim: int) -> torch.nn.Module:
        class MappedScore(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.map = torch.nn.Linear(head_dim, head_dim)
                self.factor = torch.nn.Parameter(torch.rand(num_heads, 1, 1) + 0.5)

            def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
                scores: torch.Tensor = self.factor * (self.map(query) @ key.transpose(-1, -2))
                return scores

        return MappedScore()


REMOVED = ("encoder.0.self:0", "encoder.1.self:0,1", "decoder.0.self:0", "decoder.0.cross:1", "decoder.1.cross:1")


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


@pytest.mark.one_in(2)
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
    assert smaller.config.encoder_heads == (3, 2)
    assert smaller.config.decoder_heads[0] == smaller.config.cross_heads[0] == model.config.heads_of("decoder") - 1
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        with masked_heads(model, masks_without(model, removed)):
            masked = model.body(source, lengths, target)
            _check_steps(model, source, lengths, target)
        pruned = smaller.body(source, lengths, target)
        torch.testing.assert_close(pruned, masked, atol=1e-5, rtol=0)
        assert (pruned - model.body(source, lengths, target)).abs().max() > 0.01
        _check_steps(smaller, source, lengths, target)
    save_pretrained(smaller, tmp_path / "small")
    again = load(tmp_path / "small")
    with torch.no_grad():
        torch.testing.assert_close(again.body(source, lengths, target), pruned, atol=0, rtol=0)
    twice = prune(again, parse_heads(["encoder.0.self:1"], again.config))
    assert twice.config.encoder_heads == (2, 2)


def test_a_score_of_another_package_keeps_what_all_heads_share() -> None:
    model = translator(attention=MappedAttentionConfig())
    source, lengths, target = inputs()
    removed = parse_heads(REMOVED, model.config)
    smaller = prune(model, removed)
    with torch.no_grad():
        with masked_heads(model, masks_without(model, removed)):
            masked = model.body(source, lengths, target)
        torch.testing.assert_close(smaller.body(source, lengths, target), masked, atol=1e-5, rtol=0)


def _check_steps(model: Any, source: torch.Tensor, lengths: torch.Tensor, target: torch.Tensor) -> None:
    """A search gives the scores of one pass: other rows are continued, a sentence ends, and the buffers grow."""
    state = model.start(source, lengths)
    beams = torch.tensor([[0, 0], [1, 1], [2, 2]])
    for place in range(target.shape[1]):
        chosen = target[:, place : place + 1].repeat_interleave(1 if place == 0 else 2, 0)
        found, state = model.step(chosen, state)
        state = state.reorder(beams if place == 0 else torch.tensor([[1, 0], [2, 3], [4, 4]]))
    wanted = model.log_probs(source, lengths, target)[:, -1]
    torch.testing.assert_close(found[::2], wanted, atol=1e-5, rtol=0)
    assert len(state.reorder(torch.tensor([[0, 1], [4, 5]])).source.keys[0]) == 2


XL = TransformerXLConfig(
    vocab_size=30, d_model=16, num_heads=3, head_dim=5, d_ff=24, num_layers=3, memory_len=6, share_biases=True
)


@pytest.mark.one_in(2)
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
    for name in attention_layers(model)["decoder"]:
        for parameter in model.get_submodule(name).parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(0, 30, (2, 11))
    lengths = torch.tensor([6, 3])
    removed = parse_heads(["decoder.0.self:0,2", "decoder.1.self:1"], model.config)
    smaller, masks = prune(model, removed), masks_without(model, removed)
    assert smaller.config.layer_heads == (1, 2, 3)
    states: list[Any] = [None, None, model.start(2), smaller.start(2)]
    with torch.no_grad():
        for segment, real in ((tokens[:, :5], None), (tokens[:, 5:], lengths)):
            hidden = []
            for number, (one, factors) in enumerate(((model, masks), (smaller, {})) * 2):
                with masked_heads(one, factors):
                    out, states[number] = one.body(segment, real, states[number])
                hidden.append(out[:, :3])
            assert max((other - hidden[0]).abs().max() for other in hidden[1:]) < 1e-5
            assert (hidden[0] - model.body(segment)[0][:, :3]).abs().max() > 1e-3
        # Token by token, with lanes in another order in between.
        whole, state = model.start(2), smaller.start(2)
        for place in range(11):
            new = tokens[:, place : place + 1]
            with masked_heads(model, masks):
                masked, whole = model.body(new, None, whole)
            pruned, state = smaller.body(new, None, state)
            torch.testing.assert_close(pruned, masked, atol=1e-5, rtol=0)
            if place == 5:
                whole, state = (one.reorder(torch.tensor([1, 0])) for one in (whole, state))


def test_factors_between_zero_and_one_and_a_row_each() -> None:
    model = translator()
    source, lengths, target = inputs()
    masks = masks_without(model, rows=3)
    masks["body.decoder.layers.1.cross_attn"][1, 2] = 0.0  # for the second row only
    alone = masks_without(model, [Head("cross", 1, 2)])
    with torch.no_grad():
        with masked_heads(model, masks):
            found = model.body(source, lengths, target)
        whole = model.body(source, lengths, target)
        with masked_heads(model, alone):
            without = model.body(source, lengths, target)
    torch.testing.assert_close(found[[0, 2]], whole[[0, 2]], atol=1e-6, rtol=0)
    torch.testing.assert_close(found[1], without[1], atol=1e-6, rtol=0)
    assert not torch.allclose(found[1], whole[1], atol=1e-3)


def test_names_of_heads() -> None:
    config = TransformerConfig(num_encoder_layers=2, num_decoder_layers=1, d_model=8, num_heads=2, encoder_heads=(2, 1))
    assert [str(head) for head in all_heads(config)] == [
        "encoder.0.self:0",
        "encoder.0.self:1",
        "encoder.1.self:0",
        "decoder.0.self:0",
        "decoder.0.self:1",
        "decoder.0.cross:0",
        "decoder.0.cross:1",
    ]
    asked = ["decoder.0.cross", "encoder.0.self:1,0", "encoder.0.self:1"]
    assert parse_heads(asked, config) == [
        head for head in all_heads(config) if head.layer_name in ("encoder.0.self", "decoder.0.cross")
    ]
    wrongs = ("encoder.0.self:2", "encoder.1.self:1", "encoder.0.cross", "encoder.0.self:", "decoder.0.cross:0,2", "")
    for wrong in wrongs:
        with pytest.raises(RequestError, match=r"there is no head .*encoder.0.self:0 to 1, encoder.1.self:0"):
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
    for count in (0, 9):
        with pytest.raises(ConfigError, match="from 1 to 8"):
            TransformerConfig(encoder_heads=(count, 8, 8, 8, 8, 8))
    with pytest.raises(ConfigError, match=r"layer_heads is \[4, 3, 3\]; give 3 numbers.*from 1 to 3"):
        dataclasses.replace(XL, layer_heads=(4, 3, 3))
    with pytest.raises(ConfigError, match=r"cannot share u and v; set model.share_biases to false"):
        dataclasses.replace(XL, layer_heads=(1, 3, 3))
    with pytest.raises(RequestError, match=r"all heads of encoder\.1\.self would be removed; keep at least one"):
        prune(model, parse_heads(["encoder.0.self:1", "encoder.1.self"], model.config))
    name = "body.encoder.layers.0.self_attn"
    for factors, said in (
        ({name: torch.ones(3)}, rf"shape \(3,\) do not fit the 4 heads of '{name}'"),
        ({name: torch.ones(2, 4)}, "factors of 2 rows do not fit a batch of 3 rows"),
    ):
        with pytest.raises(ShapeError, match=said), masked_heads(model, factors):
            model.body(*inputs())
    for wrong in ("body.encoder.layers.9.self_attn", "body.encoder.layers.0.feed_forward"):
        factors = {name: torch.ones(4), wrong: torch.ones(4)}
        with pytest.raises(RequestError, match=f"no attention '{wrong}' in this model"), masked_heads(model, factors):
            pass
    assert not any(module._forward_pre_hooks for module in model.modules())  # also after errors


REFORMER = dataclasses.replace(REFORMERS["debug"], vocab_size=30, head_dim=6)


@pytest.mark.parametrize("is_reversible", [True, False])
def test_heads_of_a_reformer_are_masked(is_reversible: bool) -> None:
    """Of hashed and of local layers: in one pass, token by token, and in the recomputation of the backward pass."""
    model = built(dataclasses.replace(REFORMER, reversible=is_reversible))
    names = [
        name for name, module in model.named_modules() if hasattr(module, "out_proj") and hasattr(module, "num_heads")
    ]
    assert len({type(model.get_submodule(name)) for name in names}) == 2
    tokens = torch.arange(24).view(2, 12) * 7 % 27 + 3
    factors = {name: torch.linspace(0.0, 1.0, model.get_submodule(name).num_heads) for name in names}
    with torch.no_grad(), masked_heads(model, factors):
        masked = model.log_probs(tokens)
        state = model.start(2)
        for piece in tokens.split(1, dim=1):
            last, state = model.step(piece, state)
    torch.testing.assert_close(last, masked[:, -1], atol=1e-4, rtol=0)
    with masked_heads(model, factors):
        model.log_probs(tokens)[..., 3].sum().backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    # The same with the factors in the weights.
    model.zero_grad()
    with torch.no_grad():
        assert (model.log_probs(tokens) - masked).abs().max() > 1e-2
        for name in names:
            attention = model.get_submodule(name)
            columns = factors[name].repeat_interleave(attention.out_proj.in_features // attention.num_heads)
            attention.out_proj.weight *= columns
        torch.testing.assert_close(model.log_probs(tokens), masked, atol=1e-5, rtol=0)
    model.log_probs(tokens)[..., 3].sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not name.endswith("out_proj.weight"):
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-3, rtol=1e-3)


def test_compiled_steps_see_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run uncompiled meanwhile, because the program is made once."""
    model = translator()
    monkeypatch.setattr("manyheads.decoding.model_runner._check_compiler", lambda device: None)
    steps = CompiledSteps(model)
    source, lengths, target = inputs()

    def last() -> torch.Tensor:
        state = steps.start(source, lengths)
        for piece in target[:, :4].split(1, dim=1):
            scores, state = steps.step(piece, state)
        return scores

    def refuse(*_: Any) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(CompiledSteps, "_compute", refuse)
    factors = masks_without(model, [Head("decoder", 0, 1)])
    with torch.no_grad():
        with masked_heads(model, factors):
            torch.testing.assert_close(last(), model.log_probs(source, lengths, target[:, :4])[:, -1])
        with pytest.raises(AssertionError, match="compiled"):
            last()
