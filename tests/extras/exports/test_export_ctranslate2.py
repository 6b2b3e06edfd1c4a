"""Exports for CTranslate2, against its own code: every shape that it can hold, and each refusal."""

from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import tokenizer, write_language_model, write_transformer

from manyheads.decoding.translator import Translator
from manyheads.errors import ConfigError
from manyheads.extras.exports import ExportOptions
from manyheads.extras.exports.ctranslate2 import MIN_POSITIONS, write
from manyheads.extras.exports.engine import export_model
from manyheads.models.pretrained import load

ctranslate2 = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")

HELD: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {"norm_position": "pre"},
    "pre-norm without final norm": {"norm_position": "pre", "final_norm": False},
    "learned positions": {"positions": "learned", "max_len": 40},
    "positions in halves": {"positions": "sinusoidal_halves", "norm_position": "pre"},
    "unequal stacks": {"num_decoder_heads": 4, "decoder_d_ff": 40, "num_decoder_layers": 3, "num_encoder_layers": 1},
    "no biases": {"bias": False, "norm_position": "pre"},
    "apart": {"tie_embeddings": "none", "head_bias": True, "scale_embedding": False},
    "more rows than pieces": {"tie_embeddings": "decoder", "source_vocab_size": 345},
    "another epsilon": {"norm_eps": 1e-2},
    "relative bias": {"relative_bias": 3, "positions": "none", "norm_position": "pre"},
    "a relative bias beyond most tokens": {"relative_bias": 30, "positions": "none", "num_decoder_heads": 4},
    **{name: {"activation": name} for name in ("gelu", "gelu_tanh", "swish", "quick_gelu", "tanh", "sigmoid")},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("changes", HELD.values(), ids=HELD)
def test_it_computes_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    model = write_transformer(tmp_path / "model", **changes)
    done = export_model(model, tmp_path / "out", ExportOptions(to="ctranslate2"))
    assert done.check.deviation < 1e-4
    assert done.check.num_equal == done.check.num_sentences == 20


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["int8", "int16", "float16", "bfloat16"])
def test_quantized_weights_are_smaller_and_close(kind: str, tmp_path: Path) -> None:
    model = write_transformer(tmp_path / "model", d_model=64, d_ff=256)
    plain = export_model(model, tmp_path / "plain", ExportOptions(to="ctranslate2"))
    small = export_model(model, tmp_path / "small", ExportOptions(to="ctranslate2", quantization=kind))
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("plain", "small")]
    assert sizes[1] < 0.75 * sizes[0]
    assert small.check.limit is None
    assert plain.check.deviation < small.check.deviation
    # With the weights read as float32: on processors without int8 dot products, CTranslate2's int8 sums can overflow.
    pieces = tokenizer().pieces
    texts = [[pieces[(7 * row + column) % 300 + 10] for column in range(6)] for row in range(8)]
    scores = [
        ctranslate2.Translator(str(tmp_path / name), compute_type="float32").score_batch(texts, texts)
        for name in ("plain", "small")
    ]
    log_probs = [torch.tensor([score.log_probs for score in found]) for found in scores]
    assert 0 < (log_probs[0] - log_probs[1]).abs().max() < 0.5


def test_it_translates_text_as_we_do(tmp_path: Path) -> None:
    model = write_transformer(tmp_path / "model", norm_position="pre")
    export_model(model, tmp_path / "out", ExportOptions(to="ctranslate2"))
    own = tokenizer()
    texts = ["I am hungry.", "the cat sees a dog", "Ende </s> ü"]
    sources = [[own.pieces[index] for index in own.encode(text)] for text in texts]
    theirs = ctranslate2.Translator(str(tmp_path / "out"))
    found = theirs.translate_batch(sources, beam_size=1, max_decoding_length=12, min_decoding_length=0)
    ids = [[own.pieces.index(piece) for piece in one.hypotheses[0]] for one in found]
    translator = Translator.from_pretrained(model, device="cpu")
    assert own.decode_batch(ids) == translator.translate(texts, num_beams=1, max_new_tokens=12, keep_words=False)


def test_padding_and_the_start_token_are_never_produced(tmp_path: Path) -> None:
    model = write_transformer(tmp_path / "model", tie_embeddings="none", head_bias=True)
    module = load(model)
    with torch.no_grad():
        module.head.bias[:2] = 50.0  # type: ignore[union-attr,index]
    from manyheads.models.pretrained import save_pretrained

    save_pretrained(module, model, tokenizer=tokenizer())
    done = export_model(model, tmp_path / "out", ExportOptions(to="ctranslate2"))
    assert done.check.num_equal == 20


def test_sinusoidal_positions_reach_far(tmp_path: Path) -> None:
    model = write_transformer(tmp_path / "model")
    done = export_model(model, tmp_path / "out", ExportOptions(to="ctranslate2"), check=False)
    assert f"at most {MIN_POSITIONS} tokens" in done.notes[0]
    assert done.not_checked == "--no-check was given"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"activation": "mish"}, "model.activation 'mish'"),
        ({"norm": "unbiased"}, "model.norm 'unbiased'"),
        ({"final_norm": True}, "model.final_norm True"),
        ({"relative_bias": 3}, "both model.relative_bias and model.positions 'sinusoidal'"),
        ({"num_encoder_layers": 0}, "model.num_encoder_layers 0"),
        ({"with_tokenizer": False}, "no tokenizer"),
    ],
)
def test_what_it_cannot_hold_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = write_transformer(tmp_path / "model", **changes)
    with pytest.raises(ConfigError, match=said):
        export_model(model, tmp_path / "out", ExportOptions(to="ctranslate2"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_additive_attention_is_refused(tmp_path: Path) -> None:
    from manyheads.catalogue import ATTENTIONS

    model = write_transformer(tmp_path / "model", attention=ATTENTIONS["additive"]())
    with pytest.raises(ConfigError, match=r"model\.attention 'additive'"):
        write(model, tmp_path / "out", ExportOptions(to="ctranslate2"))


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    model = write_language_model(
        tmp_path / "model", "transformer-xl", vocab_size=20, d_model=8, num_heads=2, d_ff=8, num_layers=1
    )
    with pytest.raises(ConfigError, match=r"cannot hold a transformer-xl \(model\.architecture\)"):
        export_model(model, tmp_path / "out", ExportOptions(to="ctranslate2"))
