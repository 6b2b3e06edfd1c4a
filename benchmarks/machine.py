"""What the machine can do: products of square matrices, as a side among the others."""

from __future__ import annotations

import torch
from harness import Step

SIZE = 2048


def products(dtype: str) -> Step:
    """2048 x 2048 by 2048 x 2048, in operations a second. dtype: `bfloat16` or `float32`."""
    left, right = (torch.randn(SIZE, SIZE).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(left)
    return Step(lambda: torch.mm(left, right, out=out), units=2.0 * SIZE**3, warm=3, precision=dtype)
