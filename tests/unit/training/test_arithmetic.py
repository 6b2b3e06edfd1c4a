"""A run that is resumed under other arithmetic says so, or refuses if asked to."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import TINY, changed

from manyheads.checkpoint.format import find_latest, read_scalars
from manyheads.cli.main import main
from manyheads.config.files import to_yaml
from manyheads.distributed.group import Group
from manyheads.errors import ConfigError
from manyheads.training.run.device import arithmetic_of_run, changed_arithmetic
from manyheads.training.run.loop import train

NOW = {"torch": "2.13.0", "threads": "2"}


def test_what_is_compared() -> None:
    assert changed_arithmetic(dict(NOW), NOW, refuse=True) is None
    told = changed_arithmetic({**NOW, "threads": "1"}, NOW, refuse=False)
    assert told is not None
    assert "threads was 1, is 2" in told
    assert "torch" not in told
    assert changed_arithmetic(None, NOW, refuse=False) is None  # an older version did not record it
    with pytest.raises(ConfigError, match="threads was 1, is 2"):
        changed_arithmetic({**NOW, "threads": "1"}, NOW, refuse=True)
    with pytest.raises(ConfigError, match="does not record"):
        changed_arithmetic(None, NOW, refuse=True)


def test_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    facts = arithmetic_of_run(torch.device("cpu"), "fp32", Group())
    assert facts["limits"].startswith("ONEDNN_MAX_CPU_ISA=AVX2") or " ONEDNN_MAX_CPU_ISA=AVX2" in facts["limits"]
    assert facts["threads"] == str(torch.get_num_threads())
    assert (facts["ranks"], facts["precision"]) == ("1", "fp32")


@pytest.fixture
def settings(tmp_path: Path) -> tuple[Path, Any]:
    config = changed(TINY, run_dir=str(tmp_path / "run"), training={"max_steps": 2, "save_every": 1})
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    return file, config


def test_a_resume_under_an_emulated_instruction_set(settings, capsys, monkeypatch):
    file, config = settings
    train(config)
    newest = find_latest(Path(config.run_dir) / "checkpoints")[0]
    assert newest is not None
    assert read_scalars(newest)[1]["arithmetic"]["threads"] == str(torch.get_num_threads())
    command = ["train", "--config", str(file), "--training.max_steps", "3"]
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert main([*command, "--same-arithmetic"]) == 2
    assert "ATEN_CPU_CAPABILITY=default" in capsys.readouterr().err
    assert main(command) == 0
    assert "it will not have the bytes of an uninterrupted run" in capsys.readouterr().err
