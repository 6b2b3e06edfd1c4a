"""Marian's own files: read as CTranslate2 reads them, equal to the same weights through transformers, and refusals."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from marian_models import ENGLISH, GERMAN, pieces_of
from marian_nmt_models import (
    OPTIONS,
    PRE,
    SEPARATE,
    peer_state,
    spm_model,
    weights_of,
    write_folder,
    write_npz,
    write_vocabulary,
)

import manyheads
from manyheads.cli.main import main
from manyheads.decoding.settings import load_settings
from manyheads.extras.peers import PEERS
from manyheads.models.pretrained import load
from manyheads.text.of_folder import load_tokenizer

pytest.importorskip("sentencepiece")

KINDS: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {**PRE, "transformer-ffn-activation": "relu"},
    "separate vocabularies": {"is_joint": False, "transformer-ffn-activation": "gelu"},
    "separate output": {"is_joint": False, **PRE, "tied-embeddings": False},
    "guided alignment": {"transformer-guided-alignment-layer": "1", "dec-depth": 2},
    "depth scaling": {"transformer-depth-scaling": True, "enc-depth": 11, "dec-depth": 3},
}


def write(folder: Path, **options: Any) -> Path:
    return write_folder(folder, **options)


def convert(source: Path, output: Path, *more: str) -> int:
    return main(["convert", str(source), "--from", "marian-nmt", "--output", str(output), *more])


def npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_translations_are_those_of_ctranslate2s_reader(kind: str, tmp_path: Path) -> None:
    package = pytest.importorskip("ctranslate2")
    theirs = write(tmp_path / "theirs", **KINDS[kind])
    assert convert(theirs, tmp_path / "ours") == 0
    vocabularies = [str(theirs / name) for name in yaml.safe_load((theirs / "decoder.yml").read_text())["vocabs"]]
    package.converters.MarianConverter(str(theirs / "model.npz"), vocabularies).convert(str(tmp_path / "ct2"))
    reader = package.Translator(str(tmp_path / "ct2"))
    tokenizer, model = load_tokenizer(tmp_path / "ours"), load(tmp_path / "ours")
    ours = manyheads.Translator.from_pretrained(tmp_path / "ours")
    sources = [tokenizer.source.tokens(tokenizer.source.encode(line)) for line in ENGLISH]
    found = [one[0] for one in ours.translate_nbest(list(ENGLISH), num_beams=1, max_new_tokens=30, keep_words=False)]
    options: dict[str, Any] = {"beam_size": 1, "disable_unk": True, "max_decoding_length": 30}
    expected = reader.translate_batch(sources, **options)
    bodies = [one.hypotheses[0] for one in expected]
    assert [[piece for piece in one.tokens if piece != "</s>"] for one in found] == bodies
    assert len({tuple(body) for body in bodies}) > 1  # the sources matter
    scored = reader.score_batch(sources, bodies)
    target, start = tokenizer.target, model.config.target_vocab_size - 1
    pieces = {piece: index for index, piece in enumerate(target.tokens(range(target.vocab_size)))}
    for line, body, score in zip(ENGLISH, bodies, scored, strict=True):
        ids = torch.tensor([[*tokenizer.source.encode(line), tokenizer.source.eos_id]])
        given = torch.tensor([[start, *(pieces[piece] for piece in body), target.eos_id]])
        with torch.no_grad():
            log_probs = model.log_probs(ids, torch.tensor([ids.shape[1]]), given[:, :-1])[0, :, :-1].log_softmax(-1)
        own = log_probs.gather(1, given[0, 1:, None])[:, 0]
        torch.testing.assert_close(own, torch.tensor(score.log_probs), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["post-norm", "separate vocabularies", "depth scaling", "pre-norm"])
def test_the_same_weights_through_transformers_are_equal_tensors(kind: str, tmp_path: Path) -> None:
    changes = {name: value for name, value in KINDS[kind].items() if name != "is_joint"}
    if kind == "separate vocabularies":
        changes |= {"tied-embeddings-all": False, "tied-embeddings": True}
    options = {**OPTIONS, **changes}
    weights = weights_of(options, (40, 40))
    ours = PEERS["marian-nmt"].from_peer({"model": options}, {name: torch.from_numpy(w) for name, w in weights.items()})
    peer = {
        "vocab_size": 41, "decoder_vocab_size": 41, "d_model": 16,
        "encoder_layers": options["enc-depth"], "decoder_layers": options["dec-depth"], "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "scale_embedding": True,
        "activation_function": {"gelu": "quick_gelu"}.get(
            options["transformer-ffn-activation"], options["transformer-ffn-activation"]
        ),
        "share_encoder_decoder_embeddings": options["tied-embeddings-all"],
    }  # fmt: skip
    name = "Pegasus" if kind == "pre-norm" else "Marian"
    if name == "Pegasus":
        peer = {key: peer[key] for key in peer if key not in ("decoder_vocab_size", "share_encoder_decoder_embeddings")}
        peer["model_type"] = "pegasus"
    state = {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in peer_state(weights).items()}
    theirs = PEERS[f"transformers/{name}"].from_peer({"model": peer}, state)
    first, second = ours.module.state_dict(), theirs.module.state_dict()
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []
    same = ("activation", "norm_position", "positions", "norm_eps", "scale_embedding", "tie_embeddings")
    assert [getattr(ours.module.config, key) for key in same] == [getattr(theirs.module.config, key) for key in same]


def test_back_through_transformers(tmp_path: Path) -> None:
    """The converted model can be written for transformers, and read again as the same model."""
    assert convert(write(tmp_path / "theirs"), tmp_path / "ours") == 0
    assert main(["convert", str(tmp_path / "ours"), "--to", "transformers/Marian", "-o", str(tmp_path / "hf")]) == 0
    assert main(["convert", str(tmp_path / "hf"), "--output", str(tmp_path / "again")]) == 0
    lines, translators = (
        list(ENGLISH[:3]),
        [manyheads.Translator.from_pretrained(tmp_path / n) for n in ("ours", "again")],
    )
    found = [one.translate(lines, max_new_tokens=20) for one in translators]
    assert found[0] == found[1]


@pytest.mark.parametrize("sizes", [(30, 40), (40, 30)])
@pytest.mark.parametrize("omits_bias", [False, True])
def test_rows_of_a_shorter_table_are_never_produced(sizes: tuple[int, int], omits_bias: bool) -> None:
    """Padding and start have one id on both sides, which is after the longer table."""
    options = {**OPTIONS, **SEPARATE, "output-omit-bias": omits_bias}
    weights = {name: torch.from_numpy(array) for name, array in weights_of(options, sizes).items()}
    if omits_bias:
        del weights["decoder_ff_logit_out_b"]
    model = PEERS["marian-nmt"].from_peer({"model": options}, weights).module
    with torch.no_grad():
        log_probs = model.log_probs(torch.tensor([[3, 4, 0]]), torch.tensor([3]), torch.tensor([[40, 5]]))
    assert model.config.source_vocab_size == model.config.target_vocab_size == 41
    assert bool((log_probs[..., sizes[1] : 40] < -1000).all())
    assert not model.body.target_embedding.weight[40].any()


def test_a_vocabulary_that_is_a_sentencepiece_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids are the model's own. No second reader of these is at hand: the segmentation is sentencepiece's itself."""
    import sentencepiece

    folder = tmp_path / "theirs"
    folder.mkdir()
    model = spm_model([*ENGLISH, *GERMAN])
    (folder / "vocab.spm").write_bytes(model)
    size = len(pieces_of(model))
    write_npz(folder / "model.npz", OPTIONS, weights_of(OPTIONS, (size, size)))
    assert main(["convert", str(folder), "--output", str(tmp_path / "ours")]) == 0  # the peer is guessed
    assert "no decoder.yml" in capsys.readouterr().err
    tokenizer = load_tokenizer(tmp_path / "ours")
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    for line in (*ENGLISH, *GERMAN, "Ωmega"):
        assert tokenizer.source.encode(line) == processor.encode(line)
    assert load_settings(tmp_path / "ours").num_beams == 12
    assert main(["info", str(tmp_path / "ours"), "--verify"]) == 0


