"""d_k and d_v of their own, and Glorot initialisation: table 3 of the paper, refusals, and who cannot hold them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from manyheads.catalogue import build_model
from manyheads.cli.main import main
from manyheads.errors import ConfigError
from manyheads.extras.peers import PEERS
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer.config import TransformerConfig
from manyheads.nn import Causal, MultiHeadAttention
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

SIZES: dict[str, Any] = {"d_model": 16, "num_heads": 2, "d_ff": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}
VOCAB = {"source_vocab_size": 40_700, "target_vocab_size": 40_700}

# Vaswani et al. 2017, table 3: the rows' settings and their parameters in millions.
TABLE_3: dict[str, tuple[dict[str, Any], int]] = {
    "base": ({}, 65),
    "(A) 1 head": ({"num_heads": 1}, 65),
    "(A) 32 heads": ({"num_heads": 32}, 65),
    "(B) d_k 16": ({"head_dim": 16}, 58),
    "(B) d_k 32": ({"head_dim": 32}, 60),
    "(C) 2 layers": ({"num_encoder_layers": 2, "num_decoder_layers": 2}, 36),
    "(C) 4 layers": ({"num_encoder_layers": 4, "num_decoder_layers": 4}, 50),
    "(C) 8 layers": ({"num_encoder_layers": 8, "num_decoder_layers": 8}, 80),
    "(C) d_model 256": ({"d_model": 256, "head_dim": 32, "value_dim": 32}, 28),
    "(C) d_model 1024": ({"d_model": 1024, "head_dim": 128, "value_dim": 128}, 168),
    "(C) d_ff 1024": ({"d_ff": 1024}, 53),
    "(C) d_ff 4096": ({"d_ff": 4096}, 90),
    "big": ({"d_model": 1024, "d_ff": 4096, "num_heads": 16}, 213),
}


@pytest.mark.parametrize("row", TABLE_3)
def test_parameters_are_those_of_table_3(row: str) -> None:
    """The paper has "about 37,000" tokens; the base model has its 65M with 40,700, and the big one 2% too many."""
    settings, millions = TABLE_3[row]
    with torch.device("meta"):  # nothing is allocated
        model = build_model(TransformerConfig(**{**VOCAB, **settings}))
    found = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert found == pytest.approx(millions, rel=0.03)


def test_projections_have_the_widths_of_the_paper() -> None:
    """Sec. 3.2.2: d_model x h d_k, d_model x h d_v and h d_v x d_model."""
    config = TransformerConfig(**SIZES, source_vocab_size=9, target_vocab_size=9, head_dim=12, value_dim=6)
    layer: Any = build_model(config).body.decoder.layers[0]
    for attention in (layer.self_attn, layer.cross_attn):
        shapes = [tuple(getattr(attention, f"{name}_proj").weight.shape) for name in ("q", "k", "v", "out")]
        assert shapes == [(24, 16), (24, 16), (12, 16), (16, 12)]
    assert "heads of 12 (values 6)" in config.describe()


def test_one_width_alone_leaves_the_other() -> None:
    config = TransformerConfig(head_dim=16)
    assert (config.head_dim_of("encoder"), config.value_dim_of("decoder")) == (16, 64)
    assert not TransformerConfig(head_dim=64, value_dim=64).undivided
    assert TransformerConfig(value_dim=64, num_decoder_heads=4).undivided == "value_dim 64"


def test_attention_scales_by_the_width_of_keys() -> None:
    """Not by that of values; and step by step it is what it is at once."""
    torch.manual_seed(1)
    attention = MultiHeadAttention(8, 2, head_dim=3, value_head_dim=5)
    x = torch.randn(2, 6, 8)
    out, _, weights = attention(x, mask=Causal(), need_weights=True)
    q, (k, _) = attention.project_query(x), attention.project_memory(x)
    scores = (q @ k.transpose(-1, -2)) / 3**0.5
    scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(weights, scores.softmax(-1))
    state = attention.empty_cache(2, like=x)
    steps = []
    for token in x.split(2, dim=1):
        step, state = attention(token, mask=Causal(), state=state)
        steps.append(step)
    torch.testing.assert_close(torch.cat(steps, dim=1), out)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_dim": 0}, "model.head_dim is 0"),
        ({"value_dim": -1}, "model.value_dim is -1"),
        ({"num_heads": 3, "head_dim": 8}, "give both model.head_dim and model.value_dim"),
    ],
)
def test_wrong_widths(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(**{**SIZES, **settings})
    TransformerConfig(**{**SIZES, "num_heads": 3, "head_dim": 8, "value_dim": 8})


def test_glorot_reaches_every_matrix() -> None:
    """The tables have std 1/sqrt(d_model) otherwise; Glorot's bound is sqrt(6 / (rows + columns))."""
    torch.manual_seed(1)
    own = TransformerConfig(**SIZES, source_vocab_size=500, target_vocab_size=500, initialisation="glorot")
    model = build_model(own)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    assert len(matrices) > 10
    for weight in matrices:
        bound = (6 / sum(weight.shape)) ** 0.5
        assert 0.9 * bound < float(weight.detach().abs().max()) <= bound
    other: Any = build_model(TransformerConfig(**SIZES, source_vocab_size=500, target_vocab_size=500))
    assert other.body.source_embedding.weight.detach().std().item() == pytest.approx(16**-0.5, rel=0.05)


