"""Training on one's own data: the plan against hand-chosen rivals, and a model adapted against one from scratch.

    python benchmarks/own_data.py plan --data /data --work /tmp/own-data
    python benchmarks/own_data.py adapt --data /data --work /tmp/own-data --model runs/demo

`--data` has the folders tatoeba/ (eng-deu.tsv.gz), multi30k/ (train.en.gz, val.en.gz, test_2016_flickr.en.gz, and the
same in .de) and text/ (crime_and_punishment.body.txt.gz). Each run takes its minutes, so use a machine without other
work. Every finished run is a line of WORK/results.jsonl, and is not repeated; a stopped run goes on from its last
checkpoint when the same command is given again. At the end, and with `--report`, a table is printed. `--minutes 0.1`
tries every cell for six seconds; such results are kept apart.

`plan`: 4,000 pairs of Tatoeba, 20,000 pairs of Multi30k and 200 kB of a novel, 3 and 10 minutes, two seeds: the plan,
four rivals and the presets. The plan's mean must be within 1.5 BLEU (0.07 bits a byte) of the best rival's, and above
every preset's. `adapt`: five minutes from the model, also with new pieces, and from scratch, on 20,000 pairs of
Multi30k.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

MINUTES = (3, 10)
SEEDS = (1, 2)
HELD_OUT = 500
COMMON = "--optimiser.name muon --optimiser.clip_norm 1.0 --schedule.kind linear --model.norm_position pre"
QUICK = "--training.keep 2 --training.plots false --training.tensorboard false --validation.bleu_sentences 100"


def _pairs(width: int, layers: int, dropout: float, tokens: int, rate: float, muon: float) -> str:
    return (
        f"--preset demo --model.d_model {width} --model.d_ff {4 * width} --model.num_heads 4"
        f" --model.num_encoder_layers {layers} --model.num_decoder_layers {layers} --model.dropout {dropout}"
        f" --data.max_tokens {tokens} --optimiser.learning_rate {rate} --optimiser.muon_learning_rate {muon}"
        f" --schedule.warmup_steps 50 {COMMON} {QUICK}"
    )


def _text(width: int, layers: int, dropout: float, lanes: int) -> str:
    return (
        f"--preset xl-demo --model.d_model {width} --model.d_ff {4 * width} --model.num_heads 4"
        f" --model.head_dim {width // 4} --model.num_layers {layers} --model.dropout {dropout} --data.lanes {lanes}"
        " --validation.prompt The --training.plots false --training.tensorboard false"
    )


PAIR_SETTINGS = {
    "plan": QUICK,
    "narrow": _pairs(128, 3, 0.1, 1024, 0.01, 0.03),
    "middle": _pairs(192, 3, 0.1, 2048, 0.01, 0.03),
    "wide": _pairs(256, 3, 0.1, 2048, 0.006, 0.02),
    "much dropout": _pairs(192, 3, 0.3, 2048, 0.006, 0.02),
    "preset demo": f"--preset demo {QUICK}",
    "preset tiny": f"--preset tiny --training.max_steps 0 {QUICK}",
}
TEXT_SETTINGS = {
    "plan": "--training.plots false --training.tensorboard false",
    "narrow": _text(128, 4, 0.1, 16),
    "middle": _text(192, 4, 0.1, 16),
    "few lanes": _text(192, 4, 0.1, 8),
    "much dropout": _text(192, 4, 0.3, 16),
    "preset xl-demo": "--preset xl-demo --training.plots false --training.tensorboard false",
}


@dataclass(frozen=True)
class Cell:
    """One run. extra: its options. score: the name of the figure, of which `BLEU` is better when higher."""

    data: str
    name: str
    minutes: float
    seed: int
    extra: str
    score: str

    @property
    def key(self) -> str:
        return f"{self.data}-{self.name}-{self.minutes:g}-{self.seed}".replace(" ", "-")


def manyheads(*arguments: str) -> str:
    """Run a command of the package and return its standard output; its errors are shown."""
    return subprocess.run(
        [sys.executable, "-m", "manyheads", *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def lines_of(file: Path, count: int | None = None) -> list[str]:
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        return [line.rstrip("\n") for number, line in enumerate(stream) if count is None or number < count]


def write(file: Path, lines: list[str]) -> str:
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(file)


def prepare_tatoeba(data: Path, work: Path) -> None:
    rows = [line.split("\t")[:2] for line in lines_of(data / "tatoeba/eng-deu.tsv.gz")]
    step = len(rows) // (4000 + 2 * HELD_OUT)
    rows = rows[::step][: 4000 + 2 * HELD_OUT]  # from all lengths: the file is sorted by length
    parts = {"train": rows[2 * HELD_OUT :], "valid": rows[:HELD_OUT], "test": rows[HELD_OUT : 2 * HELD_OUT]}
    files = {
        name: write(work / f"tatoeba.{name}.tsv", ["\t".join(row) for row in part]) for name, part in parts.items()
    }
    manyheads(
        "prepare", "--tsv", files["train"], "--valid-tsv", files["valid"], "--test-tsv", files["test"],
        "--vocab-size", "3000", "-o", str(work / "data/tatoeba"),
    )  # fmt: skip


def prepare_multi30k(data: Path, work: Path, *more: str, name: str = "multi30k") -> None:
    arguments = []
    for option, split, count in (("", "train", 20_000), ("valid-", "val", None), ("test-", "test_2016_flickr", None)):
        for side, language in (("source", "en"), ("target", "de")):
            text = lines_of(data / f"multi30k/{split}.{language}.gz", count)
            arguments += [f"--{option}{side}", write(work / f"{split}.{language}", text)]
    manyheads("prepare", *arguments, *(more or ("--vocab-size", "6000")), "-o", str(work / "data" / name))


def prepare_novel(data: Path, work: Path) -> None:
    with gzip.open(data / "text/crime_and_punishment.body.txt.gz") as stream:
        (work / "novel.txt").write_bytes(stream.read(220_000))
    manyheads(
        "prepare", "--task", "lm", "--corpus", str(work / "novel.txt"), "--valid-bytes", "10000",
        "--test-bytes", "10000", "-o", str(work / "data/novel"),
    )  # fmt: skip


def plan_cells() -> Iterator[Cell]:
    for seed in SEEDS:
        for minutes in MINUTES:
            for data in ("tatoeba", "multi30k"):
                for name, extra in PAIR_SETTINGS.items():
                    yield Cell(data, name, minutes, seed, extra, "BLEU")
            for name, extra in TEXT_SETTINGS.items():
                yield Cell("novel", name, minutes, seed, extra, "bits")


def adapt_cells(model: str) -> Iterator[Cell]:
    for seed in SEEDS:
        yield Cell("adapted", "from the model", 5, seed, f"--init {model}", "BLEU")
        yield Cell("adapted", "from the model, with old data", 5, seed, f"--init {model} --mix", "BLEU")
        yield Cell("adapted-more", "from the model, 2,000 new pieces", 5, seed, f"--init {model}", "BLEU")
        yield Cell("multi30k", "from scratch, plan", 5, seed, "", "BLEU")
        yield Cell("multi30k", "from scratch, preset demo", 5, seed, "--preset demo", "BLEU")


def measure(cell: Cell, work: Path, old: str) -> dict[str, Any]:
    """Train and evaluate one cell. The record names files below WORK without it, so that it can be published."""
    run, data = str(work / "runs" / cell.key), str(work / "data" / cell.data)
    extra = cell.extra.split()
    if "--mix" in extra:
        extra = [*extra[:-1], "--data.mix", f"{old}=0.2", f"{data}=0.8"]
    common = ["--run-dir", run, "--minutes", f"{cell.minutes:g}", "--seed", str(cell.seed), "--quiet"]
    manyheads("train", "--data.path", data, *common, *extra)
    report = json.loads(manyheads("evaluate", run, "--data", data, "--json").replace(f"{work}/", ""))
    record = {"cell": cell.key, "data": cell.data, "name": cell.name, "minutes": cell.minutes, "seed": cell.seed}
    comparison = Path(run) / "comparison.json"
    if comparison.is_file():
        record["comparison"] = json.loads(comparison.read_text(encoding="utf-8").replace(f"{work}/", ""))
    return {**record, "score": _score(report, cell.score), "report": report}


def _score(report: Any, name: str) -> float:
    """The figure of a report of `evaluate --json`: BLEU, or bits a byte."""
    return float(report["bleu"]["score"] if name == "BLEU" else report["results"][0]["bits_per_byte"])


def finished(results: Path) -> list[dict[str, Any]]:
    """The cells that were measured; a line that was only begun is taken away."""
    if not results.is_file():
        return []
    lines = results.read_text("utf-8").split("\n")
    if lines[-1]:
        results.write_text("".join(f"{line}\n" for line in lines[:-1]), encoding="utf-8")
    return [json.loads(line) for line in lines[:-1]]


def table(records: list[dict[str, Any]]) -> str:
    """Means over seeds, in Markdown."""
    groups: dict[tuple[str, float, str], list[float]] = {}
    for record in records:
        groups.setdefault((record["data"], record["minutes"], record["name"]), []).append(record["score"])
    lines = ["| data | minutes | settings | mean | seeds |", "|---|---:|---|---:|---|"]
    for (data, minutes, name), scores in sorted(groups.items()):
        each = ", ".join(f"{score:.3f}" for score in scores)
        lines.append(f"| {data} | {minutes:g} | {name} | {mean(scores):.3f} | {each} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "adapt"))
    parser.add_argument("--data", type=Path, required=True, help="folder of the corpora")
    parser.add_argument("--work", type=Path, required=True, help="folder for prepared data, runs and results")
    parser.add_argument("--model", default="runs/demo", help="adapt: the model that is trained further")
    parser.add_argument("--old-data", default="", help="adapt: its prepared data; empty: that of its run")
    parser.add_argument("--only", default="", help="cells whose name contains this text")
    parser.add_argument("--minutes", type=float, help="of every cell, to try the script")
    parser.add_argument("--report", action="store_true", help="only print the table")
    options = parser.parse_args()
    (options.work / "data").mkdir(parents=True, exist_ok=True)
    results = options.work / (f"{options.what}.jsonl" if options.minutes is None else f"{options.what}-trial.jsonl")
    records = finished(results)
    model = str(Path(options.model).absolute())
    cells = list(plan_cells() if options.what == "plan" else adapt_cells(model))
    if options.minutes is not None:
        cells = list(dict.fromkeys(replace(cell, minutes=options.minutes) for cell in cells))
    todo = [cell for cell in cells if options.only in cell.key and cell.key not in {one["cell"] for one in records}]
    old = options.old_data or next(map(str, (Path(model) / "data").glob("*/")), "")
    if options.what == "adapt" and not options.report and not (Path(model).is_dir() and old):
        parser.error(f"{options.model} is no run with its data; train one (make demo), or name it and --old-data")
    makers = {
        "tatoeba": lambda: prepare_tatoeba(options.data, options.work),
        "multi30k": lambda: prepare_multi30k(options.data, options.work),
        "novel": lambda: prepare_novel(options.data, options.work),
        "adapted": lambda: prepare_multi30k(options.data, options.work, "--tokenizer", model, name="adapted"),
        "adapted-more": lambda: prepare_multi30k(
            options.data, options.work, "--tokenizer", model, "--new-pieces", "2000", name="adapted-more"
        ),
    }
    for number, cell in enumerate([] if options.report else todo, 1):
        if not (options.work / "data" / cell.data).is_dir():
            makers[cell.data]()
        print(f"{number} of {len(todo)}: {cell.key}", flush=True)
        records.append(measure(cell, options.work, old))
        with results.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(records[-1]) + "\n")
    print(table(records))


if __name__ == "__main__":
    main()
