"""`manyheads push` against a hub on loopback, and the model back from there."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hub_server import FakeHub, running_hub

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.cli.main import main
from manyheads.extras.push.upload import CardFacts, make_card
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer.config import TransformerConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

EVALUATION = {
    "bleu": {"score": 27.5, "signature": "nrefs:1|case:mixed|tok:13a", "length": 9, "reference_length": 9},
    "protocol": {"data": "newstest2014"},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["a b c"] * 3, TokenizerSettings(kind="word"))
    size = tokenizer.vocab_size
    config = TransformerConfig(
        source_vocab_size=size, target_vocab_size=size, d_model=8, num_heads=2, d_ff=8, num_encoder_layers=1,
        num_decoder_layers=1,
    )  # fmt: skip
    more = {"test.txt": b"a\n"}
    save_pretrained(build_model(config), tmp_path / "model", tokenizer=tokenizer, more=more, languages=[("en", "de")])
    (tmp_path / "figures.json").write_text(json.dumps(EVALUATION))
    return tmp_path / "model"


PUSHED = """
import json, sys
from manyheads.cli.main import main
for command in json.loads(sys.argv[1]):
    assert main(command) == 0, command
"""
LOADED = """
import manyheads
from manyheads.errors import ManyHeadsError
print(manyheads.load("owner/name").config.d_model)
try:
    manyheads.Translator.from_pretrained("owner/name", revision="v2")
except ManyHeadsError as error:
    print(type(error).__name__)
