"""Trains a few steps in the folder given and writes down, beside it, what the recording layer of the tests has seen."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from file_operations import Watch
from tiny_run import echo, tiny

from manyheads.training.run.loop import train


def main(root: Path) -> None:
    os.chdir(root)
    with Watch(root) as watch:
        train(tiny(training={"max_steps": 6, "keep": 2}), translate=echo)
    seen = [
        [each.kind, str(each.path), str(each.target or ""), len(each.data) if each.kind == "write" else 0]
        for each in watch.operations
        if each.kind != "open"
    ]
    root.with_name("seen.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
