"""`convert` from a folder of the TensorFlow original."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from manyheads.cli.main import main
from manyheads.extras.peers.convert import guess_peer
from manyheads.models.pretrained import load

PEER = "tf/Transformer-XL"


@pytest.fixture
def published(shared: Path, tmp_path: Path) -> Path:
    """A folder with `model` and `data`, as those of the published models."""
    fixtures = shared / "fixtures" / "tf-transformer-xl"
    if not fixtures.is_dir():
        pytest.skip(f"no folder {fixtures}")
    folder = tmp_path / "tf_text8"
    shutil.copytree(fixtures / "text8_trained", folder / "model")
    (folder / "data").mkdir()
    shutil.copy(fixtures / "corpora" / "text8" / "corpus-info.json", folder / "data")
    return folder


def test_a_published_folder_becomes_a_model(published, tmp_path, capsys):
    assert guess_peer(published) == PEER
    assert main(["convert", str(published), "--output", str(tmp_path / "ours")]) == 0
    assert "published model of text8: mem_len 3800, clamp_len 1000, same_length True." in capsys.readouterr().err
    model = load(tmp_path / "ours")
    config = model.config
    assert (config.memory_len, config.clamp_len, config.initial_memory, config.norm_eps) == (3800, 1000, "zeros", 1e-12)


def test_settings_in_config_json_come_first_and_the_numbers_are_those_of_the_original(published, shared, tmp_path):
    recorded = shared / "fixtures" / "tf-transformer-xl" / "text8_trained.json"
    meta = json.loads(recorded.read_text())
    wanted = load_file(recorded.with_suffix(".safetensors"))
    (published / "config.json").write_text(json.dumps(meta["config"]))
    assert main(["convert", str(published), "--from", PEER, "--output", str(tmp_path / "ours")]) == 0
    model = load(tmp_path / "ours")
    with torch.no_grad():
        state = model.start(2)
        for segment in range(3):  # with keys and values kept, where the fixture keeps hidden states
            hidden, state = model.body(wanted[f"in.ids.{segment}"], None, state)
            found = model.head.log_probs(hidden)
            torch.testing.assert_close(found, wanted[f"out.logprobs.{segment}"], atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["{folder}", "--output", "{out}", "--to", PEER], "can be read, but not written"),
        (["{folder}/data", "--output", "{out}", "--from", PEER], "holds no TensorFlow checkpoint"),
    ],
)
def test_what_cannot_be_converted(published, tmp_path, capsys, arguments, reason):
    given = [one.format(folder=published, out=tmp_path / "out") for one in arguments]
    assert main(["convert", *given]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("corpus", "reason"),
    [
        (None, "it has no corpus-info.json"),
        ({"vocab_size": 23, "dataset": "mine", "cutoffs": []}, "the dataset in corpus-info.json is 'mine', not one of"),
        ({"dataset": "text8", "cutoffs": []}, "vocab_size is None"),
        ({"vocab_size": 23, "dataset": "text8", "cutoffs": [0, 40]}, "it must go from 0 to vocab_size 23"),
        ({"vocab_size": 24, "dataset": "text8", "cutoffs": []}, "the config asks for (24, 16)"),
    ],
)
def test_a_corpus_that_does_not_fit(published, tmp_path, capsys, corpus, reason):
    file = published / "data" / "corpus-info.json"
    file.unlink()
    if corpus is not None:
        file.write_text(json.dumps(corpus))
    assert main(["convert", str(published), "--output", str(tmp_path / "out")]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
