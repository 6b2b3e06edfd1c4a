"""A plug-in outside the package: two architectures, an attention score, a task, an export format and a logger.

Installed (entry points) and given by `--plugin`, its entries are prepared, trained, evaluated, exported and described
by the commands, and the package is not changed.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"

SCRIPT = """
import json, sys
from dataclasses import replace
from pathlib import Path
from manyheads.cli.main import main

def run(*arguments):
    code = main([str(one) for one in arguments])
    assert code == 0, (code, arguments)

small = ["--training.max_steps", 4, "--validation.every_steps", 4, "--training.save_every", 4]
small += ["--training.plots", "false"]
pairs = ["--preset", "debug", "--data.path", "pairs", *small]
texts = ["--preset", "reformer-debug", "--data.path", "text", *small]
run("prepare", "--tsv", "pairs.tsv", "--valid-count", 20, "--tokenizer.kind", "word", "--output", "pairs")
run("prepare", "--task", "lm", "--corpus", "text.txt", "--valid-bytes", 600, "--output", "text")
run("train", *pairs, "--model.attention.kind", "cosine", "--model.attention.sharpness", 3, "--run-dir", "cosine")
run("train", *pairs, "--architecture", "bag", "--run-dir", "bag")
run("train", *texts, "--architecture", "recurrent", "--run-dir", "recurrent", "--loggers", "lines")
for name in ("cosine", "bag", "recurrent"):
    run("evaluate", name)
    run("info", name)
run("translate", "bag", "source.txt", "--output", "translated.txt", "--beam", 2)
run("generate", "recurrent", "a b ", "--max-new-tokens", 8, "--seed", 1)
run("export", "bag", "--to", "numpy", "--output", "arrays")

from manyheads.catalogue import PRESETS, TASKS
CountingConfig = TASKS["counting"].config
from manyheads.training.run.loop import train
given = PRESETS["xl-debug"]()
values = {name: getattr(given, name) for name in given.__dataclass_fields__}
run("prepare", "--task", "counting", "--counted", "text.txt", "--output", "counted")
assert main(["prepare", "--task", "counting", "--corpus", "text.txt", "--counted", "text.txt", "-o", "x"]) == 2
config = CountingConfig(**{**values, "run_dir": "counting", "data": replace(given.data, path="counted")})
train(replace(config, training=replace(config.training, max_steps=4, plots=False)))
run("evaluate", "counting")
run("info", "counting")
"""


WITHOUT = """
from manyheads.cli.main import main
for model in ("../bag", "../cosine"):
    assert main(["translate", model, "../source.txt"]) == 2, model
"""


def installed(folder: Path, points: dict[str, str], name: str = "newcomers") -> None:
    """Write the record of an installed package with these entry points."""
    record = folder / f"{name}-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8")
    lines = "".join(f"{entry} = {reference}\n" for entry, reference in points.items())
    (record / "entry_points.txt").write_text(f"[manyheads]\n{lines}", "utf-8")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the record of the plug-in, and texts to learn from."""
    folder = tmp_path_factory.mktemp("plugins")
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text("utf-8"))["project"]
    installed(folder, project["entry-points"]["manyheads"])
    words = ["a", "b", "c", "d", "e", "f", "g", "h"]
    lines = [[words[(start + place) % 8] for place in range(3 + start % 4)] for start in range(200)]
    rows = [f"{' '.join(line)}\t{' '.join(reversed(line))}\n" for line in lines]
    (folder / "pairs.tsv").write_text("".join(rows), "utf-8")
    (folder / "text.txt").write_text("".join(rows), "utf-8")
    (folder / "source.txt").write_text("a b c\nd e\n", "utf-8")
    return folder


def surroundings(path: list[Path]) -> dict[str, str]:
    """The environment of a process that finds what is installed in these folders."""
    places = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1", "MANYHEADS_TYPECHECK": "0"}


