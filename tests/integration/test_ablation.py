"""`recipes/ablation.py`: it trains every row with every seed once, goes on where it was stopped, and says mistakes."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from manyheads.catalogue import build_model
from manyheads.config.build import resolve
from manyheads.config.files import Source, load_yaml
from manyheads.tasks.translation.settings import TrainConfig

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SCRIPT = RECIPES / "ablation.py"
TABLE_3 = RECIPES / "ablations" / "table-3.yaml"


@pytest.fixture(scope="module")
def ablation() -> Any:
    spec = importlib.util.spec_from_file_location("ablation", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ablation"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two rows of a tiny recipe, two seeds."""
    content: dict[str, Any] = {
        "precision": "fp32", "data": {"path": "embedded:tatoeba-en-de", "max_tokens": 256, "num_train_pairs": 60},
        "tokenizer": {"vocab_size": 300},
        "model": {"d_model": 64, "d_ff": 64, "num_heads": 4, "num_encoder_layers": 1, "num_decoder_layers": 1,
                  "dropout": 0.2},
    }  # fmt: skip
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(content), "utf-8")
    variations: dict[str, Any] = {
        "base": "base.yaml", "updates": 2, "seeds": [1, 2],
        "columns": {"model.num_heads": "h", "model.head_dim": "d_k", "model.dropout": "P_drop"},
        "rows": {"base": {}, "A, one head": {"model.num_heads": 1}, "D, no dropout": {"model.dropout": 0.0}},
    }  # fmt: skip
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump(variations, sort_keys=False), "utf-8")
    return tmp_path / "rows.yaml"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)


def test_rows_of_the_paper(ablation: Any) -> None:
    """Table 3 has the base and one or two rows of each letter; all settings exist and none repeats the base's."""
    found = ablation.Ablation.read(TABLE_3)
    assert found.updates == 1500
    assert len(found.seeds) == 2
    assert [name[0] for name in found.rows] == ["b", "A", "B", "C", "C", "D", "D", "E"]
    base = load_yaml(found.base).values
    lines = (RECIPES.parent / "benchmarks" / "2026-11-26-table-3.jsonl").read_text("utf-8").splitlines()
    recorded = {record["row"]: record for record in map(json.loads, lines)}
    assert recorded.keys() == found.rows.keys()
    for row, changes in found.rows.items():
        values = json.loads(json.dumps(base))
        for name, value in changes.items():
            section, _, key = name.partition(".")
            assert values[section].get(key) != value
            values[section][key] = value
        config = resolve(TrainConfig, [Source(values, "the row")])
        with torch.device("meta"):
            model = build_model(replace(config.model, source_vocab_size=10_000, target_vocab_size=10_000))
        assert sum(parameter.numel() for parameter in model.parameters()) == recorded[row]["parameters"], row
        assert changes == recorded[row]["changes"]


def test_a_row_of_the_table(ablation: Any) -> None:
    found = ablation.Ablation(Path("base.yaml"), 2, (1, 2), {"h": "h", "d": "d_k"}, {"base": {}, "A": {}, "B": {}})
    common = {"perplexity": 8.0, "parameters": 1_500_000}
    records = [
        {**common, "row": "A", "bleu": 30.0, "settings": {"h": 1, "d": 64}},
        {**common, "row": "base", "bleu": 20.0, "settings": {"h": 4, "d": 16}},
        {**common, "row": "base", "bleu": 23.0, "perplexity": 9.0, "settings": {"h": 4, "d": 16}},
    ]
    assert ablation.table(found, records).split("\n")[2:] == [
        "| base | 4 | 16 | 8.50 ± 0.50 | 21.50 ± 1.50 | 1.50 M | 2 |",
        "| A | 1 | 64 | 8.00 ± 0.00 | 30.00 ± 0.00 | 1.50 M | 1 |",
        "",
    ]


@pytest.mark.slow
def test_finished_runs_are_not_repeated(small: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    one = run(small, "--work", work, "--only", "head")
    assert one.returncode == 0, one.stderr
    assert "2 of 2: A, one head, seed 2" in one.stderr
    results = (work / "results.jsonl").read_bytes()
    (work / "results.jsonl").write_bytes(results + b'{"row": "base", "se')  # as a power cut leaves it
    whole = run(small, "--work", work)
    assert whole.returncode == 0, whole.stderr
    assert "1 of 4: base, seed 1" in whole.stderr
    assert (work / "results.jsonl").read_bytes().startswith(results)
    assert whole.stdout == (work / "table.md").read_text("utf-8") == run(small, "--work", work, "--report").stdout
    base, head, dropout = [line.split(" | ") for line in whole.stdout.strip().split("\n")[2:]]
    assert base[:4] == ["| base", "4", "16", "0.2"]
    assert head[:4] == ["| A, one head", "1", "64", ""]
    assert dropout[:4] == ["| D, no dropout", "", "", "0"]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"seeds": []}, [], "seeds is []; it must be a list of whole numbers"),
        ({"updates": 0}, [], "updates is 0; it must be a whole number from 1"),
        ({"rows": ["base"]}, [], "rows must be names with changed settings"),
        ({"base": "none.yaml"}, [], "base is none.yaml, and there is no file"),
        ({"more": 1}, [], "must have the keys base, columns, rows, seeds, updates, and no others"),
        ({}, ["--only", "Z"], "no row contains 'Z'; the rows are: base; A, one head"),
        ({}, ["--updates", "0"], "--updates is 0; give at least 1"),
    ],
)
def test_mistakes(ablation, small, tmp_path, monkeypatch, capsys, changes, options, message):
    small.write_text(yaml.safe_dump({**yaml.safe_load(small.read_text("utf-8")), **changes}, sort_keys=False), "utf-8")
    monkeypatch.setattr(sys, "argv", ["ablation.py", str(small), "--work", str(tmp_path / "work"), *options])
    assert ablation.main() == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_results_of_other_settings_are_not_shown(ablation, small, tmp_path, monkeypatch, capsys):
    """A row whose settings, or a file whose updates changed, is measured again."""
    work = tmp_path / "work"
    work.mkdir()
    common = {"seed": 1, "perplexity": 5.0, "bleu": 1.0, "parameters": 10**6, "settings": {"model.num_heads": 1}}
    records = [
        {**common, "row": "A, one head", "updates": 2, "changes": {"model.num_heads": 1}},
        {**common, "row": "base", "updates": 3, "changes": {}},
        {**common, "row": "D, no dropout", "updates": 2, "changes": {"model.dropout": 0.1}},
    ]
    (work / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), "utf-8")
    monkeypatch.setattr(sys, "argv", ["ablation.py", str(small), "--work", str(work), "--report"])
    assert ablation.main() == 0
    shown = capsys.readouterr().out.strip().split("\n")[2:]
    assert [line.split(" | ")[0] for line in shown] == ["| A, one head"]
