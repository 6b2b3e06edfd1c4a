"""A step of one token in two parts: the same as in one, and nothing in it that a compiler would take for special."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.table import build_model
from manyheads.architectures.transformer_xl.config import Attending, TransformerXLConfig
from manyheads.architectures.transformer_xl.state import XLPlacedStep
from manyheads.decoding.device import inference

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
    assert isinstance(model, LanguageModel)
    for parameter in model.parameters():
        parameter.data = parameter.data * 5 if parameter.any() else torch.randn_like(parameter)  # biases begin at zero
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lengths", [[2], [5, 2, 3]], ids=["one lane", "three lanes of unlike lengths"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_parts_are_one_step(kind: str, lengths: list[int], precision: Any) -> None:
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
            what = model.place_step(now, other)
            assert what is not None
            placed, other = what
            assert isinstance(placed, XLPlacedStep)
            assert min(placed.first, placed.last) > 1
            assert min(buffer.shape[2] for buffer in (*placed.keys, *placed.values)) > placed.last + 1
            assert min(one.shape[1] for one in placed.positions) > placed.seen.shape[3] + 1
            torch.testing.assert_close(model.take_step(placed), expected, atol=1e-5, rtol=1e-5)
            assert other.columns == state.columns
            assert torch.equal(other.lengths, state.lengths)
            if step == 20 and len(lengths) > 1:
                rows, tokens = torch.tensor([2, 0]), tokens[[2, 0]]
                state, other = state.reorder(rows), other.reorder(rows)


def test_where_only_the_whole_step_serves() -> None:
    """At a beginning, for several tokens, with a memory of hidden states, and where somebody looks at the weights."""
    model = model_of()
    token = torch.tensor([[3]])
    with torch.inference_mode():
        for read in (0, 1):
            state = model.start(1)
            if read:
                _, state = model.step(token, state)
            assert model.place_step(token, state) is None
        _, state = model.step(torch.tensor([[3, 4, 5]]), model.start(1))
        assert model.place_step(torch.tensor([[3, 4]]), state) is None
        assert model.place_step(token, model.start(1, projected=False)) is None
        assert model.place_step(token, model.start(1, Attending(memory_len=0))) is None
        layer: Any = model.body.layers[1]  # type: ignore[attr-defined]
        layer.attention.weights_hook = lambda weights: None
        assert model.place_step(token, state) is None
        layer.attention.weights_hook = None
        assert model.place_step(token, state) is not None


@pytest.mark.parametrize(
    ("changes", "can"),
    [({}, True), ({"attention": "absolute"}, False), ({"cutoffs": (10, 20), "div_value": 2}, False)],
)
def test_which_models_can(changes: dict[str, Any], can: bool) -> None:
    assert model_of(**changes).can_place is can
