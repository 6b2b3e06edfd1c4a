"""The attention modules of d2l, labml, the fused tutorial and torch: each part alone, both directions, and its habits.

The peers are written out here from their formulas, in their own layouts; those of d2l but for its heads: tests/parity.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.extras.peers import PEERS
from manyheads.extras.peers.one_head import DotProductAttention
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.relative import LearnedRelativeAttention
from manyheads.nn.attention.scores import AdditiveScore

B, Q, K, D, H = 2, 3, 5, 12, 4
LENS: list[Tensor | None] = [None, torch.tensor([0, 4]), torch.tensor([[0, 1, 5], [2, 0, 3]])]


def random_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: torch.randn(shape) * 0.5 for name, shape in shapes.items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, name
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


def round_trip(peer: str, config: dict[str, Any], weights: dict[str, Tensor]) -> Any:
    """The wrapper; what goes out again is what came in, bit by bit."""
    loader: Any = PEERS[peer]
    wrapper = loader.from_peer(config, weights)
    assert not wrapper.module.training
    again, weights_again = loader.to_peer(wrapper.module)
    assert weights_again.keys() == weights.keys()
    assert all(torch.equal(weights_again[name], tensor) for name, tensor in weights.items())
    twice = loader.to_peer(loader.from_peer(again, weights_again).module)
    assert twice[0] == again
    return wrapper


# Dive into Deep Learning


def d2l_softmax(scores: Tensor, lens: Tensor | None) -> Tensor:
    if lens is not None:
        each = lens if lens.dim() == 2 else lens[:, None].expand(-1, scores.shape[1])
        scores = scores.masked_fill(torch.arange(scores.shape[2]) >= each[:, :, None], -1e6)
    return torch.softmax(scores, dim=-1)


def given(lens: Tensor | None, **widths: int) -> dict[str, Tensor]:
    torch.manual_seed(5)
    inputs = {"in.queries": torch.randn(B, Q, widths.get("q", D)), "in.keys": torch.randn(B, K, widths.get("k", D))}
    inputs["in.values"] = torch.randn(B, K, widths.get("v", D))
    return inputs if lens is None else {**inputs, "in.valid_lens": lens}


def linear(held: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ held[f"{name}.weight"].t() + held.get(f"{name}.bias", torch.zeros(1))


def d2l_multi_head(
    held: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, lens: Tensor | None, prefix: str = ""
) -> Any:
    def heads(name: str, x: Tensor) -> Tensor:
        return linear(held, prefix + name, x).view(B, x.shape[1], H, -1).transpose(1, 2).reshape(B * H, x.shape[1], -1)

    q, k, v = heads("W_q", q), heads("W_k", k), heads("W_v", v)
    lens = None if lens is None else lens.repeat_interleave(H, dim=0)
    weights = d2l_softmax(q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), lens)
    out = (weights @ v).view(B, H, q.shape[1], -1).transpose(1, 2).flatten(2)
    return linear(held, prefix + "W_o", out), weights


@pytest.mark.parametrize("lens", LENS, ids=["none", "1d", "2d"])
@pytest.mark.parametrize("bias", [False, True])
def test_d2l_multi_head(lens: Tensor | None, bias: bool) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "W_q.weight": (D, 9),
        "W_k.weight": (D, 6),
        "W_v.weight": (D, 7),
        "W_o.weight": (D, D),
    }
    if bias:
        shapes |= {f"W_{name}.bias": (D,) for name in "qkvo"}
    held = random_weights(shapes)
    wrapper = round_trip(
        "d2l/MultiHeadAttention", {"model": {"num_hiddens": D, "num_heads": H, "dropout": 0.5, "bias": bias}}, held
    )
    inputs = given(lens, q=9, k=6, v=7)
    out, weights = d2l_multi_head(held, *(inputs[f"in.{name}"] for name in ("queries", "keys", "values")), lens)
    assert_same(wrapper.run(inputs), {"out.output": out, "out.attention_weights": weights})
    assert wrapper.module.score is None  # the habit was put on from outside, and taken off


# labml


MASKS: list[Tensor | None] = [
    None,
    (torch.arange(Q)[:, None] + 2 >= torch.arange(K))[:, :, None],
    (torch.arange(Q * K * B).view(Q, K, B) % 3 > 0).long(),
    torch.tensor([1, 1, 0, 1, 0]).view(1, K, 1),
]


def labml(held: dict[str, Tensor], inputs: dict[str, Tensor], relative: bool) -> dict[str, Tensor]:
    """Length first; in the relative kind one pair at a time, row P - distance of the tables."""
    q, k, v = (linear(held, f"{n}.linear", inputs[f"in.{n}"]) for n in ("query", "key", "value"))
    q, k, v = (x.view(*x.shape[:2], H, -1) for x in (q, k, v))
    if relative:
        half = held["key_pos_bias"].shape[0] // 2
        rows = torch.tensor([[half - ((i + K - Q) - j) for j in range(K)] for i in range(Q)])
        scores = torch.einsum("ibhd,jbhd->ijbh", q + held["query_pos_bias"], k)
        scores = scores + torch.einsum("ibhd,ijhd->ijbh", q, held["key_pos_embeddings"][rows])
        scores = scores + held["key_pos_bias"][rows][:, :, None]
    else:
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k)
    scores = scores / math.sqrt(q.shape[-1])
    if "in.mask" in inputs:
        scores = scores.masked_fill(inputs["in.mask"][..., None] == 0, -math.inf)
    attn = torch.softmax(scores, dim=1)
    out = torch.einsum("ijbh,jbhd->ibhd", attn, v).flatten(2)
    return {"out.output": linear(held, "output", out), "out.attn": attn}


@pytest.mark.parametrize("mask", MASKS, ids=["none", "causal", "qkb", "1k1"])
@pytest.mark.parametrize("kind", ["plain", "plain with biases", "relative"])
def test_labml(mask: Tensor | None, kind: str) -> None:
    names = ("query.linear", "key.linear", "value.linear", "output")
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (D, D) for name in names}
    shapes |= {f"{name}.bias": (D,) for name in (names if kind == "plain with biases" else names[2:])}
    options: dict[str, Any] = {"heads": H, "d_model": D, "dropout_prob": 0.5}
    if kind == "relative":
        shapes |= {"key_pos_embeddings": (16, H, 3), "key_pos_bias": (16, H), "query_pos_bias": (H, 3)}
    else:
        options["bias"] = kind == "plain with biases"
    held = random_weights(shapes)
    peer = "labml/RelativeMultiHeadAttention" if kind == "relative" else "labml/MultiHeadAttention"
    wrapper = round_trip(peer, {"model": options}, held)
    inputs = {"in.query": torch.randn(Q, B, D), "in.key": torch.randn(K, B, D), "in.value": torch.randn(K, B, D)}
    inputs |= {} if mask is None else {"in.mask": mask}
    assert_same(wrapper.run(inputs), labml(held, inputs, kind == "relative"))


# the fused tutorial


def test_fused_with_an_input_of_another_width() -> None:
    """Rows of a head's query, key and value lie together; the printed forward could not run this."""
    held = random_weights(
        {"qkv_proj.weight": (3 * D, 7), "qkv_proj.bias": (3 * D,), "o_proj.weight": (D, D), "o_proj.bias": (D,)}
    )
    config = {"model": {"input_dim": 7, "embed_dim": D, "num_heads": H}}
    wrapper = round_trip("fused-qkv/MultiheadAttention", config, held)
    x, mask = torch.randn(B, K, 7), torch.ones(K, K).tril()
    mask[2] = 0
    q, k, v = linear(held, "qkv_proj", x).view(B, K, H, -1).transpose(1, 2).chunk(3, dim=-1)
    wanted = {}
    for name, fill in {"none": torch.ones(K, K), "mask_tt": mask}.items():
        scores = (q @ k.transpose(-1, -2) / math.sqrt(D // H)).masked_fill(fill == 0, -9e15)
        weights = torch.softmax(scores, dim=-1)
        wanted[f"out.attn_{name}"] = weights
        wanted[f"out.out_{name}"] = linear(held, "o_proj", (weights @ v).transpose(1, 2).flatten(2))
    assert_same(wrapper.run({"in.x": x, "in.mask_tt": mask}), wanted)


def test_fused_masks_with_two_readings_are_refused() -> None:
    loader: Any = PEERS["fused-qkv/MultiheadAttention"]
    _, weights = loader.to_peer(MultiHeadAttention(D, H))
    wrapper = loader.from_peer({"d": D, "heads": H}, weights)
    with pytest.raises(RequestError, match=r"\(batch, q_len, k_len\) or \(heads, q_len, k_len\)"):
        wrapper.run({"in.x": torch.randn(H, K, D), "in.mask_btt": torch.ones(H, K, K)})
    with pytest.raises(RequestError, match="four axes"):
        wrapper.run({"in.x": torch.randn(H, K, D), "in.mask_t": torch.ones(K)})


# torch


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False, "batch_first": True},
        {"kdim": 7, "vdim": 5},
        {"kdim": 7, "vdim": 5, "bias": False},
        {"add_bias_kv": True, "batch_first": True},
        {"add_zero_attn": True, "kdim": 7},
        {"dropout": 0.5},
    ],
    ids=str,
)
def test_torch(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(D, H, **options).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.4)
    config = {"model": {"embed_dim": D, "num_heads": H, **options}}
    wrapper = round_trip("torch/MultiheadAttention", config, dict(theirs.state_dict()))
    extra = options.get("add_bias_kv") or options.get("add_zero_attn")
    assert isinstance(wrapper.module, nn.MultiheadAttention if extra else MultiHeadAttention)
    assert sum(x.numel() for x in wrapper.module.parameters()) == sum(x.numel() for x in theirs.parameters())
    query, key, value = torch.randn(B, Q, D), torch.randn(B, K, theirs.kdim), torch.randn(B, K, theirs.vdim)
    masks = {"key_padding_mask": torch.tensor([[False] * 5, [False, True, False, True, True]])}
    masks["attn_mask"] = torch.ones(Q, K, dtype=torch.bool).triu(2)
    for asked in ({}, masks, {"attn_mask": torch.randn(B * H, Q, K)}):
        x = (query, key, value) if theirs.batch_first else tuple(y.transpose(0, 1) for y in (query, key, value))
        out, weights = theirs(*x, average_attn_weights=False, **asked)
        inputs = dict(zip(("in.query", "in.key", "in.value"), x, strict=True))
        found = wrapper.run({**inputs, **{f"in.{name}": mask for name, mask in asked.items()}})
        assert_same(found, {"out.out": out, "out.weights": weights})
    out, weights = theirs(query[0], key[0], value[0], average_attn_weights=False)
    alone = {"in.query": query[0], "in.key": key[0], "in.value": value[0]}
    assert_same(wrapper.run(alone), {"out.out": out, "out.weights": weights})


