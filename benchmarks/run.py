"""Ours beside its peers, as ratios of alternating runs: `make bench`.

    python benchmarks/run.py [TASK ...] [--peer-python PYTHON] [--json FILE] [--markdown FILE]

Every side is a process of its own; see `harness` for the protocol, `tasks` for what is compared. Two of the sides are
the machine's own products of 2048 x 2048 matrices, so that the share of them that a model reaches is of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness import Side, Spread, Turns, markdown_table, spread, take_turns
from peers_shared import shared_peers
from tasks import TASKS, Comparison, Entry

ROOT = Path(__file__).resolve().parents[1]
PRODUCTS = {"bf16": "products of 2048, bf16", "fp32": "products of 2048, fp32"}
MOST_APART = 0.05
QUICK_SECONDS, QUICK_ROUNDS = 0.5, 2


class SizeError(RuntimeError):
    """A pair's parameters differ by more than is fair."""


def main() -> int:
    options = parse()
    peers = shared_peers()

    def say(text: str) -> None:
        if not options.quiet:
            print(f"  {text}", file=sys.stderr, flush=True)

    chosen = [(name, one) for name in options.tasks or TASKS for one in TASKS[name]]
    lacking = None
    if peers is None:
        lacking = "there is no ../shared/peers.py (MANYHEADS_SHARED may name another folder)"
    elif not Path(options.peer_python).is_file():
        lacking = f"{options.peer_python} is no interpreter; `make bench` sets one up, or give --peer-python"
    if lacking is not None and any(one.needs_peers for _, one in chosen):
        print(f"The tasks with peers are left out: {lacking}.", flush=True)
        chosen = [(name, one) for name, one in chosen if not one.needs_peers]
    report: dict[str, Any] = {"machine": describe_machine(), "rounds": options.rounds, "seconds": options.seconds}
    report["tasks"] = []
    lines: list[str] = []
    faults = 0
    for name, comparison in chosen:
        start = time.perf_counter()
        found = measure(comparison, options, say)
        try:
            some = tables(comparison, found)
        except SizeError as error:
            faults += 1
            some = [f"**{error}**"]
        failed = [turns.failure for turns in found.values() if turns.failure]
        some = [f"## {comparison.title}", "", *some, "", *(f"No figures: {why}\n" for why in failed)]
        print("\n".join(some), flush=True)
        say(f"{name} took {time.perf_counter() - start:.0f} s")
        lines += some
        report["tasks"].append(record(name, comparison, found))
        if options.json is not None:  # after each, so that what was measured outlives an interrupted run
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if options.markdown is not None:
            options.markdown.write_text("\n".join([*header(report), "", *lines]), encoding="utf-8")
    return 1 if faults else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; all of them")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn (4)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side (5)")
    parser.add_argument("--quick", action="store_true", help="only to see that it works: 2 rounds of half a second")
    parser.add_argument(
        "--peer-python", default=str(ROOT / ".venv-peers" / "bin" / "python"), help="the peers' interpreter"
    )
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


def measure(comparison: Comparison, options: argparse.Namespace, say: Any) -> dict[str, Turns]:
    """All sides of a comparison and the machine's products."""
    with tempfile.TemporaryDirectory(prefix="manyheads-bench-") as folder:
        entries = [
            replace(entry, options={**entry.options, "folder": folder}) if entry.shares else entry
            for entry in comparison.entries
        ]
        seconds = options.seconds * comparison.pace
        sides = [(side_of(entry, options.peer_python), seconds) for entry in entries]
        if comparison.has_products:
            for name, dtype in ((PRODUCTS["bf16"], "bfloat16"), (PRODUCTS["fp32"], "float32")):
                entry = Entry(name, "machine:products", {"dtype": dtype})
                sides.append((side_of(entry, options.peer_python), min(seconds, 1.0)))
        say(comparison.title)
        return take_turns(sides, options.rounds, say)