def test_the_search_follows_decoder_yml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder = {"beam-size": 6, "normalize": 0.6, "max-length-factor": 2, "gemm-precision": "int8shiftAlphaAll"}
    assert convert(write(tmp_path / "a", decoder=decoder), tmp_path / "ours") == 0
    settings = load_settings(tmp_path / "ours")
    assert (settings.num_beams, settings.length_penalty, settings.length_penalty_kind) == (6, 0.6, "power")
    assert (settings.max_len_ratio, settings.early_stopping, settings.banned_ids) == (2.0, True, (1,))
    assert "gemm-precision" in capsys.readouterr().err
    assert convert(write(tmp_path / "b", decoder={"allow-unk": True}), tmp_path / "ours", "--replace") == 0
    assert load_settings(tmp_path / "ours").banned_ids == ()


def test_tied_layers_are_copies(tmp_path: Path) -> None:
    options = {**OPTIONS, "dec-depth": 3, "transformer-tied-layers": [1, 1, 2]}
    weights = {name: torch.from_numpy(array) for name, array in weights_of(options, (30, 30)).items()}
    module = PEERS["marian-nmt"].from_peer({"model": options}, weights).module
    first, second, third = (layer.state_dict() for layer in module.body.decoder.layers)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], third[name]) for name in first)


