"""How long a sequence a Reformer learns from at once, and what that takes.

One training step, forward, backward and optimiser, of the preset `million` at each of the lengths, a process each: the
loss, the peak memory of the process, the minutes. `--million` adds 1,048,576 tokens: have 20 GiB of memory free. Then
two comparisons in float32: gradients against plain backpropagation, and the memory of a step at 16 layers against 2,
which is the process's peak less what it holds before that step: weights, their gradients and the optimiser's moments.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

LENGTHS = (16_384, 131_072)
MILLION = 1 << 20
DEPTHS = (2, 16)
FLAT_LENGTH = 16_384
EXACT_LENGTH = 8192
MIB = 2**20


def peak() -> int:
    """Bytes, of the process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def held() -> int:
    """Bytes, now."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * resource.getpagesize()


def build(**changes: Any) -> Any:
    """The preset `million` over bytes, in training mode."""
    import torch

    from manyheads.catalogue import build_model
    from manyheads.models.reformer.config import PRESETS

    torch.manual_seed(0)
    return build_model(replace(PRESETS["million"], vocab_size=256, **changes)).train()


def segment(length: int) -> Any:
    """Random words of a hundred, some of them again and again: something to be learned, and to be hashed."""
    import torch

    from manyheads.data.language.segments import SegmentBatch

    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 256, (100, 8), generator=generator)
    ids = words[torch.randint(0, 100, (length // 8 + 1,), generator=generator)].view(1, -1)[:, : length + 1]
    none = torch.zeros(1, dtype=torch.bool)
    return SegmentBatch(ids[:, :-1], ids[:, 1:], torch.tensor([length]), none, torch.zeros(1, dtype=torch.int64))


def step(model: Any, optimiser: Any, length: int, *, bf16: bool) -> float:
    """One training step. Returns: the loss in nats a token."""
    import torch

    from manyheads.nn.kernels.modes import fast

    with fast(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        output = model(segment(length))
    loss = output.loss_sum / output.num_tokens
    del output
    loss.backward()
    optimiser.step()
    optimiser.zero_grad(set_to_none=False)
    return float(loss.detach())


def one_length(length: int) -> dict[str, Any]:
    """A step at a length, in bfloat16 over float32 weights."""
    import torch

    model = build()
    optimiser = torch.optim.Adam(model.parameters(), 1e-4, fused=True)
    before, start = held(), time.perf_counter()
    loss = step(model, optimiser, length, bf16=True)
    seconds = time.perf_counter() - start
    finite = math.isfinite(loss) and all(bool(p.isfinite().all()) for p in model.parameters())
    return {"length": length, "loss": loss, "finite": finite, "seconds": seconds, "before": before, "peak": peak()}


def one_depth(num_layers: int, length: int) -> dict[str, Any]:
    """The memory of a step above what stands before it."""
    import torch

    model = build(num_layers=num_layers)
    optimiser = torch.optim.Adam(model.parameters(), 1e-4, fused=True)
    step(model, optimiser, 64, bf16=False)  # gradients and moments are there now
    before = held()
    step(model, optimiser, length, bf16=False)
    return {"num_layers": num_layers, "before": before, "peak": peak(), "step": peak() - before}


def compared(length: int) -> dict[str, Any]:
    """Gradients of the reversible model against plain backpropagation: the difference to a tensor's greatest number."""
    import torch

    found = []
    for reversible in (True, False):
        model = build(reversible=reversible)
        output = model(segment(length))
        found.append(torch.autograd.grad(output.loss_sum / output.num_tokens, list(model.parameters())))
    worst = max(
        float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)) for one, other in zip(*found, strict=True)
    )
    return {"length": length, "worst": worst}


def child(*arguments: object) -> dict[str, Any]:
    """The record of this script in a process of its own."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-800:]}")
    record: dict[str, Any] = json.loads(done.stdout.strip().split("\n")[-1])
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", action="store_true", help="1,048,576 tokens, too: 20 GiB and many minutes")
    parser.add_argument("--length", type=int, help="a step of this length alone; prints JSON")
    parser.add_argument("--depth", type=int, help="a step at --flat-length of so many layers alone; prints JSON")
    parser.add_argument("--flat-length", type=int, default=FLAT_LENGTH)
    parser.add_argument("--compare", type=int, metavar="LENGTH", help="gradients at this length alone; prints JSON")
    options = parser.parse_args()
    if options.length:
        print(json.dumps(one_length(options.length)))
        return
    if options.depth:
        print(json.dumps(one_depth(options.depth, options.flat_length)))
        return
    if options.compare:
        print(json.dumps(compared(options.compare)))
        return
    print("| tokens | loss | peak memory | of it before the step | minutes |\n|---:|---:|---:|---:|---:|")
    for length in (*LENGTHS, *([MILLION] if options.million else [])):
        one = child("--length", length)
        loss = f"{one['loss']:.3f}" if one["finite"] else "not finite"
        sizes = f"{one['peak'] / MIB:,.0f} MiB | {one['before'] / MIB:,.0f} MiB"
        print(f"| {length:,} | {loss} | {sizes} | {one['seconds'] / 60:.2f} |", flush=True)
    worst = child("--compare", EXACT_LENGTH)["worst"]
    print(f"gradients at {EXACT_LENGTH:,} tokens against plain backpropagation, float32: {worst:.1e} apart")
    few, many = (child("--depth", depth)["step"] for depth in DEPTHS)
    print(
        f"memory of a step at {FLAT_LENGTH:,} tokens: {few / MIB:,.0f} MiB at {DEPTHS[0]} layers, {many / MIB:,.0f} MiB"
        f" at {DEPTHS[1]}: {many / few:.2f} x"
    )


if __name__ == "__main__":
    # Threads that spin cost minutes on a busy machine. What `manyheads` sets up besides is for speed: blocks that are
    # kept when they are free, which at this size is a matter of gigabytes.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    main()
