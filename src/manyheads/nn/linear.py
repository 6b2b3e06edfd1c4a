"""The linear layer as a module."""

from __future__ import annotations

from torch import Tensor, nn

from manyheads.nn.kernels.linear import READABLE, Packed, linear_by
from manyheads.nn.shapes import Float

__all__ = ["Linear", "initialise"]


class Linear(nn.Linear):
    """`nn.Linear`, with the same parameters and results, computed by `kernels.linear`.

    >>> Linear(16, 32)(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 32])
    """

    packed: Packed | None = None

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        return linear_by(self, x)


READABLE.add(Linear)


def initialise(*maps: nn.Linear) -> None:
    """Initialise weights with Xavier-uniform, biases with zero."""
    for one in maps:
        nn.init.xavier_uniform_(one.weight)
        if one.bias is not None:
            nn.init.zeros_(one.bias)