@pytest.mark.parametrize(
    "peer", ["torch/MultiheadAttention", "labml/MultiHeadAttention", "fused-qkv/MultiheadAttention"]
)
def test_our_weights_become_the_peers(peer: str) -> None:
    """A module of ours that came from nowhere else."""
    torch.manual_seed(1)
    ours = MultiHeadAttention(D, H).eval()
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.4)
    loader: Any = PEERS[peer]
    config, weights = loader.to_peer(ours)
    x = torch.randn(B, K, D)
    wanted = ours(x)[0]
    if peer.startswith("torch"):
        theirs = nn.MultiheadAttention(**config["model"])
        theirs.load_state_dict(weights, strict=True)
        found = theirs(x, x, x)[0]
    elif peer.startswith("labml"):
        inputs = {f"in.{name}": x.transpose(0, 1) for name in ("query", "key", "value")}
        scores = loader.from_peer(config, weights).run(inputs)
        found = scores["out.output"].transpose(0, 1)
    else:
        found = loader.from_peer(config, weights).run({"in.x": x})["out.out_none"]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["d2l_attention", "d2l_attention_bias", "labml_mha", "labml_mha_cross"])
def test_whole_fixtures_go_out_again(name: str, shared: Path) -> None:
    """All parts at once, under the names that they came with."""
    path = shared / "fixtures" / "parity" / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no {path}")
    tensors = load_file(path.with_suffix(".safetensors"))
    weights = {key.removeprefix("param."): x for key, x in tensors.items() if key.startswith("param.")}
    meta = json.loads(path.read_text("utf-8"))
    wrapper = round_trip(f"{name.partition('_')[0]}/attention", meta["config"], weights)
    config, _ = PEERS[f"{name.partition('_')[0]}/attention"].to_peer(wrapper.module)
    assert config.items() <= meta["config"].items()


