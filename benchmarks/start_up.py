"""How long the program takes to print a page of help, beyond an interpreter that does nothing.

    python benchmarks/start_up.py [--rounds 9] [--json FILE]

Every command and the bare interpreter run in turn, round after round. Times are of the processor (user and system), so
that other work on the machine counts less; the median over the rounds and the lowest are printed. The bar of the
product is 0.3 s; what decides it are the imports, which tests/unit/cli/test_program.py checks.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

BARE = "bare interpreter"
COMMANDS = {
    BARE: ["-c", "pass"],
    "manyheads --help": ["-m", "manyheads", "--help"],
    "manyheads train --help": ["-m", "manyheads", "train", "--help"],
    "manyheads translate --help": ["-m", "manyheads", "translate", "--help"],
}


def processor_seconds(arguments: list[str]) -> float:
    """Of one process, from its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(rounds: int) -> dict[str, list[float]]:
    """Command -> seconds of each round. A first round, not counted, has Python keep its bytecode."""
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(rounds + 1):
        for name, arguments in COMMANDS.items():
            seconds = processor_seconds(arguments)
            if turn:
                found[name].append(seconds)
    return found


def over_bare(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Command -> median and lowest, in seconds, beyond the bare interpreter's of the same round."""
    return {
        name: {
            "median_seconds": round(statistics.median(differences), 3),
            "lowest_seconds": round(min(differences), 3),
        }
        for name, seconds in found.items()
        if name != BARE
        for differences in [[own - bare for own, bare in zip(seconds, found[BARE], strict=True)]]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="times each command is run (9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all times there")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it must be at least 1.")
    found = measure(options.rounds)
    bare = statistics.median(found[BARE])
    print(f"{BARE}: {bare:.3f} s of the processor, median of {options.rounds} rounds")
    for name, figures in over_bare(found).items():
        print(f"{name}: {figures['median_seconds']:.3f} s more (lowest {figures['lowest_seconds']:.3f})")
    if options.json is not None:
        text = json.dumps({"seconds": found, "over_bare": over_bare(found)}, indent=2)
        options.json.write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
