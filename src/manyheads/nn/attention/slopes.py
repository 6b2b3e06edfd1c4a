"""Slopes: before training, each head subtracts slope x distance from the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.nn.shapes import Float

__all__ = ["PENALTY_UNIT", "local_slopes"]

PENALTY_UNIT = 10.0
"""A trained penalty is stored divided by this: a step moves every number by about the learning rate, and penalties are
larger than the weights for which learning rates are chosen."""


def local_slopes(num_heads: int) -> Float[Tensor, " heads"]:
    """Return the slope of each head: what is subtracted from a score per position of distance.

    Slopes are 1/2 to 1/128, evenly spaced in log scale.

    Paper: Press et al. 2022, "Train Short, Test Long" (ALiBi), arXiv:2108.12409, sec. 3. Differs: the paper's slopes of
        n heads are 2^(-8 i / n), so with 4 heads the steepest is 1/4. A local layer has a short window, in which one
        head needs a steeper slope to select the position before its own.
    """
    steepest_first = torch.linspace(1, 7, num_heads, device="cpu")
    return 2.0**-steepest_first if num_heads > 1 else torch.tensor([0.5], device="cpu")