# mistakes


@pytest.mark.parametrize(
    ("peer", "module", "named"),
    [
        ("torch/MultiheadAttention", lambda: MultiHeadAttention(D, H, head_dim=2), "head_dim 2"),
        ("torch/MultiheadAttention", lambda: MultiHeadAttention(D, H, query_dim=7), "query_dim 7"),
        ("torch/MultiheadAttention", lambda: MultiHeadAttention(D, H, bias=("v_proj",)), "some projections"),
        ("torch/MultiheadAttention", lambda: MultiHeadAttention(D, H, score=AdditiveScore(H, 3)), "scores"),
        ("d2l/MultiHeadAttention", lambda: MultiHeadAttention(D, H, bias=("v_proj",)), "some projections"),
        ("d2l/MultiHeadAttention", lambda: MultiHeadAttention(D, H, head_dim=2), "head_dim 2"),
        ("d2l/DotProductAttention", lambda: DotProductAttention(scale=2.0), "scale 2"),
        ("labml/MultiHeadAttention", lambda: MultiHeadAttention(D, H, bias=False), "without biases"),
        ("labml/MultiHeadAttention", lambda: MultiHeadAttention(D, H, key_dim=7), "widths"),
        (
            "labml/RelativeMultiHeadAttention",
            lambda: LearnedRelativeAttention(D, H, max_len=9, num_future=3, bias=("v_proj", "out_proj")),
            "num_future 3",
        ),
        ("fused-qkv/MultiheadAttention", lambda: MultiHeadAttention(D, H, key_dim=7), "widths"),
        ("fused-qkv/MultiheadAttention", lambda: MultiHeadAttention(D, H, dropout=0.1), "dropout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_peer_cannot_hold(peer: str, module: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        PEERS[peer].to_peer(module())


def test_mistakes_are_named() -> None:
    attention: dict[str, Any] = {"model": {"num_hiddens": D, "num_heads": H}}
    with pytest.raises(ModelFileError, match=r"no matrix W_q\.weight"):
        PEERS["d2l/MultiHeadAttention"].from_peer(attention, {})
    with pytest.raises(ConfigError, match="colour"):
        PEERS["d2l/MultiHeadAttention"].from_peer({"model": {"colour": 1}}, {})
    wrapper = PEERS["d2l/masked_softmax"].from_peer({}, {})
    with pytest.raises(RequestError, match="whole numbers"):
        wrapper.run({"in.scores": torch.zeros(B, Q, K), "in.valid_lens": torch.zeros(B)})
    with pytest.raises(RequestError, match=r"in\.colour"):
        wrapper.run({"in.scores": torch.zeros(B, Q, K), "in.colour": torch.zeros(B)})
    with pytest.raises(ModelFileError, match="even number of rows"):
        PEERS["labml/RelativeMultiHeadAttention"].from_peer({"model": {"heads": H, "d_model": D}}, {})
    with pytest.raises(ModelFileError, match=r"shape \(32, 12\), the config asks for \(36, 12\)"):
        PEERS["fused-qkv/MultiheadAttention"].from_peer({"d": D, "heads": H}, {"qkv_proj.weight": torch.zeros(32, D)})
    for peer in ("d2l/attention", "labml/attention"):
        sizes = {"h": D, "d": D, "heads": H, "bias": True, "add_h": 8, "ffn": 20}
        with pytest.raises(ModelFileError, match="stray is unknown"):
            PEERS[peer].from_peer(sizes, {"stray": torch.zeros(1)})
