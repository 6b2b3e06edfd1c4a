"""What the machine can do: products of square matrices as a side among the others, its class, and how fast bf16 is.

python machine.py prints the class and the rates as JSON; `run.py` leaves out what this shows to be too slow.
"""

from __future__ import annotations

import json
import os
import time

import torch
from harness import Step

SIZE = 2048
SMALL_SIZES = (128, 256, 512, 1024)
SMALL_SECONDS = 0.05
"""A product that takes longer is the last that is tried: on some machines bf16 is a hundred times slower than fp32."""


def products(dtype: str) -> Step:
    """2048 x 2048 by 2048 x 2048, in operations a second. dtype: `bfloat16` or `float32`."""
    left, right = (torch.randn(SIZE, SIZE).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(left)
    return Step(lambda: torch.mm(left, right, out=out), units=2.0 * SIZE**3, warm=3, precision=dtype)


def rate(dtype: torch.dtype) -> float:
    """Operations a second of the best of a few products, of growing sizes."""
    best = 0.0
    for size in SMALL_SIZES:
        left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
        seconds = min(_seconds(left, right) for _ in range(3))
        best = max(best, 2.0 * size**3 / seconds)
        if seconds > SMALL_SECONDS:
            break
    return best


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.mm(left, right)
    return time.perf_counter() - start


def machine_class() -> str:
    """`amx`, `avx512_bf16`, `avx512`, `avx2`, or torch's own word for another processor; of the CPU.

    What torch or oneDNN are told not to use, by ATEN_CPU_CAPABILITY or ONEDNN_MAX_CPU_ISA, does not count.
    """
    return classify(
        torch.backends.cpu.get_cpu_capability(),
        amx=torch.cpu._is_amx_tile_supported(),
        bf16=torch.cpu._is_avx512_bf16_supported(),
        most=os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
    )


def classify(capability: str, amx: bool, bf16: bool, most: str) -> str:
    """Args:
    capability: torch's, such as `AVX2`.
    amx, bf16: whether the processor has AMX, and products of bf16 in AVX-512.
    most: the highest instruction set that oneDNN may use, or empty.
    """
    most = most.upper()
    if not capability.startswith("AVX512"):
        return capability.lower()
    if amx and (not most or most == "DEFAULT" or "AMX" in most):
        return "amx"
    if bf16 and (not most or most == "DEFAULT" or any(part in most for part in ("AMX", "BF16", "FP16"))):
        return "avx512_bf16"
    return "avx512"


if __name__ == "__main__":
    print(json.dumps({"class": machine_class(), "fp32": rate(torch.float32), "bf16": rate(torch.bfloat16)}))
