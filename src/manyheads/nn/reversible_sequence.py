"""Reversible layers built from any modules, for your own models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from manyheads.nn.kernels.reversible import through_sublayers
from manyheads.nn.shapes import Float


class ReversibleSequence(nn.Module):
    """Layers of two modules each, F and G. The backward pass stores two streams, whatever the number of layers.

        >>> from manyheads.nn import FeedForward, MultiHeadAttention
        >>> layers = [(MultiHeadAttention(16, 4), FeedForward(16, 64)) for _ in range(3)]
        >>> y1, y2 = ReversibleSequence(layers)(torch.randn(2, 5, 16), torch.randn(2, 5, 16))
        >>> y1.shape, y2.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 16]))

    Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 3, eq. 7: y1 = x1 + F(x2), y2 = x2 + G(y1).
    Args:
        layers: pairs of modules that map a stream to one of the same shape; of a tuple the first element is used.
        reversible: False: ordinary backpropagation, for comparison.

    torch.compile produces one graph without gradients, or with `reversible=False`; otherwise use `fullgraph=False`.
    Cost: see `nn.reversible.through_sublayers`: the backward pass computes every F and G once more.
    """

    def __init__(self, layers: Iterable[tuple[nn.Module, nn.Module]], *, reversible: bool = True) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(_Added(module) for layer in layers for module in layer)
        self.reversible = reversible

    def forward(
        self, x1: Float[Tensor, "batch length d_model"], x2: Float[Tensor, "batch length d_model"]
    ) -> tuple[Float[Tensor, "batch length d_model"], Float[Tensor, "batch length d_model"]]:
        """Return both streams after all layers."""
        return through_sublayers(self.sublayers, x1, x2, reversible=self.reversible)


class _Added(nn.Module):
    """A module as `nn.reversible.Sublayer`."""

    chunk_len = 0

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, x: Tensor, context: Any, shared: tuple[Tensor, ...], kept: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        out = self.module(x)
        return (out[0] if isinstance(out, tuple) else out), ()
