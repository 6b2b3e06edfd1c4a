"""What `make bench` prints and writes: tables and records of a comparison, the machine that it ran on."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness import Spread, Turns, markdown_table, spread
from tasks import Comparison

ROOT = Path(__file__).resolve().parents[1]
PRODUCTS = {"bf16": "products of 2048, bf16", "fp32": "products of 2048, fp32"}
MOST_APART = 0.05


class SizeError(RuntimeError):
    """A pair's parameters differ by more than is fair."""


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
    if not any(turns.rates for turns in found.values()):
        return lines
    columns = ("side", "precision", "threads", comparison.unit, "of the machine's products", "peak MiB", "parameters")
    sides = [row(name, turns, found) for name, turns in found.items() if turns.rates]
    kept = [place for place in range(len(columns)) if place == 0 or any(cells[place] for cells in sides)]
    lines += markdown_table([columns[place] for place in kept], [[cells[place] for place in kept] for cells in sides])
    for name, turns in found.items():
        for what, values in turns.extras.items():
            lines += ["", f"{name}: {what} {number(spread(values))}"]
    return lines


def reasons(found: Mapping[str, Turns]) -> list[str]:
    """Paragraphs that name the sides without figures, and say why; sides with one reason share a paragraph."""
    grouped: dict[str, list[str]] = {}
    for name, turns in found.items():
        if turns.left_out:
            grouped.setdefault(turns.left_out, []).append(name)
    told = [
        f"Left out as too slow on this machine: {'; '.join(names)}. Reason: {why}." for why, names in grouped.items()
    ]
    return told + [f"No figures: {turns.failure}" for turns in found.values() if turns.failure]


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


def describe_machine(looked: Mapping[str, Any]) -> dict[str, Any]:
    """Date, hardware and commit. looked: what `machine.py` printed, empty where it failed."""
    rates = {name: looked[name] for name in ("fp32", "bf16") if name in looked}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "class": looked.get("class", "unknown"),
        "rates": rates,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": commit(),
    }


def gflops(rate: float) -> str:
    return f"{rate / 1e9:,.{0 if rate >= 1e10 else 1}f} GFLOP/s"


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
            subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()  # noqa: S607  (git is found on the PATH)
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said[0] + (" and changes" if said[1] else "")


def header(report: Mapping[str, Any]) -> Sequence[str]:
    """Of a dated file of results."""
    machine = report["machine"]
    rates = ", ".join(f"{name} {gflops(rate)}" for name, rate in machine["rates"].items()) or "not measured"
    lines = [
        f"# {machine['date']}, {machine['cores']} cores of {machine['cpu']}, torch {machine['torch']},"
        f" at {machine['commit']}",
        "",
        f"Class of machine: {machine['class']}. Matrix products of at most 1,024 before the first task: {rates}.",
        "",
        f"`make bench`: {report['rounds']} rounds in which every side works {report['seconds']:g} s (some tasks less),"
        " one after the other, a process each. Medians, with the lowest and highest round; ratios are of the same"
        f" round. {machine['system']}, Python {machine['python']}.",
    ]
    if report["left_out"]:
        lines += [
            "",
            f"{len(report['left_out'])} sides were left out as too slow on this machine; each task names its own.",
        ]
    return lines
