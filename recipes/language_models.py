"""Four language models of equal sizes, trained on the embedded novel for equal minutes with several seeds, as a table.

    python recipes/language_models.py --minutes 10 --seeds 1 2 --work runs/language-models

A decoder, a Transformer-XL without and with memory, and a Reformer with local and hashed layers: the demo presets, all
of 4 layers, width 192 and 4 heads, in one precision. Nothing else should run. A finished run is not repeated, and a
stopped one goes on when the command is given again. Each model reads the whole test part as its preset reads text.
`--updates 3` in place of `--minutes` tries every row.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROWS = {
    "decoder": ["--preset", "lm-demo"],
    "Transformer-XL without memory": ["--preset", "xl-demo", "--model.memory_len", "0", "--reading.memory_len", "0"],
    "Transformer-XL": ["--preset", "xl-demo"],
    "Reformer, local and hashed": ["--preset", "reformer-demo"],
}


def manyheads(*arguments: str) -> str:
    """Run a command; its messages go to standard error. Returns: what it printed."""
    command = [sys.executable, "-m", "manyheads", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"manyheads {' '.join(arguments)}: exit code {done.returncode}; see above.")
    return done.stdout


def bits_per_byte(row: str, seed: int, options: argparse.Namespace) -> float:
    """Train one row with one seed, or go on with it, and return its result on the test part."""
    run = options.work / f"{re.sub('[^a-z]+', '-', row.lower())}-{seed}"
    result = run / "test.json"
    if not result.is_file():
        ends = {"training.max_minutes": options.minutes, "training.max_steps": options.updates}
        settings = [part for name, value in ends.items() for part in (f"--{name}", f"{value:g}")]
        more = ["--precision", options.precision, "--seed", str(seed), "--run-dir", str(run), "--quiet"]
        manyheads("train", *ROWS[row], *settings, *more)
        limit = ["--max-tokens", "2000"] if options.updates else []
        said = manyheads("evaluate", str(run), "--split", "test", "--precision", options.precision, "--json", *limit)
        result.write_text(said, encoding="utf-8")
    [figures] = json.loads(result.read_text("utf-8"))["results"]
    return float(figures.get("bits_per_byte", figures["bits_per_token"]))  # of a part: tokens, which are bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of training, of each run; 10")
    parser.add_argument("--updates", type=int, default=0, help="in place of minutes, to try the script")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="of every row; 1 and 2")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of every run; fp32")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs and of table.md")
    options = parser.parse_args()
    if options.updates:
        options.minutes = 0.0
    lines = ["| bits per byte | " + " | ".join(f"seed {seed}" for seed in options.seeds) + " | mean |"]
    lines.append("|---" * (len(options.seeds) + 2) + "|")
    for row in ROWS:
        found = [bits_per_byte(row, seed, options) for seed in options.seeds]
        cells = [f"{bits:.3f}" for bits in [*found, sum(found) / len(found)]]
        lines.append(f"| {row} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    table = "\n".join(lines) + "\n"
    (options.work / "table.md").write_text(table, encoding="utf-8")
    print(table, end="")


if __name__ == "__main__":
    main()
