"""MultiHeadAttention against nn.MultiheadAttention and a bare block of projections around SDPA, forward and backward.

All have 512 features and 8 heads, random weights, no mask, no dropout; the sides run in turn (A B C A B C ...), and
what is compared is the median of the ratios within a turn.

    bare    three projections in one product, scaled_dot_product_attention, one projection: what anybody would write
    torch   nn.MultiheadAttention(batch_first=True), need_weights=False
    drop-in our TorchMultiheadAttention, need_weights=False

    python benchmarks/attention.py [--batch 8] [--length 512] [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.cli.machine import set_up_machine
from manyheads.nn import MultiHeadAttention, TorchMultiheadAttention

WIDTH, HEADS = 512, 8


class Bare(nn.Module):
    """Nothing but the products."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 3 * WIDTH)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.in_proj(x).chunk(3, dim=-1))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def sides() -> dict[str, Callable[[Tensor], Tensor]]:
    ours, bare = MultiHeadAttention(WIDTH, HEADS), Bare()
    theirs, drop_in = (
        kind(WIDTH, HEADS, batch_first=True) for kind in (nn.MultiheadAttention, TorchMultiheadAttention)
    )
    return {
        "ours": lambda x: ours(x)[0],
        "bare": bare,
        "torch": lambda x: theirs(x, x, x, need_weights=False)[0],
        "drop-in": lambda x: drop_in(x, x, x, need_weights=False)[0],
    }


def measure(batch: int, length: int, dtype: torch.dtype, rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of each side, in turn, after two rounds of warming up."""
    x = torch.randn(batch, length, WIDTH, device=device, requires_grad=True)
    with torch.device(device):
        runs = sides()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-2, rounds):
        for name, run in runs.items():
            x.grad = None
            start = time.perf_counter()
            with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                out = run(x)
            out.float().sum().backward()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {given.device}, {torch.get_num_threads()} threads")
    print(f"({given.batch}, {given.length}, {WIDTH}), {HEADS} heads; milliseconds, and ours over theirs by turn")
    for dtype in (torch.float32, torch.bfloat16):
        times = measure(given.batch, given.length, dtype, given.rounds, given.device)
        for name, seconds in times.items():
            ratios = [ours / other for ours, other in zip(times["ours"], seconds, strict=True)]
            name_of_type = str(dtype).removeprefix("torch.")
            median = statistics.median(seconds) * 1e3
            print(f"{name_of_type:9} {name:8} {median:8.2f} ms   ours / {name}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    set_up_machine()
    main()