@pytest.fixture
def run(warm_program: list[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The program, or `-c CODE`, in a folder, with what is installed in the folders of `path`.

    fresh: in a Python of its own; the scores of plug-ins are asked for when settings are imported.
    """

    def run(place: Path, *command: str, path: list[Path], fresh: bool = False) -> subprocess.CompletedProcess[str]:
        start = [sys.executable] if fresh else warm_program
        options: dict[str, Any] = {"cwd": place, "env": surroundings(path), "timeout": 600}
        return subprocess.run([*start, *command], capture_output=True, text=True, check=False, **options)

    return run


def test_what_is_added_is_prepared_trained_evaluated_exported_and_described(run, place):
    found = run(place, "-c", SCRIPT, path=[place, PLUGIN], fresh=True)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    assert "accuracy = 0." in found.stdout
    assert re.search(r"counted \d+ bytes into counted", found.stdout)
    assert "--corpus needs --task lm." in found.stderr
    assert len((place / "translated.txt").read_text("utf-8").splitlines()) == 2
    assert (place / "arrays" / "weights.npz").is_file()
    assert "step=4" in (place / "recurrent" / "lines.txt").read_text("utf-8")
    tasks = {"cosine": "translation", "bag": "translation", "recurrent": "text", "counting": "counting"}
    for name, task in tasks.items():
        record = json.loads((place / name / "model" / "config.json").read_text("utf-8"))
        assert record["task"] == task
        assert record.get("plugins") == (None if name == "counting" else ["newcomers"])
    assert json.loads((place / "cosine" / "model" / "config.json").read_text("utf-8"))["attention"] == {
        "kind": "cosine",
        "sharpness": 3.0,
    }
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    without = run(elsewhere, "-c", WITHOUT, path=[])
    assert without.returncode == 0, without.stderr
    assert "architecture 'bag' is unknown" in without.stderr
    assert without.stderr.count("The model needs newcomers: install it, or give --plugin.") == 2
    command = ("translate", "../bag", "../source.txt", "--plugin", "newcomers")
    given = run(elsewhere, *command, path=[PLUGIN])
    assert given.returncode == 0, given.stderr
    assert len(given.stdout.splitlines()) == 2


BAD = """
from manyheads.cli.main import main
debug = ["train", "--preset", "debug", "--run-dir", "run", "--training.max_steps", "2", "--training.plots", "false"]
assert main(debug) == 0
assert main([*debug, "--architecture", "bad", "--resume", "none"]) == 2
"""


def test_a_plugin_that_cannot_be_imported_hides_no_other_entry(run, tmp_path):
    points = {
        "architecture.bad": "broken_plugin:BAD",
        "score.bad": "broken_plugin:BAD",
        "task.bad": "broken_plugin:BAD",
    }
    installed(tmp_path, points, "broken-plugin")
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no such luck')\n", "utf-8")
    found = run(tmp_path, "-c", BAD, path=[tmp_path])
    assert found.returncode == 0, found.stderr
    assert "the architecture bad of the plug-in broken-plugin cannot be imported" in found.stderr
    assert "RuntimeError: no such luck" in found.stderr
    assert "Traceback" not in found.stderr


CLASHES = {
    "architecture.transformer-xl": ["train", "--preset", "xl-debug"],
    "preset.reformer-debug": ["train", "--preset", "reformer-debug"],
    "score.additive": ["train", "--preset", "debug", "--model.attention.kind", "additive"],
    "task.parsing": ["prepare", "--task", "parsing", "--trees", "a.trees"],
    "logger.csv": ["train", "--preset", "debug", "--loggers", "csv"],
    "format.onnx": ["export", "run", "--to", "onnx"],
    "peer.torch/Transformer": ["export", "run", "--to", "torch/Transformer"],
    "protocol.openai": ["serve", "run"],
}
"""Entry of which there is one in the package -> a command that asks for it."""

ASK = f"""
from manyheads.catalogue import KINDS
from manyheads.cli.main import main

clashes = {CLASHES!r}
assert {{name.partition(".")[0] for name in clashes}} == {{*KINDS}}
small = ["--training.max_steps", "2", "--training.plots", "false", "--validation.every_steps", "0", "-q"]
assert main(["train", "--preset", "debug", "--run-dir", "run", *small]) == 0
for number, command in enumerate(clashes.values()):
    rest = ["--run-dir", str(number), *small] if command[0] == "train" else ["-o", str(number)]
    rest = ["--port", "0"] if command[0] == "serve" else rest
    assert main([*command, *rest]) == 2, command
"""


def test_names_that_there_are(run, tmp_path):
    """Each is refused where it is asked for, also those of this package; all others are there."""
    installed(tmp_path, dict.fromkeys(CLASHES, "not_there:ENTRY"))
    found = run(tmp_path, "-c", ASK, path=[tmp_path], fresh=True)
    assert found.returncode == 0, found.stderr
    for entry in CLASHES:
        kind, _, name = entry.partition(".")
        said = f"the plug-in newcomers has the {kind} {name}, and there is another of this name; uninstall it"
        assert found.stderr.count(said) == 1, (entry, found.stderr)
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("entry", ["optimiser.lion", "architecture"])
def test_an_entry_of_an_unknown_kind(run, entry, tmp_path):
    installed(tmp_path, {entry: "newcomers:BAG"})
    found = run(tmp_path, "train", "--preset", "debug", "--run-dir", "run", path=[tmp_path, PLUGIN])
    assert found.returncode == 2
    assert f"the plug-in newcomers has the entry {entry}, which must be TABLE.NAME" in found.stderr
    assert "Traceback" not in found.stderr


def test_the_page_names_the_entries_of_the_example() -> None:
    page = (PLUGIN.parents[1] / "docs" / "plugins.md").read_text("utf-8")
    shown = tomllib.loads(page.split("```toml\n")[1].split("```")[0])["project"]["entry-points"]
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text("utf-8"))["project"]
    assert shown == project["entry-points"]
    for name in project["entry-points"]["manyheads"]:
        assert f"| `{name}` |" in page


def test_plugins_that_are_no_plugins(run, tmp_path):
    (tmp_path / "empty_plugin.py").write_text("", "utf-8")
    for module, message in (
        ("empty_plugin", "has no attribute 'MANYHEADS'"),
        ("not_there", "No module named 'not_there'"),
        ("", "--plugin needs the name of a module"),
    ):
        found = run(tmp_path, "info", ".", "--plugin", module, path=[tmp_path])
        assert found.returncode == 2, module
        assert message in found.stderr
        assert "Traceback" not in found.stderr


@pytest.mark.slow
def test_a_new_language_model_keeps_the_contracts(place: Path) -> None:
    """The contract tests run over the table: no memory and no hashing are asked of a model that has neither."""
    chosen = ["-k", "recurrent and debug", "-m", "not slow and not golden"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent), *chosen]
    options: dict[str, Any] = {"cwd": Path(__file__).parents[2], "env": surroundings([place, PLUGIN]), "timeout": 600}
    found = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert found.returncode == 0, found.stdout[-3000:]
    assert " passed" in found.stdout
