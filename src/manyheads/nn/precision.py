"""The type of the residual stream under autocast."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["low_precision"]


def low_precision(x: Tensor) -> Tensor:
    """Return x in autocast's type while autocast is on, otherwise x.

    Called once at the start of a stack, it keeps the whole residual stream in bfloat16. Otherwise every sum with a
    float32 embedding would be promoted, and each layer would cast twice. Positions are added in float32, before this.
    """
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
