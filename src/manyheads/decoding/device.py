"""Where and in which numbers a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from manyheads.errors import RequestError

__all__ = ["Precision", "choose_device", "inference"]

Precision = Literal["fp32", "bf16"]


def choose_device(name: str | torch.device = "auto") -> torch.device:
    """The device of that name; `auto` is CUDA if there is one, then MPS, then the CPU.

    Raises: RequestError: no such device here.
    """
    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise RequestError(f"device {name!r} is unknown; use auto, cpu, cuda, cuda:0 ... or mps.") from None
    count = {"cuda": torch.cuda.device_count(), "mps": int(has_mps)}.get(device.type, 1)
    if (device.index or 0) >= count:
        raise RequestError(f"device {name} was asked for, but this machine has {count} such devices; use auto or cpu.")
    return device


@contextmanager
def inference(device: torch.device, precision: Precision) -> Iterator[None]:
    """No gradients; with `bf16` under autocast."""
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        yield
