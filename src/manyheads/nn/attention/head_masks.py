"""Factors of attention heads. They weaken a head, turn it off, or measure how much it matters.

Paper: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650, sec. 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from manyheads.errors import ShapeError
from manyheads.nn.shapes import Float

__all__ = ["HeadMasks", "mask_heads", "of_layers"]


class HeadMasks(NamedTuple):
    """A factor of each head's output, for every attention layer of a model; 1 keeps a head, 0 removes it.

        >>> masks = HeadMasks(encoder=[torch.tensor([1.0, 0.0, 1.0])])
        >>> [one.tolist() for one in masks.encoder], masks.cross
        ([[1.0, 0.0, 1.0]], None)

    Shape: one tensor per layer, (heads,), or (batch, heads) with factors of their own for each row. None: all are 1.

    encoder: self-attention of an encoder. decoder: of a decoder or a language model. cross: attention of the decoder to
    the source.
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

    Raises: ShapeError: the mask has another shape.
    """
    if head_mask is None:
        return heads
    if head_mask.shape not in (heads.shape[1:2], heads.shape[:2]):
        raise ShapeError(
            f"a head mask of shape {tuple(head_mask.shape)} does not fit {heads.shape[0]} rows of {heads.shape[1]}"
            f" heads; give ({heads.shape[1]},) or ({heads.shape[0]}, {heads.shape[1]})."
        )
    return heads * head_mask.to(heads.dtype)[..., None, None]


def of_layers(masks: Sequence[Tensor] | None, num_layers: int) -> Sequence[Tensor | None]:
    """Return one mask per layer; None for each if masks is None.

    Raises: ShapeError: there is another number of masks.
    """
    if masks is not None and len(masks) != num_layers:
        raise ShapeError(f"there are {len(masks)} head masks for {num_layers} layers; give one for each.")
    return [None] * num_layers if masks is None else masks
