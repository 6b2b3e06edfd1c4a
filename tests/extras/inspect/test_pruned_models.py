"""Pruned models work with the rest: another number of heads in each layer, and one head in each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from manyheads.catalogue import build_model
from manyheads.decoding.translator import Translator
from manyheads.extras.documents.placing import align
from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.settings import ServingSettings
from manyheads.models.pretrained import load, read_config, save_pretrained
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.tasks.held_out import task_of_folder
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabulary import IdVocabulary

Program = Callable[..., int]
Read = pytest.CaptureFixture[str]

PRUNED = {
    "uneven": ("encoder.0.self:1,3", "decoder.1.cross:0", "decoder.0.self:0,1"),
    "one each": tuple(f"{layer}.{number}.{kind}:0,1,3" for layer, kind in (("encoder", "self"), ("decoder", "self"),
                ("decoder", "cross")) for number in range(2)),
}  # fmt: skip
LEFT = {
    "uneven": {"encoder": [2, 4], "decoder": [2, 4], "cross": [4, 3]},
    "one each": {"encoder": [1, 1], "decoder": [1, 1], "cross": [1, 1]},
}
each = pytest.mark.parametrize("case", PRUNED)


@pytest.fixture
def pruned(case: str, manyheads: Program, model_folder: Path, tmp_path: Path, capsys: Read) -> Path:
    folder = tmp_path / "pruned"
    assert manyheads("prune", model_folder, "--heads", *PRUNED[case], "--output", folder) == 0
    capsys.readouterr()
    return folder


def test_a_model_on_the_hub_keeps_its_task(manyheads: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TransformerXLConfig(vocab_size=8, d_model=8, num_heads=2, d_ff=8, num_layers=1, memory_len=4)
    save_pretrained(build_model(config), tmp_path / "ids", tokenizer=IdVocabulary(8), task="ids")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *arguments, **more: str(tmp_path / "ids"))
    assert manyheads("prune", "owner/name", "--heads", "decoder.0.self:1", "--output", "pruned") == 0
    assert task_of_folder("pruned") == "ids"


@pytest.mark.one_in(2)
@each
def test_other_commands_take_a_pruned_translator(manyheads, printed, refused, pruned, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    heads = {f"{name}_heads": tuple(counts) for name, counts in LEFT[case].items()}
    lines = tmp_path / "lines"
    lines.write_text("I am hungry.\nHello\n", encoding="utf-8")
    assert manyheads("translate", pruned, lines, "--output", tmp_path / "two", "--ensemble", pruned) == 0
    assert manyheads("translate", pruned, lines, "--output", tmp_path / "one") == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert len((tmp_path / "one").read_text(encoding="utf-8").split("\n")) == 3
    config = json.loads(printed("info", pruned, "--json"))["config"]
    assert {name: tuple(config[name]) for name in heads} == heads
    page = tmp_path / "look.html"
    assert manyheads("inspect", "attention", pruned, "--text", "I am hungry.", "--output", page) == 0
    assert manyheads("inspect", "architecture", pruned, "--output", tmp_path / "look.svg") == 0
    for name in ("transformers/Marian", "transformers/Pegasus", "torch/Transformer", "annotated-transformer"):
        message = refused("convert", pruned, "--to", name, "--output", tmp_path / "peer")
        assert "encoder_heads [" in message or "norm_position" in message  # what is looked at first
        assert not (tmp_path / "peer").exists()


@pytest.mark.one_in(2)
@each
def test_it_is_trained_on_and_averaged(manyheads: Program, pruned: Path, case: str, tmp_path: Path) -> None:
    run, data = tmp_path / "run", tmp_path / "data"
    for name in ("en", "de"):
        (tmp_path / name).write_text("I am hungry.\nHello\nWe are going home.\n" * 2, encoding="utf-8")
    files = ("--source", tmp_path / "en", "--target", tmp_path / "de", "--output", data)
    valid = ("--valid-source", tmp_path / "en", "--valid-target", tmp_path / "de")
    assert manyheads("prepare", *files, *valid, "--tokenizer", pruned) == 0
    told = ("--data.path", data, "--run-dir", run, "--training.max_steps", "2", "--training.plots", "false")
    assert manyheads("train", "--init", pruned, *told) == 0
    assert manyheads("average", run, "--last", "1", "--output", tmp_path / "mean") == 0
    for folder in (run / "model", tmp_path / "mean"):
        assert read_config(folder) == read_config(pruned)
    now, before = (torch.cat([p.flatten() for p in load(one).parameters()]) for one in (tmp_path / "mean", pruned))
    assert 0 < (now - before).abs().max() < 0.1


@pytest.mark.one_in(2)
@each
def test_a_server_shows_the_heads_that_are_left(pruned: Path, case: str) -> None:
    settings = ServingSettings(models=(str(pruned),), device="cpu", allowed_hosts=("testserver",))
    with TestClient(build_app(settings)) as client:
        found = client.post("/v1/translate", json={"text": "I am hungry.", "alignments": True}).json()
        [sentence] = found["translations"][0]["sentences"]
        assert "alignment" in sentence
        for kind, counts in LEFT[case].items():
            body = {"source": "I am hungry.", "kind": kind}
            whole = client.post("/v1/attention", json=body)
            assert (whole.json()["num_layers"], whole.json()["num_heads"]) == (2, max(counts))
            for layer, count in enumerate(counts):
                answer = client.post("/v1/attention", json={**body, "layer": layer})
                assert answer.status_code == 200
                beyond = client.post("/v1/attention", json={**body, "layer": layer, "head": count})
                assert beyond.status_code == 422
                assert answer.json()["num_heads"] == count
                assert all(sum(row) == pytest.approx(1, abs=1e-2) for row in answer.json()["weights"])


def test_words_are_aligned_by_the_layers_that_have_heads(model_folder: Path) -> None:
    """A layer of which an old version pruned all heads attends evenly, and would align all words to one."""
    translator = Translator.from_pretrained(model_folder, "cpu")
    model: Any = translator.model
    for number, least in ((1, 3), (0, 0)):
        with torch.no_grad():
            for parameter in model.body.decoder.layers[number].cross_attn.parameters():
                parameter.zero_()
        assert len({pair[2:] for pair in align(translator, "I am hungry.", "Ich habe Hunger.")}) >= least
    assert align(translator, "I am hungry.", "Ich habe Hunger.") == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_pruned_language_model(manyheads, printed, refused, kind, tmp_path):
    from manyheads.text.of_folder import PieceVocabulary
    from manyheads.text.vocabulary import ByteVocabulary

    learned = Tokenizer.train(["he opened the door and went in"], TokenizerSettings(vocab_size=300))
    vocabulary = ByteVocabulary() if kind == "bytes" else PieceVocabulary(learned)
    torch.manual_seed(1)
    size = vocabulary.vocab_size
    config = TransformerXLConfig(
        vocab_size=size, d_model=16, num_heads=2, head_dim=8, d_ff=32, num_layers=2, memory_len=6
    )
    save_pretrained(build_model(config), tmp_path / "whole", tokenizer=vocabulary)
    (tmp_path / "text").write_text("he opened the door and went in.\n" * 60, encoding="utf-8")
    folder, data, run = tmp_path / "pruned", tmp_path / "data", tmp_path / "run"
    heads = ("--heads", "decoder.0.self:1")
    assert "3 heads are left;" in printed("prune", tmp_path / "whole", *heads, "--output", folder)
    assert manyheads("info", folder) == 0
    assert manyheads("inspect", "attention", folder, "--text", "He ", "--output", tmp_path / "look.html") == 0
    text = ("--corpus", tmp_path / "text", "--valid-bytes", "600", "--tokenizer", folder, "--output", data)
    assert manyheads("prepare", "--task", "lm", *text) == 0
    told = ("--data.path", data, "--run-dir", run, "--training.max_steps", "2", "--training.plots", "false")
    assert manyheads("train", "--init", folder, *told) == 0
    assert manyheads("average", run, "--last", "1", "--output", tmp_path / "mean") == 0
    assert read_config(tmp_path / "mean").layer_heads == (1, 2)
    assert manyheads("generate", tmp_path / "mean", "He ", "--max-new-tokens", "3") == 0
    assert "cannot hold" in refused("export", folder, "--to", "transformers", "--output", tmp_path / "peer")
