"""Rotary positions, grouped queries, RMS norm and SwiGLU against transformers' Llama, random weights in float64."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.errors import ConfigError, ShapeError
from manyheads.models.transformer.config import PRESETS
from manyheads.nn import Causal, FeedForward, KeyValueCache, MultiHeadAttention, RotaryPositions
from manyheads.nn.kernels.modes import fast
from manyheads.nn.layers import build_norm

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
WIDTH, HEADS, LENGTH = 48, 6, 11
SCALINGS: list[dict[str, Any]] = [{}, {"scaling": "linear", "factor": 4.0}, {"scaling": "ntk", "factor": 4.0}]


@pytest.fixture(params=[False, True], ids=["plain", "fast"], autouse=True)
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(0)
    with fast(request.param):
        yield


@cache
def llama() -> Any:
    """Imported late: it takes two seconds, in each process that collects tests."""
    from transformers.models.llama import modeling_llama

    return modeling_llama


def config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=80, num_hidden_layers=1, **changes
    )


def sines_and_cosines(head_dim: int, places: Tensor, scaling: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What Llama's attention is given, by the formula; its own module computes in float32."""
    base, factor = 10_000.0, scaling.get("factor", 1.0)
    if scaling.get("scaling") == "linear":
        places = places / factor
    if scaling.get("scaling") == "ntk":
        base *= factor ** (head_dim / (head_dim - 2))
    angle = places[:, None] / base ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return torch.cat([angle, angle], -1).cos()[None], torch.cat([angle, angle], -1).sin()[None]