print(len(manyheads.Translator.from_pretrained("owner/name").translate(["a"])))
"""


def _start(
    program: list[str], hub: FakeHub, home: Path, *arguments: str, token: str = "hf_right"
) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, because the hub's library reads its settings when it is imported."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        **{"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"},
        **{"HF_HUB_DISABLE_PROGRESS_BARS": "1", "no_proxy": "127.0.0.1"},
    }
    return subprocess.run([*program, *arguments], capture_output=True, text=True, env=environment, timeout=400)


def test_a_pushed_model_comes_back(model: Path, tmp_path: Path, warm_program: list[str]) -> None:
    with running_hub() as hub:
        push = ["push", str(model), "owner/name"]
        figures = str(tmp_path / "figures.json")
        more = ["--license", "mit", "--dataset", "wmt14", "--evaluation", figures, "--private"]
        commands = json.dumps([[*push, *more], [*push, "--revision", "v2"]])
        done = _start(warm_program, hub, tmp_path / "home", "-c", PUSHED, commands)
        assert done.returncode == 0, done.stderr
        assert "pushed 5 files" in done.stdout
        assert "test.txt is left out" in done.stderr
        sent = hub.files["main"]
        listed = json.loads((model / "manifest.json").read_text())["files"]
        assert sent.keys() == (listed.keys() | {"manifest.json"}) - {"test.txt"}
        assert all(sent[name] == (model / name).read_bytes() for name in ("config.json", "model.safetensors"))
        assert hub.created[0].get("visibility", hub.created[0].get("private")) in ("private", True)
        assert hub.files["v2"].keys() == sent.keys()
        hub.files["v2"]["config.json"] = b"{}"
        hub.files["main"]["evil.pkl"] = b"never fetched"
        loaded = _start(warm_program, hub, tmp_path / "home", "-c", LOADED)
        assert loaded.returncode == 0, loaded.stderr
        d_model, error, num_translations = loaded.stdout.split()
        assert (d_model, num_translations) == ("8", "1")
        assert error in ("CheckpointError", "ModelFileError")
        assert any("model.safetensors" in request for request in hub.requests if "/resolve/" in request)
        assert not any("evil.pkl" in request for request in hub.requests if "/resolve/" in request)


def test_the_hub_refuses(model: Path, tmp_path: Path, warm_program: list[str]) -> None:
    with running_hub() as hub:
        done = _start(warm_program, hub, tmp_path / "home", "push", str(model), "owner/name", token="hf_wrong")
    assert done.returncode == 2
    assert "pushing to owner/name failed" in done.stderr
    assert "hf auth login" in done.stderr
    assert not hub.files


def test_a_dry_run_prints_files_and_card(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["push", str(model), "owner/name", "--license", "mit", "--dry-run"]
    assert main([*arguments, "--dataset", "wmt14", "--evaluation", str(tmp_path / "figures.json")]) == 0
    shown = capsys.readouterr().out
    assert "model.safetensors" in shown
    head: dict[str, Any] = yaml.safe_load(shown.split("---\n")[1])
    assert (head["library_name"], head["pipeline_tag"], head["license"]) == ("manyheads", "translation", "mit")
    assert (head["language"], head["datasets"], head["metrics"]) == (["en", "de"], ["wmt14"], ["bleu"])
    result = head["model-index"][0]["results"][0]
    assert result["dataset"]["name"] == "newstest2014"
    assert result["metrics"][0]["value"] == 27.5
    assert result["metrics"][0]["args"]["signature"] == EVALUATION["bleu"]["signature"]  # type: ignore[index]
    assert 'from_pretrained("owner/name")' in shown
    assert "## Limits" in shown
    assert "No licence" not in shown
    rows = re.findall(r"^\|.*", shown, re.MULTILINE)
    assert [len(re.split(r"(?<!\\)\|", row)) for row in rows] == [5] * 3  # a signature's bars do not end a cell


@pytest.mark.parametrize(
    ("architecture", "pipeline", "limit"),
    [
        ("reformer-seq2seq", "translation", "Each line is translated by itself"),
        ("reformer", "text-generation", "It continues text by likelihood"),
        ("reformer-classifier", "text-classification", "It knows no other labels"),
        ("transformer-spans", "token-classification", "Any words get a tree"),
    ],
)
def test_a_card_says_what_the_model_is_for(architecture: str, pipeline: str, limit: str) -> None:
    config = ARCHITECTURES[architecture].presets["debug"]
    card = make_card("owner/name", config, [], 1, "", CardFacts())
    assert yaml.safe_load(card.split("---\n")[1])["pipeline_tag"] == pipeline
    assert limit in card.split("## Limits")[1]


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        (lambda folder: None, "name", "'name' is not a name on the hub"),
        (lambda folder: (folder / "more.json").write_text("{}"), "owner/name", "more.json"),
        (lambda folder: (folder / "config.json").write_text("{}"), "owner/name", "config.json"),
        (lambda folder: (folder / "manifest.json").unlink(), "owner/name", "manifest.json"),
    ],
)
def test_what_is_not_pushed(change, name, said, model, capsys):
    change(model)
    assert main(["push", str(model), name, "--dry-run"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "one JSON object"),
        ("{", "cannot be read as JSON"),
        ("{}", "no 'protocol'"),
        ('{"protocol": {}}', "neither"),
        ('{"protocol": {}, "results": [{"perplexity": [9.5, 8.25]}]}', "neither"),  # of --recl
        ('{"protocol": {}, "results": [{"perplexity": null}]}', "neither"),  # infinite
        ('{"protocol": {}, "results": [{"perplexity": 9.5, "dynamic": {"rule": "rms"}}]}', "--dynamic"),
        ('{"protocol": {}, "results": [{"perplexity": 9.5}, {"perplexity": 8.5}]}', "one memory length"),
        ('{"protocol": {"ensemble": ["other"]}, "bleu": {"score": 27.5}}', "several models"),
    ],
)
def test_an_evaluation_that_is_none(content, said, model, tmp_path, capsys):
    (tmp_path / "figures.json").write_text(content)
    assert main(["push", str(model), "owner/name", "--evaluation", str(tmp_path / "figures.json"), "--dry-run"]) == 2
    assert said in capsys.readouterr().err
