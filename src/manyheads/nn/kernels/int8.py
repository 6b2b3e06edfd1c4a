"""Linear maps in 8 bits: Y ~ X W^T + b, with weights quantised once and rows of X quantised in each call.

The product is FBGEMM's, by torch's operations; its sums are exact integers. A weight has 7 bits, with one scale for
each output channel. An input has 8 bits, with one scale for each row, so the result of a row does not depend on the
other rows of its batch (decision 023).
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.linear import Packed
from manyheads.nn.kernels.measuring import mean_gain
from manyheads.nn.shapes import Float

__all__ = ["OVERRIDE", "Int8Measurement", "PackedInt8", "measure_int8"]

OVERRIDE = "MANYHEADS_INT8"
"""Environment variable: `on` or `off` replaces the measurement (for tests)."""

_MOST_WEIGHT, _MOST_X, _ZERO_OF_X = 63, 127, 128
_LEAST_ROW = 1e-30  # a row's largest number is at least this, so that rows of zeros can be divided by it
# Rows, and features of input and output, of the products that are measured: steps of a search with 1 and 4 beams.
_ROWS, _IN_FEATURES, _OUT_FEATURES = (32, 128), 512, 2048


class PackedInt8(Packed):
    """The weights of one map, or of several maps of the same input, in 8 bits; used as `Packed` is.

    Cost: a quarter of the memory of the weights in addition, from the first use on.
    """

    @staticmethod
    def is_worthwhile(*maps: nn.Module) -> bool:
        """Return whether these maps can be one product that is large enough to be faster in 8 bits."""
        weights = Packed.joinable(*maps)
        return weights is not None and policy.quantises(*weights)

    def takes(self, x: Tensor) -> bool:
        """See `Packed.takes`."""
        return policy.uses_int8(x)

    def multiply(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch all_out_features"]:
        """See `Packed.multiply`."""
        weight, bias = self.made()
        rows = x.reshape(-1, x.shape[-1])
        most = rows.abs().amax(-1, keepdim=True).clamp_min_(_LEAST_ROW)
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        found: Tensor = multiply(rows / most, 1 / _MOST_X, _ZERO_OF_X, weight).mul_(most)
        if bias is not None:
            found.add_(bias)
        return found.view(*x.shape[:-1], found.shape[-1])

    def make(self, weight: Tensor, bias: Tensor | None) -> tuple[Any, Tensor | None]:
        """See `Packed.make`."""
        return _quantised(weight), bias


@dataclass(frozen=True)
class Int8Measurement:
    """The speed of products of few rows in 8 bits.

    Attributes:
        factor: rate of int8 products as a multiple of the rate of fp32 products; None if the override decided.
        reason: the end of a sentence that says why int8 is refused here; None: it is not refused.
    """

    factor: float | None
    reason: str | None


def measure_int8() -> Int8Measurement:
    """Multiply small matrices in fp32 and int8 on the CPU, for about 30 ms; the result is cached for the process.

    Raises: ConfigError: the environment variable MANYHEADS_INT8 holds an unknown word.
    """
    asked = os.environ.get(OVERRIDE)
    if asked not in (None, "", "on", "off"):
        raise ConfigError(f"The environment variable {OVERRIDE} is {asked!r}; set it to on or off, or unset it.")
    if not has_int8():
        return Int8Measurement(None, "this processor or this build of torch has no int8 products (FBGEMM)")
    if asked:
        return Int8Measurement(None, None if asked == "on" else f"the environment variable {OVERRIDE} is off")
    factor = _measured_factor()
    slower = f"on this machine int8 matrix products run at {factor:.2g} times the rate of fp32 ones"
    return Int8Measurement(factor, slower if factor <= 1 else None)


@cache
def has_int8() -> bool:
    """Return whether torch has FBGEMM's products here, by computing one."""
    try:
        packed = _quantised(torch.ones(8, 8))
        torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(torch.ones(1, 8), 1.0, 0, packed)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True


@cache
def _measured_factor() -> float:
    plain = nn.Linear(_IN_FEATURES, _OUT_FEATURES, bias=False)
    packed = PackedInt8(plain)
    inputs = [torch.linspace(-1, 1, rows * _IN_FEATURES).view(rows, _IN_FEATURES) for rows in _ROWS]
    return mean_gain(*((partial(F.linear, x, plain.weight), partial(packed.multiply, x)) for x in inputs))


def _quantised(weight: Tensor) -> Any:
    """Return a float32 weight (out, in) in FBGEMM's layout: row r is scale[r] times integers from -63 to 63."""
    most = weight.abs().amax(1).double().clamp_min_(_LEAST_ROW)
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    with warnings.catch_warnings():
        # torch will remove these types of quantised tensors, but has no other product of FBGEMM yet (decision 023).
        warnings.filterwarnings("ignore", message=".*quantize_per_channel", category=UserWarning)
        whole = torch.quantize_per_channel(weight, most / _MOST_WEIGHT, zeros, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(whole, None)
