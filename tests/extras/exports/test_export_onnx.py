"""ONNX exports of tiny models, run by onnxruntime."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.catalogue import ARCHITECTURES, ATTENTIONS, build_model
from manyheads.errors import ConfigError
from manyheads.extras.exports import ExportOptions
from manyheads.extras.exports.engine import Exported, export_model
from manyheads.models.pretrained import save_pretrained
from manyheads.models.reformer.config import ReformerConfig, ReformerSeq2SeqConfig
from manyheads.models.transformer.config import TransformerConfig
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.text.of_folder import PieceVocabulary
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabulary import ByteVocabulary, Vocabulary

pytestmark = pytest.mark.unhooked  # tracing gives tensors where the signatures say int

onnx = pytest.importorskip("onnx", reason="no onnx; pip install '.[onnx]'")
pytest.importorskip("onnxruntime", reason="no onnxruntime; pip install '.[onnx]'")
np = pytest.importorskip("numpy")

SIZES: dict[str, Any] = {"d_model": 16, "num_heads": 2, "d_ff": 32}
LAYERS: dict[str, Any] = {"num_encoder_layers": 1, "num_decoder_layers": 2}
TOKENIZER = Tokenizer.train(["the cat sees two dogs"] * 20, TokenizerSettings(kind="bpe", vocab_size=300))
VOCAB = {"source_vocab_size": TOKENIZER.vocab_size, "target_vocab_size": TOKENIZER.vocab_size}


def saved(folder: Path, config: Any, tokenizer: Tokenizer | Vocabulary | None = TOKENIZER) -> Path:
    """A model with weights far from zero, biases included."""
    torch.manual_seed(0)
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    save_pretrained(model, folder / "model", tokenizer=tokenizer)
    return folder / "model"


def exported(
    folder: Path, config: Any, tokenizer: Tokenizer | Vocabulary | None = TOKENIZER, **options: Any
) -> Exported:
    return export_model(saved(folder, config, tokenizer), folder / "out", ExportOptions(to="onnx", **options))


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "post-norm, uneven stacks": {"num_decoder_heads": 4, "decoder_d_ff": 24},
    "pre-norm, learned positions": {"norm_position": "pre", "positions": "learned", "max_len": 40},
    "halves, no bias, quick gelu": {"positions": "sinusoidal_halves", "bias": False, "activation": "quick_gelu"},
    "relative bias": {"relative_bias": 2},
    "relative bias, no positions": {"relative_bias": 3, "positions": "none", "norm_position": "pre"},
    "additive, unbiased, all tied": {
        "attention": ATTENTIONS["additive"](),
        "norm": "unbiased",
        "tie_embeddings": "all",
        "activation": "squared_relu",
    },
    "swiglu": {"ffn": "swiglu", "norm_position": "pre"},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", TRANSFORMERS)
def test_a_transformer_gives_the_same_ids_and_log_probabilities(case: str, tmp_path: Path) -> None:
    done = exported(tmp_path, TransformerConfig(**SIZES, **LAYERS, **VOCAB, **TRANSFORMERS[case]))
    assert done.check.deviation < 1e-4
    assert done.check.num_equal == done.check.num_sentences == 20


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    exported(folder, TransformerConfig(**SIZES, **LAYERS, **VOCAB))
    return folder


def test_names_and_axes_are_those_of_the_clients(plain: Path) -> None:
    encoder = onnx.load(plain / "out/onnx/encoder_model.onnx").graph
    decoder = onnx.load(plain / "out/onnx/decoder_model_merged.onnx").graph
    assert [one.name for one in encoder.input] == ["input_ids", "attention_mask"]
    assert [one.name for one in encoder.output] == ["last_hidden_state"]
    kinds = [f"{i}.{side}.{kind}" for i in range(2) for side in ("decoder", "encoder") for kind in ("key", "value")]
    assert {one.name for one in decoder.input} == {
        *("input_ids", "encoder_attention_mask", "encoder_hidden_states", "use_cache_branch"),
        *(f"past_key_values.{kind}" for kind in kinds),
    }
    assert [one.name for one in decoder.output] == ["logits", *(f"present.{kind}" for kind in kinds)]
    for value in (*encoder.input, *encoder.output, *decoder.input, *decoder.output):
        axes = value.type.tensor_type.shape.dim
        free = [bool(axis.dim_param) for axis in axes]
        expected = {4: [True, False, True, False], 3: [True, True, False], 2: [True, True], 1: [False]}[len(axes)]
        assert free == expected, value.name


def test_rows_of_a_batch_do_not_see_padding(plain: Path) -> None:
    from manyheads.extras.exports.onnx import Decoder

    decoder = Decoder(plain / "out")
    sources = [[5, 6, 7, 8, 9, 2], [11, 2]]
    start = np.full((2, 1), 1, np.int64)
    together, _ = decoder.step(start, decoder.start(sources, 0))
    for row, source in enumerate(sources):
        alone, _ = decoder.step(start[:1], decoder.start([source], 0))
        np.testing.assert_allclose(together[row], alone[0], atol=1e-5)
    inputs = decoder.start([sources[0]], 0)
    inputs["encoder_attention_mask"] = np.zeros_like(inputs["encoder_attention_mask"])
    assert np.isfinite(decoder.step(start[:1], inputs)[0]).all()


def test_the_files_beside_the_graphs(plain: Path) -> None:
    config = json.loads((plain / "out/config.json").read_text())
    generation = json.loads((plain / "out/generation_config.json").read_text())
    assert config["model_type"] == "marian"
    assert config["decoder_start_token_id"] == generation["decoder_start_token_id"] == TOKENIZER.bos_id
    assert generation["bad_words_ids"] == [[TOKENIZER.pad_id], [TOKENIZER.bos_id]]
    tokenizer = json.loads((plain / "out/tokenizer.json").read_text())
    assert tokenizer["post_processor"]["type"] == "TemplateProcessing"


def test_int8_is_smaller_and_near(plain: Path, tmp_path: Path) -> None:
    done = export_model(plain / "model", tmp_path / "out", ExportOptions(to="onnx", quantization="int8"))
    for name in ("encoder_model", "decoder_model_merged"):
        small = tmp_path / f"out/onnx/{name}_quantized.onnx"
        types = {one.data_type for one in onnx.load(small).graph.initializer}
        assert onnx.TensorProto.INT8 in types
    assert done.check.limit is None
    assert 0 < done.check.deviation < 5


XL: dict[str, dict[str, Any]] = {
    "relative": {"memory_len": 7},
    "relative, learned": {"memory_len": 7, "attention": "relative_learned"},
    "relative bias": {"memory_len": 7, "relative_bias": 3},
    "absolute, learned": {"memory_len": 7, "attention": "absolute_learned"},
    "absolute, no memory": {"memory_len": 0, "attention": "absolute"},
    "same length, clamped, pre-norm": {"memory_len": 7, "same_length": True, "clamp_len": 5, "norm_position": "pre"},
    "adaptive": {"memory_len": 9, "cutoffs": (20, 40), "div_value": 2},
    "memories of zeros, as in TensorFlow": {
        "memory_len": 7,
        "initial_memory": "zeros",
        "same_length": True,
        "same_length_extra_key": True,
    },
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", XL)
def test_a_transformer_xl_reads_two_segments(case: str, tmp_path: Path) -> None:
    done = exported(tmp_path, TransformerXLConfig(vocab_size=60, num_layers=2, **SIZES, **XL[case]), None)
    assert done.check.deviation < 1e-4


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_language_model_with_its_vocabulary(kind: str, tmp_path: Path) -> None:
    """Subwords are written as a tokenizer.json. The heads of a language model may have been pruned."""
    vocabulary = ByteVocabulary() if kind == "bytes" else PieceVocabulary(TOKENIZER)
    config = TransformerXLConfig(
        vocab_size=vocabulary.vocab_size, num_layers=2, memory_len=4, layer_heads=(1, 2), share_biases=False, **SIZES
    )
    done = exported(tmp_path, config, vocabulary)
    assert done.check.deviation < 1e-4
    assert (tmp_path / "out" / "tokenizer.json").is_file() == (kind == "bpe")
    said = {"bytes": "of the kind bytes is not written", "bpe": f"put the id {vocabulary.line_id}"}[kind]
    assert any(said in note for note in done.notes)


REFORMERS: dict[str, dict[str, Any]] = {
    "hashed, axial": {},
    "local, sloped": {"layers": ("local",), "local_chunk_len": 4, "local_slopes": True},
    "local, trained slopes, no positions": {
        "layers": ("local",),
        "local_chunk_len": 4,
        "local_slopes": True,
        "train_slopes": True,
        "positions": "none",
    },
    "local and full, both ways": {
        "layers": ("local", "full"),
        "local_chunk_len": 4,
        "local_chunks_after": 1,
        "causal": False,
        "visible": "chunk",
        "positions": "sinusoidal",
    },
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", REFORMERS)
def test_a_reformer_with_exact_attention(case: str, tmp_path: Path) -> None:
    config = ReformerConfig(vocab_size=60, num_layers=2, max_len=64, **SIZES, **REFORMERS[case])
    done = exported(tmp_path, config, None)
    assert done.check.deviation < 1e-4
    assert any("exact" in note for note in done.notes) == ("lsh" in config.kinds)


def test_a_wrong_graph_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyheads.extras.exports import onnx_graphs

    monkeypatch.setattr(
        onnx_graphs, "sinusoidal", lambda places, d_model, layout: places[:, None] * torch.zeros(d_model)
    )
    with pytest.raises(Exception, match="deviate"):
        exported(tmp_path, TransformerConfig(**SIZES, **LAYERS, **VOCAB))
    assert not (tmp_path / "out").exists()


REFUSED: dict[str, tuple[Any, Tokenizer | None, str, str]] = {
    "no tokenizer": (TransformerConfig(**SIZES, **LAYERS, **VOCAB), None, "onnx", "has no tokenizer"),
    "wrapped chunks": (
        ReformerConfig(vocab_size=60, num_layers=1, max_len=64, layers=("local",), local_wrap=True, **SIZES),
        None,
        "onnx",
        "local_wrap",
    ),
    "context that is read again": (
        TransformerXLConfig(vocab_size=60, num_layers=1, memory_len=4, ext_len=2, **SIZES),
        None,
        "onnx",
        "ext_len 2",
    ),
    "no encoder layer": (
        TransformerConfig(**SIZES, **{**LAYERS, "num_encoder_layers": 0}, **VOCAB),
        TOKENIZER,
        "onnx",
        "num_encoder_layers 0",
    ),
    "a Reformer that translates": (ReformerSeq2SeqConfig(**SIZES, **LAYERS, **VOCAB), TOKENIZER, "onnx", "cannot hold"),
    "a chart parser in a browser": (
        replace(ARCHITECTURES["transformer-spans"].presets["debug"], vocab_size=60),
        None,
        "web",
        "Use the folder with manyheads",
    ),
    "web without npm": (TransformerConfig(**SIZES, **LAYERS, **VOCAB), TOKENIZER, "web", "npm install"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    config, tokenizer, to, message = REFUSED[case]
    model = saved(tmp_path, config, tokenizer)
    with pytest.raises(ConfigError, match=message):
        export_model(model, tmp_path / "out", ExportOptions(to=to))
    assert not (tmp_path / "out").exists()


def test_an_incomplete_runtime_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path, TransformerConfig(**SIZES, **LAYERS, **VOCAB))
    with pytest.raises(ConfigError, match=r"incomplete: there is no .*transformers\.min\.js"):
        export_model(model, tmp_path / "out", ExportOptions(to="web", runtime=str(tmp_path)))
    with pytest.raises(ConfigError, match="for the format web"):
        ExportOptions(to="onnx", runtime=str(tmp_path))


def test_positions_are_those_of_the_model() -> None:
    from manyheads.extras.exports.onnx_graphs import sinusoidal
    from manyheads.nn.positions import sinusoidal_table

    places = torch.tensor([0, 1, 255, 256, 1000, 65_535])
    for layout in ("interleaved", "halves"):
        expected = sinusoidal_table(places.double(), 15, layout)
        torch.testing.assert_close(sinusoidal(places, 15, layout), expected, atol=3e-7, rtol=0)
