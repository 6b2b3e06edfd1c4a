"""A newcomer's attention kind, architectures and task: one file or folder each, and one line in a table each.

A copy of the package gets the files of `additions/` and the lines below, and nothing else is changed. Then its commands
prepare data, train, evaluate and describe what was added.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import manyheads

ADDITIONS = Path(__file__).with_name("additions")

LAST_ARCHITECTURE = (
    '    "reformer-seq2seq": Architecture(ReformerSeq2SeqConfig, SEQ2SEQ_PRESETS, "reformer.build.build_seq2seq"),'
)
# file of a table -> (the line after which, the line that is added, the import that it needs)
LINES = {
    "nn/attention/kinds.py": [
        (
            '    "additive": AdditiveAttentionConfig,',
            '    "cosine": CosineAttentionConfig,',
            "from manyheads.nn.attention.cosine import CosineAttentionConfig",
        )
    ],
    "architectures/table.py": [
        (
            LAST_ARCHITECTURE,
            '    "bag": Architecture(BagConfig, BAG_PRESETS, "bag.build.build"),',
            "from manyheads.architectures.bag.config import PRESETS as BAG_PRESETS, BagConfig",
        ),
        (
            LAST_ARCHITECTURE,
            '    "recurrent": Architecture(RecurrentConfig, RECURRENT_PRESETS, "recurrent.build.build"),',
            "from manyheads.architectures.recurrent.config import PRESETS as RECURRENT_PRESETS, RecurrentConfig",
        ),
    ],
    "tasks/table.py": [
        (
            '    "text": Task("the next token of a text", TextConfig, (_TEXT,), "lm"),',
            '    "counting": Task("bytes", CountingConfig, ("manyheads.tasks.counting", _TEXT), "counting"),',
            "from manyheads.tasks.counting.settings import CountingConfig",
        )
    ],
}

SCRIPT = """
import json, sys
from dataclasses import replace
from pathlib import Path
from manyheads.cli.main import main

def run(*arguments):
    code = main([str(one) for one in arguments])
    assert code == 0, (code, arguments)

small = ["--training.max_steps", 4, "--validation.every_steps", 4, "--training.save_every", 4]
pairs = ["--preset", "debug", "--data.path", "pairs", *small]
texts = ["--preset", "reformer-debug", "--data.path", "text", *small]
run("prepare", "--tsv", "pairs.tsv", "--valid-count", 20, "--tokenizer.kind", "word", "--output", "pairs")
run("prepare", "--task", "lm", "--corpus", "text.txt", "--valid-bytes", 600, "--output", "text")
run("train", *pairs, "--model.attention.kind", "cosine", "--model.attention.sharpness", 3, "--run-dir", "cosine")
run("train", *pairs, "--architecture", "bag", "--run-dir", "bag")
run("train", *texts, "--architecture", "recurrent", "--run-dir", "recurrent")
for name in ("cosine", "bag", "recurrent"):
    run("evaluate", name)
    run("info", name)
run("translate", "bag", "source.txt", "--output", "translated.txt", "--beam", 2)
run("generate", "recurrent", "a b ", "--max-new-tokens", 8, "--seed", 1)

from manyheads.tasks.counting.settings import CountingConfig
from manyheads.catalogue import PRESETS
from manyheads.training.run.loop import train
given = PRESETS["xl-debug"]()
values = {name: getattr(given, name) for name in given.__dataclass_fields__}
run("prepare", "--task", "counting", "--counted", "text.txt", "--output", "counted")
assert main(["prepare", "--task", "counting", "--corpus", "text.txt", "--counted", "text.txt", "-o", "x"]) == 2
config = CountingConfig(**{**values, "run_dir": "counting", "data": replace(given.data, path="counted")})
train(replace(config, training=replace(config.training, max_steps=4)))
run("evaluate", "counting")
run("info", "counting")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the extended package, and texts to learn from."""
    folder = tmp_path_factory.mktemp("additions")
    package = Path(manyheads.__file__).parent
    shutil.copytree(package, folder / "manyheads", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ADDITIONS, folder / "manyheads", dirs_exist_ok=True)
    for file, additions in LINES.items():
        path = folder / "manyheads" / file
        text = path.read_text("utf-8")
        for after, line, needed in additions:
            assert text.count(after) == 1, after
            text = text.replace(after, f"{after}\n{line}")
            text = text.replace(
                "from __future__ import annotations\n", f"from __future__ import annotations\n{needed}\n"
            )
        path.write_text(text, "utf-8")
    words = ["a", "b", "c", "d", "e", "f", "g", "h"]
    lines = [[words[(start + place) % 8] for place in range(3 + start % 4)] for start in range(200)]
    rows = [f"{' '.join(line)}\t{' '.join(reversed(line))}\n" for line in lines]
    (folder / "pairs.tsv").write_text("".join(rows), "utf-8")
    (folder / "text.txt").write_text("".join(rows), "utf-8")
    (folder / "source.txt").write_text("a b c\nd e\n", "utf-8")
    return folder


def test_what_is_added_is_prepared_trained_evaluated_and_described(place: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", "MANYHEADS_TYPECHECK": "0"}
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=place, env=environment, capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    assert "accuracy = 0." in found.stdout
    assert re.search(r"counted \d+ bytes into counted", found.stdout)
    assert "--corpus needs --task lm." in found.stderr
    assert len((place / "translated.txt").read_text("utf-8").splitlines()) == 2
    tasks = {"cosine": "translation", "bag": "translation", "recurrent": "text", "counting": "counting"}
    for run, task in tasks.items():
        record = json.loads((place / run / "model" / "config.json").read_text("utf-8"))
        assert record["task"] == task
    assert json.loads((place / "cosine" / "model" / "config.json").read_text("utf-8"))["attention"] == {
        "kind": "cosine",
        "sharpness": 3.0,
    }


@pytest.mark.slow
def test_a_new_language_model_keeps_the_contracts(place: Path) -> None:
    """The contract tests run over the table: no memory and no hashing are asked of a model that has neither."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    chosen = ["-k", "recurrent and debug", "-m", "not slow and not golden"]
    environment = {**os.environ, "PYTHONPATH": str(place)}
    root = Path(__file__).parents[2]
    found = subprocess.run([*command, *chosen], cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout[-3000:]
    assert " passed" in found.stdout
