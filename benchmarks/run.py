"""Ours beside its peers, as ratios of alternating runs: `make bench`.

    python benchmarks/run.py [TASK ...] [--peer-python PYTHON] [--json FILE] [--markdown FILE]

Every side is a process of its own; see `harness` for the protocol, `tasks` for what is compared. Two of the sides are
the machine's own products of 2048 x 2048 matrices, so that the share of them that a model reaches is of the same run.

`--baseline COMMIT` compares our sides with the same sides at another commit, and not with peers.

A side that is too slow on this machine is left out, and a line says which and why: one in bf16 where bf16 products are
far slower than fp32's (measured first), and any whose warm-up or first turn takes many times its budget.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import Side, Turns, take_turns
from peers_shared import shared_peers
from report import PRODUCTS, ROOT, SizeError, describe_machine, gflops, header, reasons, record, tables
from tasks import TASKS, Comparison, Entry, against_baseline

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
QUICK_SECONDS, QUICK_ROUNDS = 0.5, 2
FAR_SLOWER = 4.0
"""Sides in bf16 are left out where fp32 products are this many times as fast: a turn of them would take minutes."""
BUDGETS = 8.0
"""A side is left out whose warm-up or first turn takes longer than this many budgets (see `most_seconds`)."""
LOOK_SECONDS = 120.0


def main() -> int:
    options = parse()
    with checkout(options.baseline) as options.baseline_folder:
        return run(options)


@contextmanager
def checkout(commit: str | None) -> Iterator[Path | None]:
    """The files of a commit in a temporary folder; None without a commit."""
    if commit is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="manyheads-baseline-") as folder:
        archive = Path(folder, "tree.tar")
        command = ["git", "-C", str(ROOT), "archive", "--output", str(archive), commit, "src", "benchmarks"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"The files of --baseline {commit} could not be read: {done.stderr.strip()}")
        shutil.unpack_archive(archive, folder, filter="data")
        yield Path(folder)


def run(options: argparse.Namespace) -> int:
    def say(text: str) -> None:
        if not options.quiet:
            print(f"  {text}", file=sys.stderr, flush=True)

    chosen = chosen_tasks(options)
    looked = look_at_machine(say)
    slow = why_not_bf16(looked)
    report: dict[str, Any] = {"machine": describe_machine(looked), "rounds": options.rounds, "seconds": options.seconds}
    report |= {"left_out": [], "tasks": []}
    lines: list[str] = []
    faults = 0
    for name, comparison in chosen:
        start = time.perf_counter()
        found = measure(comparison, options, slow, say)
        try:
            some = tables(comparison, found)
        except SizeError as error:
            faults += 1
            some = [f"**{error}**"]
        some = [f"## {comparison.title}", "", *some, *([""] if some else []), *(f"{why}\n" for why in reasons(found))]
        print("\n".join(some), flush=True)
        say(f"{name} took {time.perf_counter() - start:.0f} s")
        lines += some
        report["tasks"].append(record(name, comparison, found))
        report["left_out"] += [
            {"task": name, "title": comparison.title, "side": side, "reason": turns.left_out}
            for side, turns in found.items()
            if turns.left_out
        ]
        if options.json is not None:  # after each, so that what was measured outlives an interrupted run
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if options.markdown is not None:
            options.markdown.write_text("\n".join([*header(report), "", *lines]), encoding="utf-8")
    return 1 if faults else 0


def chosen_tasks(options: argparse.Namespace) -> list[tuple[str, Comparison]]:
    """Of the command line; without those whose peers are not there, which a line says."""
    chosen = [(name, one) for name in options.tasks or TASKS for one in TASKS[name]]
    if options.baseline is not None:
        chosen = [(name, against_baseline(one, options.baseline)) for name, one in chosen]
    lacking = None
    if shared_peers() is None:
        lacking = "there is no ../shared/peers.py (MANYHEADS_SHARED may name another folder)"
    elif not Path(options.peer_python).is_file():
        lacking = f"{options.peer_python} is no interpreter; `make bench` sets one up, or give --peer-python"
    if lacking is not None and any(one.needs_peers for _, one in chosen):
        names = ", ".join(dict.fromkeys(name for name, one in chosen if one.needs_peers))
        why = "The tasks with peers" if options.baseline is None else "The tasks whose model a peer makes for our sides"
        print(f"{why} are left out ({names}): {lacking}.", flush=True)
        chosen = [(name, one) for name, one in chosen if not one.needs_peers]
    return chosen


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; all of them")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn (4)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side (5)")
    parser.add_argument("--quick", action="store_true", help="only to see that it works: 2 rounds of half a second")
    parser.add_argument(
        "--peer-python", default=str(ROOT / ".venv-peers" / "bin" / "python"), help="the peers' interpreter"
    )
    parser.add_argument("--baseline", metavar="COMMIT", help="compare with our own sides at this commit")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--markdown", type=Path, help="write the tables there, with hardware and commit")
    parser.add_argument("--quiet", action="store_true", help="say nothing on the way")
    options = parser.parse_args()
    for task in options.tasks:
        if task not in TASKS:
            parser.error(f"there is no task {task!r}; there are {', '.join(TASKS)}")
    if options.rounds < 1 or not options.seconds >= 0:
        parser.error(f"{options.rounds} rounds of {options.seconds} s; at least 1 round of at least 0 s is needed")
    if options.quick:
        options.rounds, options.seconds = QUICK_ROUNDS, QUICK_SECONDS
    return options


def look_at_machine(say: Callable[[str], None]) -> dict[str, Any]:
    """Its class, and rates of products in fp32 and bf16, measured in a process of our environment; or nothing."""
    side = side_of(Entry("machine", ""), "")
    command = [side.python, str(ROOT / "benchmarks" / "machine.py")]
    environment = None if side.environment is None else dict(side.environment)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment, timeout=LOOK_SECONDS
        )
        looked: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        say(f"the machine's products could not be measured: {error}")
        return {}
    return looked


def why_not_bf16(looked: Mapping[str, Any]) -> str:
    """Why sides in bf16 are left out on this machine; empty: they are not."""
    if not looked or looked["bf16"] * FAR_SLOWER >= looked["fp32"]:
        return ""
    return f"bf16 products run at {gflops(looked['bf16'])} here, fp32 products at {gflops(looked['fp32'])}"


def most_seconds(comparison: Comparison, seconds: float) -> float:
    """Limit of a warm-up and of a first turn. seconds: of a turn, as asked for."""
    return BUDGETS * max(seconds * comparison.pace, comparison.step_seconds)


def measure(
    comparison: Comparison, options: argparse.Namespace, slow: str, say: Callable[[str], None]
) -> dict[str, Turns]:
    """All sides of a comparison and the machine's products. slow: why those in bf16 are left out, or empty."""
    found = {one.name: Turns(left_out=slow if one.in_bf16 else "") for one in comparison.entries}
    kept = [one for one in comparison.entries if not found[one.name].left_out]
    if not kept:
        return found
    say(comparison.title)
    if comparison.has_products:
        products = [Entry(PRODUCTS[name], "machine:products", {"dtype": kind}) for name, kind in DTYPES.items()]
        kept += [one for one in products if not (slow and one.in_bf16)]
    with tempfile.TemporaryDirectory(prefix="manyheads-bench-") as folder:
        sides = []
        for one in kept:
            given = replace(one, options={**one.options, "folder": folder}) if one.shares else one
            seconds = options.seconds * comparison.pace
            if one.name in PRODUCTS.values():
                seconds = min(seconds, 1.0)
            sides.append((side_of(given, options.peer_python, options.baseline_folder), seconds))
        found |= take_turns(sides, options.rounds, say, most_seconds(comparison, options.seconds))
    return found


def side_of(entry: Entry, peer_python: str, baseline: Path | None = None) -> Side:
    """Where and under what environment a side runs: peers as they come, ours as the command line sets itself up.

    Args: baseline: the folder with the files of another commit, for a side of it.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if entry.where == "peers":
        return Side(entry.name, entry.build, entry.options, peer_python, environment)
    # Of this checkout, whatever is installed. Whether the machine is busy must not be guessed among waiting sides.
    environment |= {"PYTHONPATH": str(ROOT / "src"), "GOMP_SPINCOUNT": "10000"}
    if entry.where == "one thread":
        environment |= {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    if entry.where == "baseline" and baseline is not None:
        environment["PYTHONPATH"] = str(baseline / "src")
        return Side(entry.name, entry.build, entry.options, sys.executable, environment, baseline / "benchmarks")
    return Side(entry.name, entry.build, entry.options, sys.executable, environment)


if __name__ == "__main__":
    sys.exit(main())
