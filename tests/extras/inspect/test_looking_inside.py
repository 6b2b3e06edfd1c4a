"""Attentions of whole models, and the table of their tensors, against hooks and counts made by hand."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.extras.inspect.tracing import TracedTensor, folded, trace
from manyheads.models.transformer import config as presets
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.nn.attention.observing import attentions_of, observe


def translator(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"source_vocab_size": 20, "target_vocab_size": 20, "num_encoder_layers": 3, "num_decoder_layers": 2}
    return build_model(dataclasses.replace(presets.PRESETS["debug"], **(sizes | changes))).eval()


def language_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "num_heads": 2, "head_dim": 8, "d_ff": 32, "num_layers": 3, "memory_len": 8}
    return build_model(TransformerXLConfig(vocab_size=20, **(sizes | changes))).eval()


def pair() -> dict[str, Tensor]:
    return {
        "source": torch.randint(1, 20, (2, 5)),
        "source_lengths": torch.tensor([5, 3]),
        "target": torch.randint(1, 20, (2, 4)),
    }


def test_attentions_have_the_shape_that_viewers_take() -> None:
    model = translator()
    found = attentions_of(model, *pair().values())
    heads = model.config.num_heads  # type: ignore[union-attr]
    assert [tuple(w.shape) for w in found.encoder] == [(2, heads, 5, 5)] * 3
    assert [tuple(w.shape) for w in found.decoder] == [(2, heads, 4, 4)] * 2
    assert [tuple(w.shape) for w in found.cross] == [(2, heads, 4, 5)] * 2
    for weights in (*found.encoder, *found.decoder, *found.cross):
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))
    assert bool((found.cross[0][1, :, :, 3:] == 0).all())  # padding
    assert bool((found.decoder[0].triu(1) == 0).all())  # the future


def test_attentions_are_those_that_each_layer_recorded_in_order() -> None:
    """Eleven layers: by name, layer 10 would come before layer 2."""
    model, batch = translator(num_encoder_layers=11), pair()
    with observe(model) as record:
        expected = model.log_probs(*batch.values())  # type: ignore[operator]
    found = attentions_of(model, *batch.values())
    for index, weights in enumerate(found.encoder):
        torch.testing.assert_close(weights, record[f"body.encoder.layers.{index}.self_attn"][0])
    torch.testing.assert_close(model.log_probs(*batch.values()), expected)  # type: ignore[operator]


@pytest.mark.parametrize("attention", ["relative", "relative_learned", "absolute", "absolute_learned"])
def test_attentions_of_a_language_model_count_memory(attention: str) -> None:
    model = language_model(attention=attention)
    ids = torch.randint(0, 20, (1, 9))
    state = model.read(ids[:, :5], None, model.start(1, projected=False))[1]
    found = attentions_of(model, ids[:, 5:], None, state)
    assert (found.encoder, found.cross) == ((), ())
    assert [tuple(weights.shape) for weights in found.decoder] == [(1, 2, 4, 9)] * 3


def test_the_trace_names_every_tensor_once_and_leaves_the_model_as_it_was() -> None:
    model, batch = translator(), pair()
    before = model.log_probs(*batch.values())  # type: ignore[operator]
    hooks = [(m.weights_hook, "attend" in vars(m)) for m in model.modules() if hasattr(m, "weights_hook")]
    lines = trace(model, batch)
    assert [(m.weights_hook, "attend" in vars(m)) for m in model.modules() if hasattr(m, "weights_hook")] == hooks
    torch.testing.assert_close(model.log_probs(*batch.values()), before)  # type: ignore[operator]
    d_model, heads = model.config.d_model, model.config.num_heads  # type: ignore[union-attr]
    told = {(line.module, line.name): line.shape for line in lines}
    assert len(told) == len(lines)
    assert told["source_embedding", "embedded"] == (2, 5, d_model)
    assert told["encoder.layers.2.self_attn", "queries"] == (2, heads, 5, d_model // heads)
    assert told["decoder.layers.1.cross_attn", "keys"] == (2, heads, 5, d_model // heads)
    assert told["decoder.layers.1.cross_attn", "weights"] == (2, heads, 4, 5)
    assert told["head", "log-probabilities"] == (2, 4, 20)
    assert all(line.equation for line in lines)


TOLD_BY_OTHERS = {
    # What holds others, and parts whose numbers belong to the line of what holds them.
    *("Seq2Seq", "LanguageModel", "Transformer", "TransformerXL", "Reformer", "ReformerTranslator"),
    *("SequenceClassifier", "TransformerEncoder", "ReformerEncoder", "SpanParser", "WordEncoder"),
    *("Encoder", "Decoder", "EncoderLayer", "DecoderLayer", "RelativeLayer", "ReformerLayer"),
    *("ModuleList", "ParameterList", "Dropout", "LayerNorm", "Linear"),
}


def inputs_of(name: str) -> dict[str, Tensor]:
    if ARCHITECTURES[name].task == "spans":
        features = torch.randint(0, 20, (2, 11, 3))
        return {"pieces": features, "affixes": features, "lengths": torch.tensor([11, 11])}
    return pair() if ARCHITECTURES[name].task == "translation" else {"tokens": torch.randint(0, 20, (2, 11))}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_part_of_every_architecture_has_its_equation(name: str) -> None:
    """A module of ours that makes tensors has `equation` or `tensors`, or is told by what holds it."""
    model, inputs = small(name), inputs_of(name)
    lines = trace(model, inputs)
    told = {line.module for line in lines}
    for module_name, module in model.named_modules():
        shown = module_name.removeprefix("body.")
        if type(module).__name__ not in TOLD_BY_OTHERS:
            assert shown in told, f"{shown} ({type(module).__name__}) has no line; give it a method `equation`"
    assert all(line.equation for line in lines)
    assert len({(line.module, line.name) for line in lines}) == len(lines)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_architecture_shows_its_attention_in_every_layer(name: str) -> None:
    model, inputs = small(name), inputs_of(name)
    found = attentions_of(model, *inputs.values())
    config: Any = model.config
    if ARCHITECTURES[name].task == "translation":
        counts = (config.num_encoder_layers, config.num_decoder_layers, config.num_decoder_layers)
    elif name in ("transformer-classifier", "transformer-spans"):
        counts = (config.num_layers, 0, 0)
    else:
        counts = (0, config.num_layers, 0)
    assert (len(found.encoder), len(found.decoder), len(found.cross)) == counts
    ends = (inputs.get("source_lengths"), None, inputs.get("source_lengths"))
    for layers, lengths in zip(found, ends, strict=True):
        for weights in layers:
            torch.testing.assert_close(weights.sum(-1)[0], torch.ones_like(weights.sum(-1)[0]))
            if lengths is not None:
                assert bool((weights[1, ..., int(lengths[1]) :][:, : int(lengths[1])] == 0).all())  # padding


def small(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = ARCHITECTURES[name].presets["debug"]
    sizes = {field.name: 20 for field in dataclasses.fields(config) if field.name.endswith("vocab_size")}
    return build_model(dataclasses.replace(config, **sizes)).eval()


def test_the_trace_of_a_model_with_memory() -> None:
    model = language_model()
    ids = torch.randint(0, 20, (1, 9))
    state = model.read(ids[:, :5], None, model.start(1, projected=False))[1]
    told = {
        (line.module, line.name): (line.shape, line.equation)
        for line in trace(model, {"tokens": ids[:, 5:], "lengths": None, "state": state})
    }
    assert told["layers.0.attention", "keys"] == ((1, 2, 9, 8), "K = [memory; x] W_K, in heads")
    assert told["layers.0.attention", "distances"][0] == (2, 9, 8)
    assert told["layers.0.attention", "weights"][0] == (1, 2, 4, 9)
    assert "lengths" not in {name for _, name in told}


def test_layers_like_the_first_are_told_in_a_line() -> None:
    lines = trace(translator(num_encoder_layers=4, num_decoder_layers=1), pair())
    short = folded(lines)
    assert [line for line in short if line.module == "encoder.layers.1 to 3"] == [
        TracedTensor("encoder.layers.1 to 3", "as in encoder.layers.0", (), "")
    ]
    assert not any("decoder.layers.0" in line.name for line in short)
    assert [line for line in short if "encoder.layers" not in line.module] == [
        line for line in lines if "encoder.layers" not in line.module
    ]


def test_layers_are_folded_into_the_one_that_they_repeat() -> None:
    """As in a pattern of two kinds, which would be told whole each time, or wrongly, if all were held to layer 0."""
    sizes = (2, 3, 2, 2, 3, 4)
    lines = [TracedTensor(f"layers.{i}.a", "x", (1, size), "e") for i, size in enumerate(sizes)]
    found = [(line.module, line.name) for line in folded([*lines, TracedTensor("head", "y", (1,), "f")])]
    assert found == [
        ("layers.0.a", "x"),
        ("layers.1.a", "x"),
        ("layers.5.a", "x"),
        ("layers.2 to 3", "as in layers.0"),
        ("layers.4", "as in layers.1"),
        ("head", "y"),
    ]


def test_an_error_on_the_way_leaves_no_hooks() -> None:
    model = translator()

    def fail(*_: Any) -> None:
        raise RuntimeError("stop")

    handle = model.body.decoder.register_forward_pre_hook(fail)  # type: ignore[union-attr]
    look: Callable[..., Any]
    for look, arguments in ((attentions_of, tuple(pair().values())), (trace, (pair(),))):
        with pytest.raises(RuntimeError, match="stop"):
            look(model, *arguments)
    handle.remove()
    assert not any(vars(module).get("weights_hook") or "attend" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
