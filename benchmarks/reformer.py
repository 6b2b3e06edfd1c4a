"""A Reformer's training against its peers and against exact attention, in turn, a process each.

All: 4 layers, d_model 256, 4 heads of 64, d_ff 1024, vocabulary 320, batch 1, no dropout, fused Adam; the Reformers
with chunks of 64 and 4 rounds of hashing. The peers are run by a script that is given (`--peers`, with the tasks
`reformer-train-4k` and `reformer-train-16k`), unchanged, in an environment that is given. `--lengths` measures time and
memory against length for all four and, with `--plot`, draws them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {"d_model": 256, "num_heads": 4, "d_ff": 1024, "num_layers": 4, "dropout": 0.0}
HASHING: dict[str, Any] = {"chunk_len": 64, "num_hashes": 4}
VOCAB = 320
SECONDS = 12.0
TASKS = {"reformer-train-4k": 4096, "reformer-train-16k": 16384}
PEERS = {"transformers Reformer": "ref_hf", "reformer-pytorch": "ref_lucid", "exact SDPA decoder": "ref_full"}
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
# One task of the peers' script at another length: its own functions, in the peers' own process.
OF_A_LENGTH = """
import importlib.util, json, resource, sys
spec = importlib.util.spec_from_file_location("peers", sys.argv[1])
peers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peers)
import torch
torch.manual_seed(0)
rate = getattr(peers, sys.argv[2])(True, int(sys.argv[3]))
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(json.dumps({"tokens_per_s": round(rate), "peak_rss_mib": memory}))
"""


def timed(step: Callable[[], None], tokens: int) -> float:
    """Tokens a second, median over steps after one: the peers' own way."""
    step()
    rates: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(rates) < 3:
        start = time.perf_counter()
        step()
        rates.append(tokens / (time.perf_counter() - start))
    return statistics.median(rates)


