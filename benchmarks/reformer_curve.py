"""A Reformer's training step against length: seconds and peak memory, beside its peers and exact attention, bf16.

    python benchmarks/reformer_curve.py [--longest 65536] [--plot FILE]

Sizes are those of the tasks `reformer-train-4k` and `-16k` of `run.py`; every cell is a process of its own, one after
the other, so that memory is its own: what is compared here grows with length by factors, not percents. Needs the shared
peers and their environment, which `make bench` sets up; and matplotlib for the picture.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import Child, Side, SideError, markdown_table
from peers_shared import shared_peers
from run import ROOT, side_of
from tasks import Entry

LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
PEERS = {"transformers Reformer": "ref_hf", "reformer-pytorch": "ref_lucid", "exact attention (SDPA)": "ref_full"}
OURS, EXACT = "manyheads", "exact attention (SDPA)"


@dataclass(frozen=True)
class Cell:
    """A training step of one side at one length."""

    seconds: float
    peak_bytes: int


Table = dict[str, dict[int, Cell | None]]


def measured(side: Side, length: int, seconds: float) -> Cell | None:
    """None if it fails, as one does that runs out of memory."""
    try:
        child = Child(side, build_seconds=3600, most_seconds=3600)
        try:
            answer = child.ask(seconds)
        finally:
            child.close()
    except SideError as error:
        print(f"{side.name} at {length:,}: {error}", flush=True)
        return None
    return Cell(length / answer["rate"], answer["peak_bytes"])


def crossing(ours: Mapping[int, Cell | None], exact: Mapping[int, Cell | None]) -> str:
    """The length from which hashing is faster, on the line between two measured ones in logarithms."""
    before: tuple[int, float] | None = None
    for length, one in ours.items():
        other = exact.get(length)
        if one is None or other is None:
            continue
        gain = math.log(other.seconds / one.seconds)
        if gain > 0:
            if before is None:
                return f"Faster than exact attention at every measured length, from {length:,}."
            share = -before[1] / (gain - before[1])
            where = math.exp(math.log(before[0]) + share * math.log(length / before[0]))
            return f"Faster than exact attention from about {where:,.0f} (measured: {before[0]:,} not yet, {length:,})."
        before = (length, gain)
    return "Slower than exact attention at every measured length."


def rows(table: Table, lengths: Sequence[int]) -> list[list[str]]:
    found = []
    for length in lengths:
        cells = [table[name][length] for name in table]
        shown = [f"{cell.seconds:.2f} s, {cell.peak_bytes / 2**20:,.0f} MiB" if cell else "failed" for cell in cells]
        found.append([f"{length:,}", *shown])
    return found


def draw(table: Table, path: Path) -> None:
    """Two axes: seconds a step and peak memory, against length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, cells in table.items():
        there = {length: cell for length, cell in cells.items() if cell is not None}
        left.plot([*there], [cell.seconds for cell in there.values()], marker="o", label=name)
        right.plot([*there], [cell.peak_bytes / 2**30 for cell in there.values()], marker="o", label=name)
    for axes, title in ((left, "seconds a training step"), (right, "peak memory of the process, GiB")):
        axes.set(xlabel="tokens", title=title, yscale="log")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help=f"of {LENGTHS}; all of them")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a cell; one step at least")
    parser.add_argument("--plot", type=Path, help="a picture of it")
    parser.add_argument("--peer-python", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    options = parser.parse_args()
    if shared_peers() is None:
        parser.error("there is no ../shared/peers.py; MANYHEADS_SHARED may name another folder")
    lengths = [length for length in LENGTHS if length <= options.longest]
    table: Table = {name: {} for name in (OURS, *PEERS)}
    for length in lengths:
        entries = [Entry(OURS, "ours:reformer", {"precision": "bf16", "length": length})]
        entries += [
            Entry(name, "peers_shared:reformer", {"function": function, "length": length}, "peers")
            for name, function in PEERS.items()
        ]
        for entry in entries:
            table[entry.name][length] = measured(side_of(entry, options.peer_python), length, options.seconds)
    print("\n".join(markdown_table(("tokens", *table), rows(table, lengths), num_left=0)))
    print(crossing(table[OURS], table[EXACT]))
    if options.plot is not None:
        draw(table, options.plot)


if __name__ == "__main__":
    main()
