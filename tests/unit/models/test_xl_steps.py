"""Planned steps: no size or number in them is one for which a compiler would make another program."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.decoding.model_runner import inference
from manyheads.models.composites import LanguageModel
from manyheads.models.transformer_xl.config import Attending, TransformerXLConfig
from manyheads.models.transformer_xl.state import XLStep

CONFIG = TransformerXLConfig(vocab_size=31, d_model=16, num_heads=2, d_ff=24, num_layers=2, memory_len=9, dropout=0.0)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "learned": {"attention": "relative_learned", "max_len": 12},
    "clamped": {"clamp_len": 4},
    "same length": {"same_length": True},
    "pre-norm": {"norm_position": "pre"},
}


def model_of(**changes: Any) -> LanguageModel:
    torch.manual_seed(2)
    model = build_model(replace(CONFIG, **changes)).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data * 5 if parameter.any() else torch.randn_like(parameter)  # biases begin at zero
    return model


@pytest.mark.one_in(4)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lengths", [[2], [5, 2, 3]], ids=["one lane", "three lanes of unlike lengths"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_for_a_compiler(kind: str, lengths: list[int], precision: Any) -> None:
    """Past a full memory, a move within the buffers, and a lane that leaves."""
    model = model_of(**KINDS[kind])
    tokens, begun = torch.randint(31, (len(lengths), 40)), max(lengths)
    with inference(torch.device("cpu"), precision):
        real = torch.tensor(lengths)
        _, state = model.step(tokens[:, :begun], model.start(len(lengths)), real)
        _, other = model.step(tokens[:, :begun], model.start(len(lengths)), real)
        for step in range(begun, 40):
            now = tokens[:, step : step + 1]
            expected, state = model.step(now, state)
            prepared, other = model.prepare_step(now, other)
            prepared = prepared.for_compiler()
            assert isinstance(prepared, XLStep)
            assert prepared.can_compile
            assert len(prepared.seen) == len(now)
            for layer in prepared.layers:
                assert min(layer.slots.first, layer.slots.start) > 1
                assert min(buffer.shape[2] for buffer in (layer.key, layer.value)) > layer.slots.end + 1
            assert min(one.shape[1] for one in prepared.positions) > prepared.seen.shape[3] + 1
            torch.testing.assert_close(model.compute_step(prepared), expected, atol=1e-5, rtol=1e-5)
            assert other.columns == state.columns
            assert torch.equal(other.lengths, state.lengths)
            if step == 20 and len(lengths) > 1:
                rows, tokens = torch.tensor([2, 0]), tokens[[2, 0]]
                state, other = state.reorder(rows), other.reorder(rows)


def test_steps_that_are_not_compiled() -> None:
    """At the beginning of a text, of several tokens, without memory, and while attention is recorded."""
    model = model_of()
    with torch.inference_mode():

        def can_compile(tokens: list[int], read: list[int], **options: Any) -> bool:
            state = model.start(1, **options)
            if read:
                _, state = model.step(torch.tensor([read]), state)
            return bool(model.prepare_step(torch.tensor([tokens]), state)[0].can_compile)

        assert not can_compile([3], [])
        assert not can_compile([3], [3])
        assert not can_compile([3, 4], [3, 4, 5])
        assert not can_compile([3], [3, 4, 5], attending=Attending(memory_len=0))
        assert can_compile([3], [3, 4, 5])
        layer: Any = model.body.layers[1]  # type: ignore[attr-defined]
        layer.attention.weights_hook = lambda weights: None
        assert not can_compile([3], [3, 4, 5])


@pytest.mark.parametrize(
    ("changes", "can"), [({}, True), ({"attention": "absolute"}, False), ({"cutoffs": (10, 20), "div_value": 2}, False)]
)
def test_which_models_can(changes: dict[str, Any], can: bool) -> None:
    assert model_of(**changes).prepares_steps is can
