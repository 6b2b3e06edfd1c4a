"""`convert`: a Marian folder becomes a model that translates with the peer's rules, and the same folder again."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marian_models import ENGLISH, GERMAN, SIZES, random_state, write_peer_folder
from naive_search import naive_marian_search
from safetensors.torch import load_file, save_file

import manyheads as package
from manyheads.catalogue import build_model
from manyheads.decoding.settings import DecodingSettings
from manyheads.extras.peers.convert import import_folder
from manyheads.installation import install_command
from manyheads.models.pretrained import load, save_pretrained
from manyheads.models.reformer.config import ReformerConfig
from manyheads.models.transformer.config import TransformerConfig
from manyheads.text.of_folder import load_tokenizer
from manyheads.text.vocabulary import ByteVocabulary

PEER_FILES = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("source.spm", "target.spm", "vocab.json", "tokenizer_config.json"),
)
MARIAN = "transformers/Marian"


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_peer_folder(tmp_path_factory.mktemp("peer") / "opus-mt-en-de")


@pytest.fixture(scope="module")
def ours(peer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from manyheads.cli.main import main

    folder = tmp_path_factory.mktemp("ours") / "model"
    assert main(["convert", str(peer), "--output", str(folder)]) == 0
    return folder


def expected_lines(folder: Path, lines: list[str]) -> list[str]:
    """What the peer would say, by the oracle and nothing cached."""
    model, tokenizer = load(folder), load_tokenizer(folder)
    source, target = tokenizer.source, tokenizer.target
    options = DecodingSettings(
        rules="marian", num_beams=3, length_penalty=1.0, length_penalty_kind="power", forced_eos=True
    )

    def translation(line: str) -> str:
        ids = torch.tensor([[*source.encode(line), source.eos_id]])

        def next_log_probs(prefix: list[int]) -> list[float]:
            with torch.no_grad():
                found = model.log_probs(ids, torch.tensor([ids.shape[1]]), torch.tensor([prefix]))
            return [float(value) for value in found[0, -1]]

        special = {"pad_id": target.pad_id, "bos_id": target.bos_id, "eos_id": target.eos_id}
        best = naive_marian_search(next_log_probs, options, limit=13, **special)[0]
        return target.decode(best.ids)

    return [translation(line) for line in lines]


def test_the_card_names_all_languages_and_chooses_one(peer: Path, ours: Path, tmp_path: Path) -> None:
    card = (ours / "README.md").read_text("utf-8")
    assert card.startswith("---\nlanguage: [deu, fra]\n")
    assert "It translates into deu, fra." in card
    assert 'from_pretrained(".").into("deu")' in card
    assert import_folder(peer, tmp_path / "again").next_command.endswith("again --target-lang deu")


def test_translate_uses_the_peers_rules(ours, manyheads, tmp_path, capsys):
    lines = [*ENGLISH, ">>deu<< The green tea"]
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in ["", *lines]), encoding="utf-8")
    assert manyheads("translate", ours, tmp_path / "in.txt", "--output", tmp_path / "out.txt") == 0
    found = (tmp_path / "out.txt").read_text("utf-8").split("\n")
    assert found == ["", *expected_lines(ours, lines), ""]
    assert package.Translator.from_pretrained(ours).translate(lines[0]) == found[1]
    assert manyheads("translate", ours, tmp_path / "in.txt", "--rules", "manyheads", "--nbest", "2") == 0
    assert len(capsys.readouterr().out.split("\n")) == 1 + 1 + 2 * len(lines)


def test_other_commands_read_it(ours, manyheads, printed, tmp_path, capsys):
    for name, lines in (("s", ENGLISH), ("t", GERMAN)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert manyheads("score", ours, "--source", tmp_path / "s", "--target", tmp_path / "t", "--tokens") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.strip().split("\n")]
    assert [record["tokens"][-1] for record in records] == ["</s>"] * len(ENGLISH)
    assert manyheads("evaluate", ours, "--source", tmp_path / "s", "--reference", tmp_path / "t", "--json") == 0
    protocol = json.loads(capsys.readouterr().out)
    total = sum(record["log_prob"] for record in records) / sum(record["num_tokens"] for record in records)
    assert protocol["likelihood"]["nats_per_token"] == pytest.approx(-total, abs=1e-4)
    record = json.loads(printed("info", ours, "--verify", "--json"))
    assert (record["tokenizer"]["kind"], record["tokenizer"]["target_lang"], record["damaged"]) == ("marian", "de", [])


def test_back_again_is_the_same_folder(peer: Path, ours: Path, manyheads: Callable[..., int], tmp_path: Path) -> None:
    assert manyheads("convert", ours, "--to", MARIAN, "--output", tmp_path / "back") == 0
    for name in PEER_FILES:
        assert (tmp_path / "back" / name).read_bytes() == (peer / name).read_bytes(), name


def test_changed_decoding_options_go_back_too(ours: Path, manyheads: Callable[..., int], tmp_path: Path) -> None:
    from dataclasses import replace

    from manyheads.decoding.settings import load_settings

    changed = replace(load_settings(ours), num_beams=2, max_new_tokens=9)
    tokenizer = load_tokenizer(ours)
    more = {"peer.json": (ours / "peer.json").read_bytes()}
    save_pretrained(load(ours), tmp_path / "model", tokenizer=tokenizer, generation=changed, more=more)
    assert manyheads("convert", tmp_path / "model", "--to", MARIAN, "--output", tmp_path / "back") == 0
    said = json.loads((tmp_path / "back" / "generation_config.json").read_text("utf-8"))
    assert (said["num_beams"], said["max_length"], said["forced_eos_token_id"]) == (2, 10, 0)
    assert manyheads("convert", tmp_path / "back", "--output", tmp_path / "again") == 0
    assert load_settings(tmp_path / "again") == changed


def test_a_pickle_only_if_asked(peer, ours, manyheads, refused, tmp_path):
    folder = shutil.copytree(peer, tmp_path / "opus")
    state = load_file(folder / "model.safetensors")
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"):
        state[name] = state["model.shared.weight"]  # as pickles have them
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    said = refused("convert", folder, "--output", tmp_path / "model")
    assert "--from-pickle" in said
    assert "pytorch_model.bin" in said
    assert not (tmp_path / "model").exists()
    assert manyheads("convert", folder, "--from-pickle", "--output", tmp_path / "model") == 0
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()


def test_an_old_config_holds_the_generation_options(peer: Path, manyheads: Callable[..., int], tmp_path: Path) -> None:
    folder = shutil.copytree(peer, tmp_path / "opus")
    said = json.loads((folder / "generation_config.json").read_text("utf-8"))
    config = {**said, **json.loads((folder / "config.json").read_text("utf-8"))}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").unlink()
    assert manyheads("convert", folder, "--output", tmp_path / "model") == 0
    settings = json.loads((tmp_path / "model" / "generation_config.json").read_text("utf-8"))
    assert (settings["rules"], settings["num_beams"], settings["max_new_tokens"]) == ("marian", 3, 13)
    assert manyheads("convert", tmp_path / "model", "--to", MARIAN, "--output", tmp_path / "back") == 0
    assert (tmp_path / "back" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert not (tmp_path / "back" / "generation_config.json").exists()


def test_without_a_tokenizer_it_takes_ids(peer, manyheads, tmp_path, capsys):
    folder = shutil.copytree(peer, tmp_path / "opus")
    (folder / "source.spm").unlink()
    assert manyheads("convert", folder, "--output", tmp_path / "model") == 0
    shown = capsys.readouterr()
    assert "no tokenizer" in shown.err
    assert "next:" not in shown.out
    assert manyheads("convert", tmp_path / "model", "--to", MARIAN, "--output", tmp_path / "back") == 0
    assert (tmp_path / "back" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def edited(folder: Path, name: str, **changes: Any) -> None:
    values = json.loads((folder / name).read_text("utf-8"))
    (folder / name).write_text(json.dumps({**values, **changes}), encoding="utf-8")


MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), "JSON object"),
    "another model": (lambda folder: edited(folder, "config.json", model_type="bart"), "'bart'"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
    "cut weights": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000]),
        "safetensors",
    ),
    "other sizes": (lambda folder: edited(folder, "config.json", encoder_ffn_dim=21), "encoder.layers.0.fc1"),
    "a text for a number": (lambda folder: edited(folder, "config.json", d_model="16"), "d_model"),
    "enormous": (lambda folder: edited(folder, "config.json", decoder_layers=10**15), "from 1 to 1,024"),
    "too many layers": (lambda folder: edited(folder, "config.json", decoder_layers=1000), "do not belong together"),
    "pre-norm": (lambda folder: edited(folder, "config.json", normalize_before=True), "normalize_before"),
    "beams in words": (lambda folder: edited(folder, "generation_config.json", num_beams="four"), "num_beams"),
    "the Annotated Transformer, garbled": (
        lambda folder: edited(folder, "config.json", model_type=None, model={"src_vocab": "x", "tgt_vocab": []}),
        "make_model",
    ),
    "groups of beams": (lambda folder: edited(folder, "generation_config.json", num_beam_groups=3), "num_beam_groups"),
    "no target model": (lambda folder: (folder / "target.spm").unlink(), "target.spm"),
    "not SentencePiece": (lambda folder: (folder / "source.spm").write_bytes(b"\x00" * 9), "source.spm"),
    "other padding": (lambda folder: edited(folder, "config.json", pad_token_id=3), "pad_token_id"),
    "more pieces than rows": (lambda folder: edited(folder, "vocab.json", strange=4000), "4000"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_a_paragraph(name, peer, manyheads, tmp_path, capsys):
    folder = shutil.copytree(peer, tmp_path / "opus")
    harm, named = MISTAKES[name]
    harm(folder)
    if name == "other padding":
        edited(folder, "generation_config.json", pad_token_id=3)
    assert manyheads("convert", folder, "--output", tmp_path / "model") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("manyheads: ")
    assert named in shown.err
    assert "Traceback" not in shown.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["opus"]


def test_what_is_there_is_not_destroyed(peer, ours, manyheads, refused, tmp_path):
    model = shutil.copytree(ours, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    for arguments, named in (
        ((peer, "--output", model), "--replace"),
        ((model, "--output", tmp_path / "x"), "already"),
        ((model, "--to", MARIAN, "--output", model, "--replace"), "is read"),
        ((peer, "--from", "torch/Transformer", "--output", tmp_path / "x"), "stacks"),
        ((model, "--to", MARIAN, "--from-pickle", "--output", tmp_path / "x"), "leave out"),
        ((peer, "--from", "transformers/Bart", "--output", tmp_path / "x"), "transformers/Marian"),
    ):
        assert named in refused("convert", *arguments)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert manyheads("convert", peer, "--output", model, "--replace") == 0


def test_without_sentencepiece_it_says_what_to_install(peer, refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert install_command("spm") in refused("convert", peer, "--output", tmp_path / "model")


def test_a_damaged_tokenizer_is_refused(ours, refused, tmp_path):
    model = shutil.copytree(ours, tmp_path / "model")
    content = bytearray((model / "target.spm").read_bytes())
    content[100] ^= 1
    (model / "target.spm").write_bytes(content)
    assert "target.spm is damaged" in refused("translate", model, "/dev/null")


def test_other_peers(manyheads, refused, tmp_path, capsys):
    """The Annotated Transformer both ways, torch's two stacks out, from state dicts and configs as files."""
    torch.manual_seed(1)
    config = TransformerConfig(
        source_vocab_size=9, target_vocab_size=11, d_model=8, num_heads=2, d_ff=12, num_encoder_layers=1,
        num_decoder_layers=1, norm="unbiased", norm_position="pre", norm_eps=1e-6, tie_embeddings="none",
        head_bias=True,
    )  # fmt: skip
    model = build_model(config)
    save_pretrained(model, tmp_path / "model")
    assert manyheads("convert", tmp_path / "model", "--to", "annotated-transformer", "-o", tmp_path / "annotated") == 0
    assert manyheads("convert", tmp_path / "annotated", "-o", tmp_path / "again") == 0
    names = load_file(tmp_path / "model" / "model.safetensors")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in names.items())
    stacks = TransformerConfig(
        source_vocab_size=9, target_vocab_size=9, d_model=8, num_heads=2, d_ff=12, final_norm=True
    )
    save_pretrained(build_model(stacks), tmp_path / "stacks")
    capsys.readouterr()
    assert manyheads("convert", tmp_path / "stacks", "--to", "torch/Transformer", "-o", tmp_path / "torch") == 0
    assert "left out" in capsys.readouterr().err
    options = json.loads((tmp_path / "torch" / "config.json").read_text("utf-8"))["model"]
    theirs = torch.nn.Transformer(**options)
    theirs.load_state_dict(load_file(tmp_path / "torch" / "model.safetensors"), strict=True)
    assert "norm_position 'pre'" in refused("convert", tmp_path / "model", "--to", MARIAN, "-o", tmp_path / "marian")