def side_of(entry: Entry, peer_python: str) -> Side:
    """Where and under what environment a side runs: peers as they come, ours as the command line sets itself up."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if entry.where == "peers":
        return Side(entry.name, entry.build, entry.options, peer_python, environment)
    # Of this checkout, whatever is installed. Whether the machine is busy must not be guessed among waiting sides.
    environment |= {"PYTHONPATH": str(ROOT / "src"), "GOMP_SPINCOUNT": "10000"}
    if entry.where == "one thread":
        environment |= {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    return Side(entry.name, entry.build, entry.options, sys.executable, environment)


def tables(comparison: Comparison, found: dict[str, Turns]) -> list[str]:
    """Ratios, then what each side did by itself.

    Raises: SizeError: a pair's parameters are more than 5% apart.
    """
    check_sizes(comparison, found)
    lines: list[str] = []
    rows = [
        [ours, peer, times(spread(found[ours].rates, found[peer].rates))]
        for ours, peer in comparison.pairs
        if found[ours].rates and found[peer].rates
    ]
    if rows:
        lines += [*markdown_table(("ours", "peer", "ours / peer (lowest to highest)"), rows, num_left=2), ""]
    columns = ("side", "precision", "threads", comparison.unit, "of the machine's products", "peak MiB", "parameters")
    sides = [row(name, turns, found) for name, turns in found.items() if turns.rates]
    kept = [place for place in range(len(columns)) if place == 0 or any(cells[place] for cells in sides)]
    lines += markdown_table([columns[place] for place in kept], [[cells[place] for place in kept] for cells in sides])
    for name, turns in found.items():
        for what, values in turns.extras.items():
            lines += ["", f"{name}: {what} {number(spread(values))}"]
    return lines


def check_sizes(comparison: Comparison, found: dict[str, Turns]) -> None:
    for ours, peer in comparison.pairs:
        if peer in comparison.other_kind:
            continue
        mine, theirs = (found[name].about.get("parameters") for name in (ours, peer))
        if mine and theirs and abs(mine - theirs) > MOST_APART * theirs:
            raise SizeError(
                f"{ours} has {mine:,} parameters, {peer} {theirs:,}: more than {MOST_APART:.0%} apart, so their ratio"
                " means nothing. Give ours the peer's sizes in benchmarks/ours.py."
            )


def row(name: str, turns: Turns, found: dict[str, Turns]) -> list[str]:
    about = turns.about
    if name in PRODUCTS.values():
        rate = f"{number(spread(turns.rates, factor=1e-9))} GFLOP/s"
    else:
        rate = number(spread(turns.rates))
    parameters = about.get("parameters")
    return [
        name,
        about.get("precision") or "",
        str(about.get("threads") or ""),
        rate,
        share_of_products(turns, found),
        f"{turns.peak_bytes / 2**20:,.0f}",
        f"{parameters:,}" if parameters else "",
    ]


def share_of_products(turns: Turns, found: dict[str, Turns]) -> str:
    """Of the rate of bf16 products in the same round; and in fp32 of that of fp32 products."""
    each = shares(turns, found)
    return ", ".join(f"{value.median:.1%} of {precision}" for precision, value in each.items())


def shares(turns: Turns, found: dict[str, Turns]) -> dict[str, Spread]:
    """By the precision of the machine's products; empty where no formula is."""
    flops, units = (turns.about.get(name) for name in ("flops", "units"))
    kinds = ("bf16", "fp32") if turns.about.get("precision") == "fp32" else ("bf16",)
    if not flops or not units:
        return {}
    return {
        kind: spread(turns.rates, found[PRODUCTS[kind]].rates, flops / units)
        for kind in kinds
        if PRODUCTS[kind] in found and found[PRODUCTS[kind]].rates
    }


def number(value: Spread) -> str:
    """A figure with its lowest and highest, with as many places as it deserves."""
    places = next((places for limit, places in ((100, 0), (10, 1), (0.1, 2)) if abs(value.median) >= limit), 5)
    low, high = f"{value.lowest:,.{places}f}", f"{value.highest:,.{places}f}"
    return f"{value.median:,.{places}f} ({low} to {high})"


def times(value: Spread) -> str:
    return f"{value.median:.2f} x ({value.lowest:.2f} to {value.highest:.2f})"


def record(name: str, comparison: Comparison, found: dict[str, Turns]) -> dict[str, Any]:
    """What goes into the JSON file: everything that was measured."""
    sides = {}
    for side, turns in found.items():
        reached = {f"share_of_{kind}": asdict(value) for kind, value in shares(turns, found).items()}
        sides[side] = {**asdict(turns), **reached}
    ratios = [
        {"ours": ours, "peer": peer, **asdict(spread(found[ours].rates, found[peer].rates))}
        for ours, peer in comparison.pairs
        if found[ours].rates and found[peer].rates
    ]
    return {"task": name, "title": comparison.title, "unit": comparison.unit, "ratios": ratios, "sides": sides}


def describe_machine() -> dict[str, Any]:
    """Date, hardware and commit."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": commit(),
    }


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").split("\n"):
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str:
    """The checkout's, and whether files of it were changed since."""
    try:
        said = [
            subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said[0] + (" and changes" if said[1] else "")


def header(report: dict[str, Any]) -> Sequence[str]:
    """Of a dated file of results."""
    machine = report["machine"]
    return [
        f"# {machine['date']}, {machine['cores']} cores of {machine['cpu']}, torch {machine['torch']},"
        f" at {machine['commit']}",
        "",
        f"`make bench`: {report['rounds']} rounds in which every side works {report['seconds']:g} s (some tasks less),"
        " one after the other, a process each. Medians, with the lowest and highest round; ratios are of the same"
        f" round. {machine['system']}, Python {machine['python']}.",
    ]


if __name__ == "__main__":
    sys.exit(main())
