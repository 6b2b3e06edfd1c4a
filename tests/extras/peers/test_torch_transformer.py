"""Against torch.nn.Transformer itself: masks of every form, layouts, options; weights both ways."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads.catalogue import build_model
from manyheads.errors import ConfigError, ModelFileError, RequestError, ShapeError
from manyheads.extras.peers import PEERS
from manyheads.models.transformer.config import TransformerConfig

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")
LOADER: Any = PEERS["torch/Transformer"]
SIZES = {"d_model": 12, "nhead": 3, "num_encoder_layers": 2, "num_decoder_layers": 1, "dim_feedforward": 20}
B, S, T = 2, 5, 4


def peer(**options: Any) -> nn.Transformer:
    torch.manual_seed(1)
    model = nn.Transformer(**{**SIZES, "batch_first": True, **options})
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start at 0 and 1, which would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def wrapped(model: nn.Transformer, **options: Any) -> Any:
    config = {"model": {**SIZES, "batch_first": True, **options}}
    return LOADER.from_peer(config, model.state_dict())


def inputs(batch_first: bool = True) -> dict[str, Tensor]:
    torch.manual_seed(2)
    src, tgt = torch.randn(B, S, 12), torch.randn(B, T, 12)
    return (
        {"in.src": src, "in.tgt": tgt}
        if batch_first
        else {"in.src": src.transpose(0, 1), "in.tgt": tgt.transpose(0, 1)}
    )


def peer_run(model: nn.Transformer, given: dict[str, Tensor]) -> dict[str, Tensor]:
    def get(name: str) -> Tensor | None:
        return given.get(f"in.{name}")

    memory = model.encoder(given["in.src"], mask=get("src_mask"), src_key_padding_mask=get("src_key_padding"))
    memory_padding = get("memory_key_padding") if "in.memory_key_padding" in given else get("src_key_padding")
    out = model.decoder(
        given["in.tgt"],
        memory,
        tgt_mask=get("tgt_mask"),
        memory_mask=get("memory_mask"),
        tgt_key_padding_mask=get("tgt_key_padding"),
        memory_key_padding_mask=memory_padding,
    )
    return {"out.memory": memory.detach(), "out.out": out.detach()}


def assert_same(wrapper: Any, model: nn.Transformer, given: dict[str, Tensor]) -> None:
    theirs, ours = peer_run(model, given), wrapper.run(given)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-5)


CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
PADDING = torch.arange(S)[None] >= torch.tensor([[S], [3]])
MASKS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "causal": {"in.tgt_mask": CAUSAL},
    "causal float": {"in.tgt_mask": nn.Transformer.generate_square_subsequent_mask(T)},
    "additive": {"in.src_mask": torch.linspace(-2, 2, S * S).view(S, S), "in.memory_mask": torch.ones(T, S).tril()},
    "additive and padding": {
        "in.src_mask": torch.linspace(-2, 2, S * S).view(S, S),
        "in.src_key_padding": torch.zeros(B, S).masked_fill(PADDING, float("-inf")),
    },
    "additive with a blocked row": {
        "in.src_mask": torch.linspace(-2, 2, S * S).view(S, S).index_fill(0, torch.tensor([3]), float("-inf"))
    },
    "padding": {"in.src_key_padding": PADDING, "in.tgt_key_padding": torch.arange(T)[None] >= torch.tensor([[2], [4]])},
    "memory padding apart": {"in.src_key_padding": PADDING, "in.memory_key_padding": PADDING.flip(0)},
    "a pattern a head": {"in.src_mask": (torch.arange(B * 3 * S * S) % 7 == 1).view(B * 3, S, S)},
    "blocked rows": {
        "in.src_mask": (torch.arange(S) == 2)[:, None].expand(S, S),
        "in.memory_mask": torch.ones(T, S) > 0,
    },
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("norm_first", [False, True])
def test_masks(masks: dict[str, Tensor], norm_first: bool) -> None:
    model = peer(norm_first=norm_first)
    assert_same(wrapped(model, norm_first=norm_first), model, {**inputs(), **masks})


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "gelu", "layer_norm_eps": 0.5},
        {"bias": False, "norm_first": True},
        {"batch_first": False},
        {"dropout": 0.5, "nhead": 4},
        {"num_encoder_layers": 1, "num_decoder_layers": 3},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    model = peer(**options)
    assert_same(wrapped(model, **options), model, inputs(options.get("batch_first", True)) | {"in.tgt_mask": CAUSAL})


def test_one_sequence_without_a_batch() -> None:
    model = peer()
    assert_same(wrapped(model), model, {name: tensor[0] for name, tensor in inputs().items()})


def test_float64_weights_run_in_float64() -> None:
    model = peer().double()
    given = {name: tensor.double() for name, tensor in inputs().items()}
    out = wrapped(model).run(given)["out.out"]
    torch.testing.assert_close(out, peer_run(model, given)["out.out"], atol=1e-12, rtol=1e-12)


def test_gradients_come_only_when_asked_for() -> None:
    model = peer()
    names = {f"grad.{name}" for name, _ in model.named_parameters()}
    asked = LOADER.from_peer({"model": {**SIZES, "batch_first": True}, "grads": True}, model.state_dict())
    given = inputs()
    answer = asked.run(given)
    assert answer.keys() == names | {"out.memory", "out.out"}
    out = model(given["in.src"], given["in.tgt"])
    (out.square().mean(-1) * out.sin().sum(-1)).mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(answer[f"grad.{name}"], parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("bias", [True, False])
def test_our_weights_in_the_peer(position: Any, bias: bool) -> None:
    """A translator's stacks, loaded strictly into torch's class, give the same vectors; and come back unchanged."""
    torch.manual_seed(3)
    config = TransformerConfig(
        source_vocab_size=9,
        target_vocab_size=9,
        d_model=12,
        num_heads=3,
        d_ff=20,
        num_encoder_layers=2,
        num_decoder_layers=2,
        norm_position=position,
        final_norm=True,
        bias=bias,
        activation="gelu",
    )
    ours = build_model(config).eval()
    described, weights = LOADER.to_peer(ours.body)
    theirs = nn.Transformer(**described["model"]).eval()
    theirs.load_state_dict(weights, strict=True)
    given = {**inputs(), "in.tgt_mask": CAUSAL}
    assert_same(LOADER.from_peer(described, weights), theirs, given)
    source, target = torch.tensor([[3, 4, 5]]), torch.tensor([[1, 6]])
    x = ours.body.source_positions(ours.body.source_embedding(source))
    y = ours.body.target_positions(ours.body.target_embedding(target))
    hidden = theirs(x, y, tgt_mask=CAUSAL[:2, :2])
    torch.testing.assert_close(ours.body(source, torch.tensor([3]), target), hidden, atol=1e-5, rtol=1e-5)
    again, weights_again = LOADER.to_peer(LOADER.from_peer(described, weights).module)
    assert again == described
    assert all(torch.equal(weights[name], tensor) for name, tensor in weights_again.items())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"norm": "unbiased"}, "norm"),
        ({"final_norm": False}, "final_norm"),
        ({"final_norm": True, "activation": "swish"}, "activation"),
    ],
)
def test_what_the_peer_cannot_hold(change: dict[str, Any], named: str) -> None:
    config = TransformerConfig(source_vocab_size=5, target_vocab_size=5, d_model=8, num_heads=2, d_ff=8, **change)
    with pytest.raises(ConfigError, match=named):
        LOADER.to_peer(build_model(config).body)


def test_mistakes_are_named() -> None:
    model = peer()
    with pytest.raises(ConfigError, match="colour"):
        wrapped(model, colour=1)
    with pytest.raises(ConfigError, match="swish"):
        wrapped(model, activation="swish")
    with pytest.raises(ModelFileError, match=r"decoder\.norm\.bias is missing"):
        LOADER.from_peer({"model": SIZES}, {k: v for k, v in model.state_dict().items() if k != "decoder.norm.bias"})
    with pytest.raises(ModelFileError, match="stray is unknown"):
        LOADER.from_peer({"model": SIZES}, model.state_dict() | {"stray": torch.zeros(1)})
    with pytest.raises(ModelFileError, match="shape"):
        wrapped(model, dim_feedforward=21)
    wrapper = wrapped(model)
    with pytest.raises(RequestError, match=r"in\.tgt is missing"):
        wrapper.run({"in.src": torch.zeros(1, 2, 12)})
    with pytest.raises(RequestError, match=r"in\.colour"):
        wrapper.run({**inputs(), "in.colour": torch.zeros(1)})
    with pytest.raises(ShapeError, match="bool"):
        wrapper.run({**inputs(), "in.src_mask": torch.zeros(S, S, dtype=torch.int64)})
    with pytest.raises(ShapeError, match="q_len, k_len"):
        wrapper.run({**inputs(), "in.src_mask": torch.zeros(B * 3 + 1, S, S)})
    assert all(layer.self_attn.score is None for layer in wrapper.module.encoder.layers)
