"""A Transformer-XL's training and evaluation against `transformers` 4.35.2's TransfoXL, in turn, a process each.

Both: 6 layers, d_model 256, 4 heads of 64, d_ff 1024, vocabulary 10,000, dropout 0.1, fused Adam; training with segment
128, memory 128, 16 lanes; evaluation with segment 64, memory 640, clamp 400, same_length, 8 lanes. The peer is run by a
script that is given (`--peers`, with the tasks `xl-train` and `xl-eval`), unchanged, in an environment that is given.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB = 10_000
SIZES: dict[str, Any] = {"d_model": 256, "num_heads": 4, "head_dim": 64, "d_ff": 1024, "num_layers": 6, "dropout": 0.1}
SECONDS = 12.0


def timed(step: Callable[[], None], tokens: int, warm: int) -> float:
    """Tokens a second, median over steps: the peers' own way."""
    for _ in range(warm):
        step()
    rates: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(rates) < 3:
        start = time.perf_counter()
        step()
        rates.append(tokens / (time.perf_counter() - start))
    return statistics.median(rates)


def ours(task: str, bf16: bool) -> float:
    import torch

    from manyheads.architectures.table import build_model
    from manyheads.architectures.transformer_xl.config import Attending, TransformerXLConfig
    from manyheads.data.segments import SegmentBatch

    torch.manual_seed(0)
    train = task == "xl-train"
    lanes, length = (16, 128) if train else (8, 64)
    attending = Attending(memory_len=128) if train else Attending(memory_len=640, clamp_len=400, same_length=True)
    model = build_model(TransformerXLConfig(vocab_size=VOCAB, memory_len=128, **SIZES))
    ids = torch.randint(0, VOCAB, (lanes, length + 1))
    whole, none = torch.full((lanes,), length), torch.zeros(lanes, dtype=torch.bool)
    batch = SegmentBatch(ids[:, :-1], ids[:, 1:], whole, none, torch.arange(lanes))
    state: Any = None
    cast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16)
    if not train:
        model.eval()

        def look() -> None:
            nonlocal state
            with torch.no_grad(), cast:
                if state is None:
                    state = model.start(lanes, attending)
                state = model(batch, state).state

        return timed(look, batch.tokens.numel(), 12)
    model.train()
    optimiser = torch.optim.Adam(model.parameters(), 1e-4, fused=True)

    def learn() -> None:
        nonlocal state
        with cast:
            output = model(batch, state)
        state = output.state
        optimiser.zero_grad()
        (output.loss_sum / output.num_tokens).backward()
        optimiser.step()

    return timed(learn, batch.tokens.numel(), 2)


def run(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.split("\n") if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-1500:]}")
    record: dict[str, Any] = json.loads(lines[-1])
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, help="the script that runs the peer")
    parser.add_argument("--peer-python", default=sys.executable, help="the interpreter that has transformers 4.35.2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=("xl-train", "xl-eval"), help="one measurement of ours, and end")
    parser.add_argument("--bf16", action="store_true", help="with --one")
    options = parser.parse_args()
    if options.one:
        rate = ours(options.one, options.bf16)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps({"task": options.one, "tokens_per_s": round(rate), "peak_rss_mib": memory}))
        return
    if options.peers is None or not options.peers.is_file():
        print("transformer_xl.py: no --peers script is given, so there is nothing to compare with; skipped")
        return
    environment = dict(os.environ)
    for task in ("xl-train", "xl-eval"):
        mine = [sys.executable, __file__, "--one", task]
        theirs = [options.peer_python, str(options.peers), task, "--peer", "transformers 4.35 TransfoXL"]
        sides: dict[str, list[dict[str, Any]]] = {"peer fp32": [], "ours fp32": [], "ours bf16": []}
        for _ in range(options.rounds):
            sides["peer fp32"].append(run(theirs, {**environment, "PYTHONPATH": ""}))
            sides["ours fp32"].append(run(mine, environment))
            sides["ours bf16"].append(run([*mine, "--bf16"], environment))
        rates = {name: statistics.median(one["tokens_per_s"] for one in found) for name, found in sides.items()}
        memory = {name: max(one["peak_rss_mib"] for one in found) for name, found in sides.items()}
        print(f"{task}: median of {options.rounds} alternating rounds")
        for name, rate in rates.items():
            each = ", ".join(str(one["tokens_per_s"]) for one in sides[name])
            print(
                f"  {name:<9} {rate:8,.0f} tokens/s ({each}), {rate / rates['peer fp32']:.2f} x,"
                f" peak {memory[name]:,} MiB"
            )


if __name__ == "__main__":
    if "--one" in sys.argv:
        from manyheads.cli.machine import set_up_machine

        set_up_machine()
    main()
