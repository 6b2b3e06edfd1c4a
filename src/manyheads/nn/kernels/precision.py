"""Measures which precision is faster on a device, instead of deciding by the processor's name (decision 017)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from manyheads.errors import ConfigError
from manyheads.nn.kernels.linear import linear
from manyheads.nn.kernels.policy import least_seconds

FixedPrecision = Literal["fp32", "bf16", "tf32"]
"""`tf32`: float32, with products in TF32 (see `policy.tf32_products`). `auto` never chooses it."""
_MEASURED = ("fp32", "bf16")

OVERRIDE = "MANYHEADS_PRECISION"
"""Environment variable: `fp32` or `bf16` replaces the measurement, for tests."""

LEAST_SPEED_UP = 1.3
"""bf16 is chosen if it is at least this many times as fast as fp32, because it rounds to 8 bits and casts also take
time."""

MAX_SECONDS = 0.1
_ROUNDS = 2  # timed products of each size
_FIRST_SIZE, _LAST_SIZE = (64, 256), (2048, 8192)  # rows, and features of input and output, on a CPU
# On a GPU, where the time of small products is that of their launch.
_GPU_SIZE = (4096, 4096)


@dataclass(frozen=True)
class PrecisionMeasurement:
    """The rates of matrix products on a device in both precisions.

    Attributes:
        fp32_gflops: rate of float32 products in 10^9 operations per second; None with an override.
        bf16_gflops: rate of bfloat16 products; 0 if the device has none, None with an override.
        override: the value of the environment variable, or None.
    """

    fp32_gflops: float | None
    bf16_gflops: float | None
    override: FixedPrecision | None = None

    @property
    def bf16_factor(self) -> float | None:
        """Rate of bf16 products divided by the rate of fp32 products; None with an override."""
        if self.fp32_gflops is None or self.bf16_gflops is None:
            return None
        return self.bf16_gflops / self.fp32_gflops

    @property
    def has_bf16(self) -> bool:
        """True if the device has bf16 products, fast or slow."""
        return self.bf16_factor != 0

    @property
    def choice(self) -> FixedPrecision:
        """The precision that `auto` selects on this device."""
        if self.override is not None:
            return self.override
        return "bf16" if (self.bf16_factor or 0.0) >= LEAST_SPEED_UP else "fp32"


def measure_precision(device: torch.device) -> PrecisionMeasurement:
    """Time products of matrices in fp32 and bf16: on a CPU small ones, for at most about 0.1 seconds.

    On a CPU it uses one thread: on a busy machine two threads wait for each other much longer than a product takes.
    On a GPU the products are large ones of one size. The result is cached for the process.

    Raises: ConfigError: the environment variable MANYHEADS_PRECISION has an unknown value.
    """
    asked = os.environ.get(OVERRIDE)
    if not asked:
        return _measure(device)
    if asked not in _MEASURED:
        known = " or ".join(_MEASURED)
        raise ConfigError(f"The environment variable {OVERRIDE} is {asked!r}; set it to {known}, or unset it.")
    return PrecisionMeasurement(None, None, "bf16" if asked == "bf16" else "fp32")


@cache
def _measure(device: torch.device) -> PrecisionMeasurement:
    """Return the best rates at one size, on a CPU the largest for which there is time; repeat while time is left."""
    started = time.perf_counter()
    rows, width = _FIRST_SIZE if device.type == "cpu" else _GPU_SIZE
    fp32 = bf16 = float("inf")
    while True:
        round_started = time.perf_counter()
        fp32 = min(fp32, _seconds(device, torch.float32, rows, width))
        try:
            bf16 = min(bf16, _seconds(device, torch.bfloat16, rows, width))
        except (RuntimeError, NotImplementedError, TypeError):
            break  # this device or build of torch has no such product
        now = time.perf_counter()
        time_left = MAX_SECONDS - (now - started)
        if device.type == "cpu" and (rows, width) != _LAST_SIZE and 8 * (now - round_started) < time_left:
            rows, width = 2 * rows, 2 * width  # 8 times the work
            fp32 = bf16 = float("inf")
        elif now - round_started > time_left:
            break
    work = 2 * rows * width**2 / 1e9
    return PrecisionMeasurement(work / fp32, work / bf16)


def _seconds(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> float:
    """Return the shortest time of a product in seconds; other programs on the machine can only make it longer."""
    x = torch.ones(rows, width, device=device, dtype=dtype)
    weight = torch.ones(width, width, device=device, dtype=dtype)
    [seconds] = least_seconds(lambda: _wait_for(device, linear(x, weight)), rounds=_ROUNDS)
    return seconds


def _wait_for(device: torch.device, product: Tensor) -> None:
    waits: dict[str, Callable[[], None]] = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}
    if device.type in waits:
        waits[device.type]()