def ours(length: int, bf16: bool) -> tuple[float, int]:
    """Tokens a second, and the number of parameters."""
    import torch
    from manyheads.architectures.reformer.config import ReformerConfig

    from manyheads.architectures.table import build_model
    from manyheads.data.segments import SegmentBatch

    torch.manual_seed(0)
    side = 64
    config = ReformerConfig(
        vocab_size=VOCAB,
        layers=("lsh",),
        positions="axial",
        max_len=length,
        axial_shape=(side, length // side),
        axial_dims=(64, SIZES["d_model"] - 64),
        **SIZES,
        **HASHING,
    )
    model = build_model(config).train()
    ids = torch.randint(0, VOCAB, (1, length + 1))
    none = torch.zeros(1, dtype=torch.bool)
    batch = SegmentBatch(ids[:, :-1], ids[:, 1:], torch.tensor([length]), none, torch.zeros(1, dtype=torch.int64))
    optimiser = torch.optim.Adam(model.parameters(), 1e-4, fused=True)
    state: Any = None

    def learn() -> None:
        nonlocal state
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            output = model(batch, state)
        state = output.state
        optimiser.zero_grad()
        (output.loss_sum / output.num_tokens).backward()
        optimiser.step()

    return timed(learn, length), sum(p.numel() for p in model.parameters())


def run(command: list[str], environment: dict[str, str]) -> dict[str, Any] | None:
    """The record that a process prints; None if it fails, as one does that runs out of memory."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.split("\n") if line.startswith("{")]
    if done.returncode or not lines:
        print(f"{' '.join(command[-4:])} failed: {done.stderr.strip()[-300:]}", file=sys.stderr, flush=True)
        return None
    record: dict[str, Any] = json.loads(lines[-1])
    return record


def side_by_side(options: argparse.Namespace) -> None:
    """Alternating rounds at the two lengths of the peers' script."""
    environment = dict(os.environ)
    theirs_only = {**environment, "PYTHONPATH": ""}
    for task, length in TASKS.items():
        found: dict[str, list[dict[str, Any] | None]] = {name: [] for name in ("ours", *PEERS)}
        for _ in range(options.rounds):
            found["ours"].append(run([sys.executable, __file__, "--one", str(length), "--bf16"], environment))
            for peer in PEERS:
                command = [options.peer_python, str(options.peers), task, "--bf16", "--peer", peer]
                found[peer].append(run(command, theirs_only))
        done = {name: [one for one in records if one] for name, records in found.items()}
        rates = {name: statistics.median(one["tokens_per_s"] for one in records) for name, records in done.items()}
        print(f"{task}: median of {options.rounds} alternating rounds, bf16")
        for name, rate in rates.items():
            each = ", ".join(str(one["tokens_per_s"]) for one in done[name])
            memory = max(one["peak_rss_mib"] for one in done[name])
            factor = rates["ours"] / rate
            print(f"  {name:<21} {rate:8,.0f} tokens/s ({each}), ours {factor:.2f} x, peak {memory:,} MiB", flush=True)


def against_length(options: argparse.Namespace) -> None:
    """Time and memory of a training step from the shortest length to the longest, one run each."""
    environment = dict(os.environ)
    theirs_only = {**environment, "PYTHONPATH": ""}
    table: dict[str, dict[int, dict[str, Any] | None]] = {name: {} for name in ("ours", *PEERS)}
    for length in LENGTHS[: options.lengths]:
        table["ours"][length] = run([sys.executable, __file__, "--one", str(length), "--bf16"], environment)
        for peer, function in PEERS.items():
            command = [options.peer_python, "-c", OF_A_LENGTH, str(options.peers), function, str(length)]
            table[peer][length] = run(command, theirs_only)
        print(f"{length:,} measured", file=sys.stderr, flush=True)
    print(f"| length | {' | '.join(table)} |\n|---:|{'---:|' * len(table)}")
    for length in table["ours"]:
        cells = []
        for records in table.values():
            one = records[length]
            rate = None if one is None else one["tokens_per_s"]
            cells.append(f"{length / rate:.2f} s, {one['peak_rss_mib']:,} MiB" if one and rate else "failed")
        print(f"| {length:,} | {' | '.join(cells)} |")
    print(crossing(table["ours"], table["exact SDPA decoder"]))
    if options.plot is not None:
        draw(table, options.plot)


def crossing(ours: dict[int, Any], exact: dict[int, Any]) -> str:
    """The length from which hashing is faster, on the line between two measured ones in logarithms."""
    before: tuple[int, float] | None = None
    for length, one in ours.items():
        other = exact.get(length)
        if one is None or other is None:
            continue
        gain = math.log(one["tokens_per_s"] / other["tokens_per_s"])
        if gain > 0:
            if before is None:
                return f"faster than exact attention at every measured length, from {length:,}"
            share = -before[1] / (gain - before[1])
            where = math.exp(math.log(before[0]) + share * math.log(length / before[0]))
            return f"faster than exact attention from about {where:,.0f} (measured: {before[0]:,} not yet, {length:,})"
        before = (length, gain)
    return "slower than exact attention at every measured length"


def draw(table: dict[str, dict[int, Any]], path: Path) -> None:
    """Two axes: seconds a step and peak memory, against length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, records in table.items():
        lengths = [length for length, one in records.items() if one]
        left.plot(lengths, [n / records[n]["tokens_per_s"] for n in lengths], marker="o", label=name)
        right.plot(lengths, [records[n]["peak_rss_mib"] / 1024 for n in lengths], marker="o", label=name)
    for axes, title in ((left, "seconds a training step"), (right, "peak memory of the process, GiB")):
        axes.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, help="the script that runs the peers")
    parser.add_argument("--peer-python", default=sys.executable, help="the interpreter that has them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--lengths", type=int, nargs="?", const=len(LENGTHS), help=f"how many of {LENGTHS} to measure; all of them"
    )
    parser.add_argument("--plot", type=Path, help="with --lengths: a picture of them")
    parser.add_argument("--one", type=int, metavar="LENGTH", help="one measurement of ours, and end")
    parser.add_argument("--bf16", action="store_true", help="with --one")
    options = parser.parse_args()
    if options.one:
        rate, parameters = ours(options.one, options.bf16)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        record = {"length": options.one, "tokens_per_s": round(rate), "peak_rss_mib": memory, "parameters": parameters}
        print(json.dumps(record))
        return
    if options.peers is None or not options.peers.is_file():
        print("reformer.py: no --peers script is given, so there is nothing to compare with; skipped")
        return
    if options.lengths:
        against_length(options)
    else:
        side_by_side(options)


if __name__ == "__main__":
    if "--one" in sys.argv:
        from manyheads.cli.machine import set_up_machine

        set_up_machine()
    main()
