"""Factors of attention heads, and the sublayer that is left when all heads of a layer are pruned.

Paper: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650, sec. 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyheads.nn.attention.masks import Mask
from manyheads.nn.attention.planned import PlannedKeyValues
from manyheads.nn.attention.state import KeyValueState
from manyheads.nn.shapes import Float

__all__ = ["HeadMasks", "NoHeads", "mask_heads", "of_layers"]


class HeadMasks(NamedTuple):
    """A factor of each head's output, for every attention layer of an encoder-decoder; 1 keeps a head, 0 removes it.

    Shape: one tensor per layer, (heads,), or (batch, heads) with factors of their own for each row. None: all are 1.

    encoder, decoder: self-attention. cross: attention of the decoder to the source.
    """

    encoder: Sequence[Tensor] | None = None
    decoder: Sequence[Tensor] | None = None
    cross: Sequence[Tensor] | None = None


def mask_heads(
    heads: Float[Tensor, "batch heads length width"], head_mask: Tensor | None
) -> Float[Tensor, "batch heads length width"]:
    """Return xi_h x head_h: each head's output times its factor.

        >>> mask_heads(torch.ones(1, 2, 1, 1), torch.tensor([1.0, 0.0])).flatten().tolist()
        [1.0, 0.0]

    Paper: Michel et al. 2019, eq. 1. Symbols: xi = head_mask.
    Args: head_mask: (heads,) or (batch, heads); None: all are 1.
    """
    return heads if head_mask is None else heads * head_mask.to(heads.dtype)[..., None, None]


def of_layers(masks: Sequence[Tensor] | None, num_layers: int) -> Sequence[Tensor | None]:
    """Return one mask per layer; None for each if there are none."""
    return [None] * num_layers if masks is None else masks


class NoHeads(nn.Module):
    """An attention sublayer all of whose heads are pruned: what is left is the residual, and the output's bias.

        >>> NoHeads(d_model=4, head_dim=2)(torch.ones(1, 3, 4))[0].abs().sum().item()
        0.0

    It has the methods of `MultiHeadAttention` that the layers of a Transformer call. Keys and values have no heads.

    Args: d_model, head_dim, value_head_dim: as of the layer before it was pruned. bias: whether the output had one.
    """

    num_heads = 0
    needs_weights = False

    def __init__(self, d_model: int, head_dim: int, value_head_dim: int | None = None, *, bias: bool = True) -> None:
        super().__init__()
        self.head_dim, self.value_head_dim = head_dim, value_head_dim or head_dim
        self.out_proj = nn.Module()
        self.out_proj.register_parameter("bias", nn.Parameter(torch.zeros(d_model)) if bias else None)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        state: KeyValueState | None = None,
        need_weights: bool = False,
        head_mask: Tensor | None = None,
    ) -> tuple[Tensor, KeyValueState | None] | tuple[Tensor, KeyValueState | None, Tensor]:
        """Return the bias at every position, the state, and with `need_weights` weights of no head."""
        if state is not None:
            planned, state = state.plan(query.shape[1])
            planned.write(*self.project_memory(query))
        if not need_weights:
            return self._output(query), state
        k_len = (query if key is None else key).shape[1]
        return self._output(query), state, query.new_zeros(query.shape[0], 0, query.shape[1], k_len)

    def _output(self, x: Tensor) -> Tensor:
        bias = self.out_proj.bias
        return torch.zeros_like(x) if bias is None else bias.to(x.dtype).expand_as(x)  # type: ignore[operator, union-attr]

    def empty_state(self, rows: int, like: Tensor) -> KeyValueState:
        """See `MultiHeadAttention.empty_state`."""
        return KeyValueState.empty(rows, 0, self.head_dim, like, value_dim=self.value_head_dim)

    def step(self, x: Tensor, past: PlannedKeyValues, mask: Mask | None = None) -> Tensor:
        """See `MultiHeadAttention.step`; there is nothing to write to `past`."""
        return self._output(x)

    def step_across(self, x: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        """See `MultiHeadAttention.step_across`."""
        return self._output(x)

    def project_memory(self, key: Tensor, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `MultiHeadAttention.project_memory`: keys and values of no head."""
        rows, k_len = key.shape[:2]
        return key.new_zeros(rows, 0, k_len, self.head_dim), key.new_zeros(rows, 0, k_len, self.value_head_dim)
