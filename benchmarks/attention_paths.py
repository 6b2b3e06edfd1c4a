"""Where plain matrix products beat SDPA: forward and backward by length, both paths in turn in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch

from manyheads.cli.process import set_up_machine
from manyheads.nn.attention.masks import Lengths
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.attention import dot_product_attention

SHAPES = [(300, 4, 14, 64), (64, 4, 32, 64), (16, 4, 128, 64), (4, 4, 256, 64)]


def measure(batch: int, heads: int, length: int, head_dim: int, dtype: torch.dtype) -> tuple[float, float]:
    """Median milliseconds of the products and of SDPA."""
    q, k, v = (torch.randn(batch, heads, length, head_dim, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = Lengths(torch.randint(length // 2, length + 1, (batch,)))

    def step() -> None:
        dot_product_attention(q, k, v, mask).sum().backward()

    products, sdpa = paired(lambda: by_path(step, "products"), lambda: by_path(step, "sdpa"))
    return statistics.median(products) * 1e3, statistics.median(sdpa) * 1e3


def by_path(step: Callable[[], None], path: policy.AttentionPath) -> None:
    with patch.object(policy, "attention_path", lambda *_: path):
        step()


def paired(a: Callable[[], None], b: Callable[[], None], rounds: int = 9) -> tuple[list[float], list[float]]:
    """Seconds of each, measured in turn after one warm-up."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for side, run in enumerate((a, b)):
            start = time.perf_counter()
            run()
            if turn:
                times[side].append(time.perf_counter() - start)
    return times


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'batch x heads x length x head_dim':36} {'type':>9} {'products':>10} {'SDPA':>10} {'ratio':>7}")
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            products, sdpa = measure(*shape, dtype)
            name = str(dtype).removeprefix("torch.")
            print(f"{' x '.join(map(str, shape)):36} {name:>9} {products:8.1f}ms {sdpa:8.1f}ms {sdpa / products:7.2f}")


if __name__ == "__main__":
    set_up_machine()
    main()
