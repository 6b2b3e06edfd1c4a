"""Files that earlier versions wrote: every folder of tests/golden that is named as a version is read and used."""

import json
import shutil
from pathlib import Path

import pytest

from manyheads import Translator
from manyheads.cli.main import main

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
RELEASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


@pytest.fixture(params=RELEASES)
def released(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a version's files, as the working folder, because the run names its data as `data`."""
    shutil.copytree(GOLDEN / request.param, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def test_every_release_is_kept() -> None:
    assert "0.1.0" in RELEASES


def test_files_are_intact(released: Path) -> None:
    for name in ("data", "model", "run"):
        assert main(["info", name, "--verify"]) == 0


def test_the_model_says_what_it_said(released: Path) -> None:
    expected = json.loads((released / "expected.json").read_text("utf-8"))
    [scored] = Translator.from_pretrained("model").score([expected["source"]], [expected["target"]])
    assert scored.tokens == expected["tokens"]
    assert scored.token_log_probs == pytest.approx(expected["log_probs"], abs=1e-3)


def test_the_run_goes_on(released: Path) -> None:
    """From the checkpoint of step 2, on the version's data, to the loss that it had at step 4."""
    expected = json.loads((released / "expected.json").read_text("utf-8"))
    before = sorted((path, path.stat().st_mtime_ns) for path in Path("data").rglob("*"))
    assert main(["train", "--config", "run/config.yaml", "--run-dir", "run", "--resume", "auto"]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text("utf-8").splitlines()]
    [last] = [line for line in lines if "valid_nll" in line]
    assert last["step"] == 4
    assert last["valid_nll"] == pytest.approx(expected["valid_nll"], abs=1e-3)
    assert "resum" in Path("run/train.log").read_text("utf-8")
    assert Path("run/checkpoints/step-00000002").is_dir()
    assert before == sorted((path, path.stat().st_mtime_ns) for path in Path("data").rglob("*"))