@pytest.mark.parametrize("scaling", SCALINGS, ids=["plain angles", "linear", "ntk"])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention(kv_heads: int, scaling: dict[str, Any]) -> None:
    """The whole sequence, and in parts from a cache. SDPA, because Llama's own softmax is in float32."""
    theirs = llama().LlamaAttention(config(num_key_value_heads=kv_heads, attn_implementation="sdpa"), 0).double()
    rotary = RotaryPositions(WIDTH // HEADS, **scaling)
    ours = MultiHeadAttention(WIDTH, HEADS, bias=False, num_kv_heads=kv_heads, rotary=rotary).double()
    weights = {name.replace("o_proj", "out_proj"): one for name, one in theirs.state_dict().items()}
    ours.load_state_dict(weights)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    places = sines_and_cosines(WIDTH // HEADS, torch.arange(LENGTH, dtype=torch.float64), scaling)
    later = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        wanted, _ = theirs(x, places, later)
        found, _, weights_ = ours(x, mask=Causal(), need_weights=True)
        assert weights_.shape == (2, HEADS, LENGTH, LENGTH)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(ours(x, mask=Causal())[0], wanted, rtol=0, atol=1e-12)
        state, steps = ours.empty_cache(2, x), []
        assert state.keys[0].shape[1] == kv_heads
        for part in x.split([4, 1, 1, 3, 2], dim=1):
            out, state = ours(part, mask=Causal(), state=state)
            steps.append(out)
        torch.testing.assert_close(torch.cat(steps, 1), wanted, rtol=0, atol=1e-12)


def test_rows_of_a_cache_have_their_own_positions() -> None:
    """The second row has read fewer tokens, which does not shift its angles."""
    layer = MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2, rotary=RotaryPositions(8)).double()
    x, lengths = torch.randn(2, 6, WIDTH, dtype=torch.float64), torch.tensor([6, 3])
    _, k, v = (one.detach() for one in layer._project_together(x))
    state = layer.empty_cache(2, x).append(layer.rotary(k), v, lengths)  # type: ignore[misc]
    new = torch.randn(2, 1, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        found, _ = layer(new, state=state)
        alone = layer(torch.cat([x[1:, :3], new[1:]], dim=1), mask=Causal())[0][:, -1:]
    torch.testing.assert_close(found[1:], alone, rtol=0, atol=1e-12)
    assert isinstance(state, KeyValueCache)


@pytest.mark.parametrize("scaling", SCALINGS, ids=["plain angles", "linear", "ntk"])
def test_angles(scaling: dict[str, Any]) -> None:
    """transformers' NTK scaling grows with the text: at 4 times the trained length it is ours of factor 4."""
    kinds = {
        "linear": {"rope_type": "linear", "factor": 4.0},
        "ntk": {"rope_type": "dynamic", "factor": 1.0},
    }
    given = kinds.get(scaling.get("scaling", ""), {"rope_type": "default"})
    theirs = llama().LlamaRotaryEmbedding(
        config(rope_parameters={"rope_theta": 10_000.0, **given}, max_position_embeddings=64)
    )
    cosine, sine = theirs(torch.zeros(1), torch.arange(256)[None])
    ours = RotaryPositions(8, **scaling).rows(0, 256)
    torch.testing.assert_close(ours, torch.cat([sine[0, :, :4], cosine[0, :, :4]], -1), rtol=0, atol=5e-5)
    exact = RotaryPositions(8, **scaling).rows(3, 40, torch.float64)
    torch.testing.assert_close(exact.float(), ours[3:43], rtol=0, atol=1e-7)


def test_norm() -> None:
    """Llama's norm computes in float32 whatever its input; here its own code runs with float64 in that place."""
    theirs, ours = llama().LlamaRMSNorm(WIDTH, eps=1e-5).double(), build_norm("rms", WIDTH, 1e-5).double()
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    forward = llama().LlamaRMSNorm.forward
    double = FunctionType(forward.__code__, {"torch": SimpleNamespace(float32=torch.float64, rsqrt=torch.rsqrt)})
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(ours(x), double(theirs, x), rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.float()(x.float()), theirs.float()(x.float()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_mlp(bias: bool) -> None:
    theirs = llama().LlamaMLP(config(mlp_bias=bias)).double()
    ours = FeedForward(WIDTH, 80, activation="swish", bias=bias, gated=True).double()
    names = {"gate_proj": "gate_proj", "up_proj": "in_proj", "down_proj": "out_proj"}
    ours.load_state_dict(
        {names[name.split(".")[0]] + name[name.index(".") :]: one for name, one in theirs.state_dict().items()}
    )
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "rotary", "head_dim": 7, "value_dim": 8}, "odd width 7 .model.head_dim"),
        ({"positions": "rotary", "d_model": 36, "num_decoder_heads": 2, "num_heads": 4}, "odd width 9 .model.d_model"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3, which does not divide model.num_heads 4"),
        ({"num_kv_heads": 4, "num_decoder_heads": 2}, "does not divide model.num_decoder_heads 2"),
        ({"num_kv_heads": -1}, "num_kv_heads is -1; it must be from 0"),
        ({"num_kv_heads": 2, "decoder_heads": (4, 1)}, "none can be pruned"),
        ({"ffn": "swiglu", "activation": "gelu"}, "whose activation is swish, but model.activation is gelu"),
        ({"positions": "rotary", "rotary_scaling": "ntk"}, "a scaling needs a factor above 1"),
        ({"positions": "rotary", "rotary_factor": 2.0}, "a factor a scaling"),
        ({"positions": "rotary", "rotary_factor": 0.5}, "rotary_factor is 0.5; it must be from 1"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        replace(PRESETS["debug"], **changes)
    assert "\n" not in str(caught.value)


def test_refusals_of_modules() -> None:
    with pytest.raises(ConfigError, match="head_dim is 7"):
        RotaryPositions(7)
    with pytest.raises(ConfigError, match="num_kv_heads is 4; it must divide num_heads 6"):
        MultiHeadAttention(WIDTH, HEADS, num_kv_heads=4)
    with pytest.raises(ConfigError, match=r"make them with RotaryPositions\(8\)"):
        MultiHeadAttention(WIDTH, HEADS, rotary=RotaryPositions(16))
    layer, x = MultiHeadAttention(WIDTH, HEADS, rotary=RotaryPositions(8)), torch.randn(2, 5, WIDTH)
    with pytest.raises(ShapeError, match="give no keys"):
        layer(x, torch.randn(2, 5, WIDTH))
