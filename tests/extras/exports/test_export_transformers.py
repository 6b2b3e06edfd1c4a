"""Exports for transformers, against its own code, and back again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import tokenizer, write_language_model, write_transformer
from slices import sliced

from manyheads.errors import ConfigError
from manyheads.extras.exports import ExportOptions
from manyheads.extras.exports.engine import export_model
from manyheads.extras.peers import hf_tokenizer
from manyheads.extras.peers.convert import import_folder
from manyheads.extras.peers.marian import fitted, halves_order
from manyheads.models.pretrained import load, portable_state
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

HELD: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {"norm_position": "pre"},
    "pre-norm, own output": {"norm_position": "pre", "tie_embeddings": "embeddings", "head_bias": True},
    "learned, post-norm": {"positions": "learned", "max_len": 40},
    "learned, pre-norm": {"positions": "learned", "norm_position": "pre", "max_len": 40},
    "halves": {"positions": "sinusoidal_halves"},
    "no biases": {"bias": False, "activation": "gelu"},
    "unequal stacks": {"num_decoder_heads": 4, "decoder_d_ff": 40, "num_decoder_layers": 3, "num_encoder_layers": 1},
    "two vocabularies": {"tie_embeddings": "decoder", "source_vocab_size": 345, "scale_embedding": False},
    "all apart": {"tie_embeddings": "none", "activation": "swish"},
}
TO = ExportOptions(to="transformers")


@pytest.mark.parametrize("kind", sliced(list(HELD), 3, "models for transformers"))
def test_it_computes_the_same_and_comes_back(kind: str, tmp_path: Path) -> None:
    model = write_transformer(tmp_path / "model", **HELD[kind])
    done = export_model(model, tmp_path / "out", TO)
    assert done.check.deviation < 5e-5
    assert done.check.num_equal == done.check.num_sentences == 20
    import_folder(tmp_path / "out", tmp_path / "again")
    again, wanted = portable_state(load(tmp_path / "again")), portable_state(fitted(load(model)))  # type: ignore[arg-type]
    for name, tensor in wanted.items():
        assert torch.equal(again[name], tensor), name
    assert (tmp_path / "again" / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()


def test_positions_change_by_the_order_of_features_alone(tmp_path: Path) -> None:
    module: Any = load(write_transformer(tmp_path / "model", norm_position="pre"))
    changed, order = fitted(module), halves_order(16)
    table, reordered = (one.body.source_positions.rows(0, 50) for one in (module, changed))
    assert torch.allclose(table[:, order], reordered, atol=1e-6)
    assert torch.equal(module.body.source_embedding.weight[:, order], changed.body.source_embedding.weight)
    ids, lengths = torch.tensor([[5, 6, 7, 2]]), torch.tensor([4])
    outputs = [one.log_probs(ids, lengths, torch.tensor([[1, 9, 8]])) for one in (module, changed)]
    assert torch.allclose(*outputs, atol=1e-5)
    assert fitted(changed) is changed


def test_text_goes_in_and_out(tmp_path: Path) -> None:
    model = write_transformer(tmp_path / "model", norm_position="pre")
    export_model(model, tmp_path / "out", TO, check=False)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    own = tokenizer()
    for text in ("I am hungry.", "the </s> end <pad>", "Ünï  cöde"):
        ids = theirs(text).input_ids
        assert ids == [*own.encode(text), own.eos_id]
        assert theirs.decode(ids, skip_special_tokens=True) == own.decode(own.encode(text))


def test_tags_of_languages_are_read_there_and_come_back(tmp_path: Path) -> None:
    own = Tokenizer.train(["hello world", "guten Tag"] * 9, TokenizerSettings(vocab_size=300), languages=["de", "fr"])
    for name, content in hf_tokenizer.to_files(own, 40).items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text in (">>de<< hello world", ">>fr<<hello"):
        assert theirs(text).input_ids == [*own.source.encode(text), own.eos_id]
    again = hf_tokenizer.from_folder(tmp_path)
    assert again.to_json() == own.to_json()
    assert ">>de<<" in hf_tokenizer.notes_of(own)[0]


def test_words_are_noted(tmp_path: Path) -> None:
    model = write_transformer(tmp_path / "model", kind="word")
    notes = export_model(model, tmp_path / "out", TO, check=False).notes
    assert any("become special ids" in note for note in notes)


def test_a_reformer_becomes_its_own_class(tmp_path: Path) -> None:
    """Which hashes as ours, so texts of any length are compared."""
    model = write_language_model(
        tmp_path / "model",
        "reformer",
        **{"vocab_size": 40, "d_model": 16, "num_heads": 2, "d_ff": 24, "num_layers": 2, "layers": ("local", "lsh")},
        **{
            "positions": "learned",
            "max_len": 64,
            "chunk_len": 8,
            "exact_len": 8,
            "num_buckets": (4,),
            "visible": "chunk",
        },
        **{"within_bucket": False, "correct_duplicates": False, "look_across_rounds": True, "wrap": True},
        **{"local_wrap": True, "num_hashes": 1, "hash_seed": 3, "shared_rotations": True, "pad_to_chunks": True},
        ff_chunk_len=7,
    )
    done = export_model(model, tmp_path / "out", TO)
    assert done.check.deviation < 5e-5
    notes = "\n".join(done.notes)
    assert "model.lm_head.decoder.bias = model.lm_head.bias" in notes
    assert "no multiple of chunk_size_feed_forward (7); from_pretrained(FOLDER, chunk_size_feed_forward=0)" in notes
    import_folder(tmp_path / "out", tmp_path / "again")
    again = portable_state(load(tmp_path / "again"))
    for name, tensor in portable_state(load(model)).items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"activation": "relu", "norm_eps": 1e-6}, "norm_eps 1e-06"),
        ({"norm": "unbiased"}, "norm 'unbiased'"),
        ({"final_norm": True}, "has_final_norm True"),
        ({"norm_position": "pre", "final_norm": False}, "has_final_norm False"),
        ({"norm_position": "pre", "tie_embeddings": "none"}, "tie_embeddings 'none'"),
        ({"with_tokenizer": False}, "no tokenizer"),
    ],
)
def test_what_it_cannot_hold_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = write_transformer(tmp_path / "model", **changes)
    with pytest.raises(ConfigError, match=said):
        export_model(model, tmp_path / "out", TO)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_transformer_xl_is_refused(tmp_path: Path) -> None:
    model = write_language_model(
        tmp_path / "model", "transformer-xl", vocab_size=20, d_model=8, num_heads=2, d_ff=8, num_layers=1
    )
    with pytest.raises(ConfigError, match=r"use onnx or transformers/TransfoXL or kimiyoung/TransformerXL"):
        export_model(model, tmp_path / "out", TO)