def test_rows_without_a_piece_and_names_of_the_older_kind(tmp_path: Path) -> None:
    """A table may be longer than its vocabulary; the output's matrix may lie either way; weights may be float16."""
    folder = write(tmp_path / "theirs", **{"tied-embeddings-all": False, "tied-embeddings-src": True})
    arrays = npz(folder / "model.npz")
    arrays["decoder_ff_logit_out_Wt"] = arrays.pop("decoder_ff_logit_out_W").T.copy()
    lower = {name: array.astype(np.float16) if array.dtype.kind == "f" else array for name, array in arrays.items()}
    np.savez(folder / "model.npz", **lower)
    pieces = list(yaml.load((folder / "vocab.yml").read_text("utf-8"), Loader=yaml.BaseLoader))  # noqa: S506
    write_vocabulary(folder / "vocab.yml", pieces[:-3])
    assert convert(folder, tmp_path / "ours") == 0
    config = load(tmp_path / "ours").config
    assert (config.tie_embeddings, config.target_vocab_size) == ("embeddings", len(pieces) + 1)
    assert manyheads.Translator.from_pretrained(tmp_path / "ours").translate(ENGLISH[0]) is not None


CHANGES: dict[str, tuple[Any, str]] = {
    "SSRU": ({"transformer-decoder-autoreg": "rnn", "dec-cell": "ssru"}, "SSRU"),
    "average attention": ({"transformer-decoder-autoreg": "average-attention"}, "transformer-decoder-autoreg"),
    "no projection": ({"transformer-no-projection": True}, "transformer-no-projection"),
    "depth of layers": ({"transformer-ffn-depth": 3}, "transformer-ffn-depth"),
    "norm of embeddings": ({"transformer-postprocess-emb": "nd"}, "transformer-postprocess-emb"),
    "learned positions": ({"transformer-train-position-embeddings": True}, "transformer-train-position-embeddings"),
    "recurrent": ({"type": "s2s"}, "'s2s'"),
    "order of norms": ({"transformer-postprocess": "dha"}, "transformer-postprocess"),
    "activation": ({"transformer-ffn-activation": "tanh"}, "transformer-ffn-activation"),
    "factors": ({"lemma-dim-emb": 64}, "lemma-dim-emb"),
    "sizes": ({"enc-depth": 5}, "encoder_l3"),
    "tied layers": ({"transformer-tied-layers": [7]}, "transformer-tied-layers"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_our_model_does_not_have_is_refused_by_name(kind, tmp_path, capsys):
    folder, (change, named) = write(tmp_path / "theirs"), CHANGES[kind]
    arrays = npz(folder / "model.npz")
    options = yaml.safe_load(arrays.pop("special:model.yml").tobytes()[:-1])
    write_npz(folder / "model.npz", {**options, **change}, arrays)
    refused(folder, tmp_path, capsys, named)


def refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str) -> None:
    assert convert(folder, tmp_path / "ours") == 2
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error
    assert not (tmp_path / "ours").exists()


def _with(folder: Path, **changes: Any) -> None:
    np.savez(folder / "model.npz", **{**npz(folder / "model.npz"), **changes})


def _decoder(folder: Path, **changes: Any) -> None:
    values = yaml.safe_load((folder / "decoder.yml").read_text())
    (folder / "decoder.yml").write_text(yaml.safe_dump(values | {k.replace("_", "-"): v for k, v in changes.items()}))


def _only_bin(folder: Path) -> None:
    (folder / "model.npz").rename(folder / "model.bin")
    (folder / "decoder.yml").unlink()


def _lying(folder: Path) -> None:
    """An array whose header claims more than there is."""
    import zipfile

    with zipfile.ZipFile(folder / "model.npz", "a") as archive:
        header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }".ljust(117) + b"\n"
        archive.writestr("huge.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


def _bomb(folder: Path) -> None:
    np.savez_compressed(folder / "model.npz", **npz(folder / "model.npz"), zeros=np.zeros(2**25, np.float32))


def _shape(folder: Path, header: str, content: bytes = b"") -> None:
    """An array with a header as it is given."""
    import zipfile

    with zipfile.ZipFile(folder / "model.npz", "a") as archive:
        line = header.encode().ljust(117) + b"\n"
        archive.writestr("odd.npy", b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line + content)


def _header(**changes: Any) -> str:
    return str({"descr": "<f4", "fortran_order": False, "shape": (2,), **changes})


def _name(folder: Path) -> None:
    """A name in the archive that is not UTF-8."""
    _with(folder, ä=np.zeros(3, np.float32))
    path = folder / "model.npz"
    path.write_bytes(path.read_bytes().replace("ä".encode(), b"\xff\xff"))


DAMAGES: dict[str, tuple[Any, str]] = {
    "negative sizes": (lambda f: _shape(f, _header(shape=(-1, -1)), bytes(4)), "odd is not an intact array"),
    "a size beyond all limits": (lambda f: _shape(f, _header(shape=(0, 2**70))), "odd is not an intact array"),
    "numbers of 16 bytes": (lambda f: _with(f, odd=np.zeros(3, np.longdouble)), "odd is not an intact array"),
    "a header that is cut off": (lambda f: _shape(f, "{'descr': ("), "odd is not an intact array"),
    "a header without a type": (lambda f: _shape(f, _header(descr=())), "odd is not an intact array"),
    "a name that is not UTF-8": (_name, "not an intact .npz"),
    "int8": (lambda f: _with(f, encoder_l1_self_Wq=np.zeros((16, 16), np.int8)), "int8"),
    "pickle": (lambda f: _with(f, x=np.array([{}], object)), "x is not an intact array"),
    "a header that lies": (_lying, "huge is not an intact array"),
    "a bomb": (_bomb, "expands to"),
    "only .bin": (_only_bin, ".bin"),
    ".bin in decoder.yml": (lambda f: _decoder(f, models=["/train/model.bin"]), "model.bin is a .bin file"),
    "an ensemble": (lambda f: _decoder(f, models=["a.npz", "b.npz"]), "ensemble"),
    "a lost vocabulary": (lambda f: _decoder(f, vocabs=["../secret.yml"] * 2), "secret.yml"),
    "a penalty of words": (lambda f: _decoder(f, word_penalty=0.5), "word-penalty"),
    "a stray weight": (lambda f: _with(f, stray=np.zeros(3, np.float32)), "stray is unknown"),
    "no options": (lambda f: np.savez(f / "model.npz", Wemb=np.zeros((3, 4), np.float32)), "special:model.yml"),
    "options that are code": (
        lambda f: write_npz(f / "model.npz", b"a: !!python/object/apply:os.getcwd []", {}),
        "special:model.yml",
    ),
    "not a zip": (lambda f: (f / "model.npz").write_bytes(b"PK" * 50), "not an intact .npz"),
    "nested": (lambda f: (f / "vocab.yml").write_text("[" * 100_000), "vocab.yml"),
    "an alias": (lambda f: (f / "vocab.yml").write_text("&a </s>: 0\n<unk>: *a\n"), "vocab.yml, line 2"),
    "an id twice": (lambda f: (f / "vocab.yml").write_text("</s>: 0\n<unk>: 0\n"), "twice"),
    "an id that is a word": (lambda f: (f / "vocab.yml").write_text("</s>: 0\n<unk>: one\n"), "'one'"),
    "no end": (lambda f: (f / "vocab.yml").write_text("<unk>: 1\n"), "</s>"),
    "too large": (lambda f: (f / "vocab.yml").write_bytes(b"#" * (2**26 + 1)), "bytes"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_and_hostile_files(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, (damage, named) = write(tmp_path / "theirs"), DAMAGES[kind]
    damage(folder)
    refused(folder, tmp_path, capsys, named)


def test_without_a_segmentation_the_model_takes_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "theirs")
    for name in ("source.spm", "target.spm"):
        (folder / name).unlink()
    assert convert(folder, tmp_path / "ours") == 0
    assert "translates ids, not text" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "ours")