def test_a_reformer_both_ways(manyheads, tmp_path, capsys):
    torch.manual_seed(1)
    config = ReformerConfig(
        vocab_size=19, d_model=24, num_heads=2, head_dim=8, d_ff=40, num_layers=2, layers=("local", "lsh"),
        axial_shape=(4, 8), axial_dims=(8, 16), max_len=32, num_buckets=(2, 4), chunk_len=4, exact_len=4,
        local_chunk_len=4, visible="chunk", look_across_rounds=True, wrap=True, local_wrap=True, norm_eps=1e-12,
    )  # fmt: skip
    save_pretrained(build_model(config), tmp_path / "model", tokenizer=ByteVocabulary())
    there = ["convert", tmp_path / "model", "--to", "transformers/Reformer", "-o", tmp_path / "theirs"]
    assert manyheads(*there) == 0
    assert "The vocabulary was left out" in capsys.readouterr().err
    assert json.loads((tmp_path / "theirs" / "config.json").read_text("utf-8"))["model_type"] == "reformer"
    assert manyheads("convert", tmp_path / "theirs", "-o", tmp_path / "again") == 0
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


def test_a_peer_that_is_no_model_is_named(refused, tmp_path):
    for wrong in ("transformers/Marianne", "d2l/attention"):
        said = refused("convert", tmp_path, "--to", wrong, "-o", tmp_path / "out")
        assert f"--to is '{wrong}'; there are: transformers/Marian, " in said


