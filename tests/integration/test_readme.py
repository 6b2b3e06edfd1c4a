"""Every block of README.md that is marked `<!-- test -->` runs, in order, on debug sizes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from manyheads.data.corpora.tatoeba import load_tatoeba

README = Path(__file__).resolve().parents[2] / "README.md"
CHINESE = README.with_name("README.zh-CN.md")
BLOCKS = re.findall(r"<!-- test -->\n```(\w*)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)

pytestmark = pytest.mark.readme


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place as the README supposes it: a trained runs/demo and some text, all small."""
    place = tmp_path_factory.mktemp("readme")
    for split, name, count in (("train", "train", 300), ("valid", "valid", 20), ("test", "sentences", 4)):
        pairs = load_tatoeba(split)[:count]
        target = "references" if name == "sentences" else name
        (place / f"{name}.en").write_text("".join(f"{s}\n" for s, _ in pairs), encoding="utf-8", newline="\n")
        (place / f"{target}.de").write_text("".join(f"{t}\n" for _, t in pairs), encoding="utf-8", newline="\n")
    prepared = ["prepare", "--source", "train.en", "--target", "train.de", "--valid-source", "valid.en"]
    run(["manyheads", *prepared, "--valid-target", "valid.de", "--vocab-size", "400", "--output", "demo-data"], place)
    run(["manyheads", "train", "--preset", "debug", "--data.path", "demo-data", "--run-dir", "runs/demo"], place)
    return place


def test_readme_has_blocks_to_run() -> None:
    assert [language for language, _ in BLOCKS] == ["", "python", "", "", "python", "", "python"]


def test_readme_blocks_run(folder: Path) -> None:
    for language, block in BLOCKS:
        if language == "python":
            run([sys.executable, "-c", block], folder)
        else:
            for line in block.strip().split("\n"):
                run(["bash", "-eo", "pipefail", "-c", line], folder)
    assert len((folder / "sentences.de").read_text(encoding="utf-8").split("\n")) == 5
    assert (folder / "runs/mine/model/model.safetensors").exists()


def test_the_chinese_readme_has_the_same_commands() -> None:
    """Its blocks of code are blocks of README.md, and each README links to the other."""
    blocks = {
        path: re.findall(r"^```\w*\n(.*?)^```$", path.read_text("utf-8"), re.DOTALL | re.M)
        for path in (README, CHINESE)
    }
    assert len(blocks[CHINESE]) >= 8
    assert set(blocks[CHINESE]) <= set(blocks[README])
    assert f"({CHINESE.name})" in README.read_text(encoding="utf-8")
    assert f"({README.name})" in CHINESE.read_text(encoding="utf-8")