PEERS_OF_TRANSFORMERS = {
    "annotated-transformer": {"norm": "unbiased", "norm_position": "pre", "tie_embeddings": "none", "head_bias": True},
    "torch/Transformer": {"final_norm": True},
    "transformers/Marian": {"positions": "sinusoidal_halves"},
    "transformers/Pegasus": {"positions": "sinusoidal_halves", "norm_position": "pre"},
}


@pytest.mark.parametrize("peer", PEERS_OF_TRANSFORMERS)
@pytest.mark.parametrize("width", ["head_dim", "value_dim"])
def test_peers_refuse_by_name(peer: str, width: str) -> None:
    config = {**SIZES, "source_vocab_size": 9, "target_vocab_size": 9, **PEERS_OF_TRANSFORMERS[peer]}
    loader: Any = PEERS[peer]
    for value in (None, 8):
        model = build_model(TransformerConfig(**config, **{width: value}))
        loader.describe(model.body if peer.startswith("torch") else model)
    model = build_model(TransformerConfig(**config, **{width: 5}))
    with pytest.raises(ConfigError, match=f"cannot hold a model with {width} 5; take another format, or train without"):
        loader.describe(model.body if peer.startswith("torch") else model)


@pytest.mark.parametrize(
    "peer",
    ["d2l/MultiHeadAttention", "labml/MultiHeadAttention", "torch/MultiheadAttention", "fused-qkv/MultiheadAttention"],
)
def test_attention_of_peers_refuses_wide_values(peer: str) -> None:
    loader: Any = PEERS[peer]
    with pytest.raises(ConfigError, match="values of width 12"):
        loader.describe(MultiHeadAttention(8, 2, value_head_dim=6))


@pytest.mark.parametrize("to", ["onnx", "transformers", "annotated-transformer", "ctranslate2"])
def test_exports_refuse_by_name(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if to in ("onnx", "ctranslate2"):
        pytest.importorskip(to)
    tokenizer = Tokenizer.train(["the cat sees two dogs"] * 20, TokenizerSettings(kind="bpe", vocab_size=300))
    size = tokenizer.vocab_size
    changes = PEERS_OF_TRANSFORMERS.get(to, {"positions": "sinusoidal_halves"})
    config = TransformerConfig(**SIZES, source_vocab_size=size, target_vocab_size=size, value_dim=5, **changes)
    save_pretrained(build_model(config), tmp_path / "model", tokenizer=tokenizer)
    assert main(["export", str(tmp_path / "model"), "--to", to, "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "value_dim 5" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_model_of_its_own_widths_comes_back(tmp_path: Path) -> None:
    from manyheads.models.pretrained import load

    config = TransformerConfig(**SIZES, source_vocab_size=9, target_vocab_size=9, head_dim=3, value_dim=5)
    model: nn.Module = build_model(config)
    save_pretrained(model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.config == config
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