def test_a_model_of_ours_becomes_marian(manyheads: Callable[..., int], tmp_path: Path) -> None:
    """Without peer.json, as after training on: the special ids come from the tokenizer."""
    peer = write_peer_folder(tmp_path / "peer", seed=3)
    assert manyheads("convert", peer, "--output", tmp_path / "model") == 0
    tokenizer = load_tokenizer(tmp_path / "model")
    save_pretrained(load(tmp_path / "model"), tmp_path / "trained", tokenizer=tokenizer, generation=DecodingSettings())
    assert manyheads("convert", tmp_path / "trained", "--to", MARIAN, "--output", tmp_path / "back") == 0
    config = json.loads((tmp_path / "back" / "config.json").read_text("utf-8"))
    size = tokenizer.target.vocab_size
    assert (config["pad_token_id"], config["decoder_start_token_id"], config["vocab_size"]) == (
        size - 1,
        size - 1,
        size,
    )
    assert config["d_model"] == SIZES["d_model"]
    assert manyheads("convert", tmp_path / "back", "--output", tmp_path / "again") == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "again"))
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


def test_weights_of_several_pickles_are_not_guessed(peer, refused, tmp_path):
    folder = shutil.copytree(peer, tmp_path / "opus")
    (folder / "model.safetensors").unlink()
    for name in ("a.pt", "b.pt"):
        (folder / name).write_bytes(b"")
    assert "a.pt, b.pt" in refused("convert", folder, "--from-pickle", "--output", tmp_path / "model")
    save_file(random_state({**SIZES, "vocab_size": 9}), folder / "model.safetensors")
    assert "has shape" in refused("convert", folder, "--output", tmp_path / "model")
