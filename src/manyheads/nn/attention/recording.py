"""Attention weights by request: they are computed only while somebody is looking."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.relative import RelativeAttention

__all__ = ["record_attention", "spread_chunks"]


@contextmanager
def record_attention(module: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the weights of every attention layer below `module`, one entry a call, before dropout.

        >>> import torch
        >>> model = nn.ModuleDict({"self_attn": MultiHeadAttention(16, 4)})
        >>> with record_attention(model) as weights:
        ...     out, _ = model["self_attn"](torch.randn(2, 5, 16))
        >>> weights["self_attn"][0].shape  # (batch, heads, q_len, k_len)
        torch.Size([2, 4, 5, 5])

    Leaves the module as it was, also after an error.
    """
    record: dict[str, list[Tensor]] = {}

    def keep(name: str, weights: Tensor) -> None:
        record.setdefault(name, []).append(weights.detach())

    def keep_local(name: str, layer: LocalSelfAttention, weights: Tensor) -> None:
        offset = -layer.chunks_before if weights.shape[4] > weights.shape[3] else 0
        keep(name, spread_chunks(weights, offset, lengths[name]))

    lengths: dict[str, int] = {}

    def note_length(name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        lengths[name] = inputs[0].shape[1]

    kinds = (MultiHeadAttention, RelativeAttention, LSHSelfAttention, LocalSelfAttention)
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, kinds)}
    noting = []
    before = {name: layer.weights_hook for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            if isinstance(layer, LocalSelfAttention):
                noting.append(layer.register_forward_pre_hook(partial(note_length, name)))
                layer.weights_hook = partial(keep_local, name, layer)
            else:
                layer.weights_hook = partial(keep, name)
        yield record
    finally:
        for name, layer in layers.items():
            layer.weights_hook = before[name]
        for hook in noting:
            hook.remove()


def spread_chunks(
    weights: Float[Tensor, "batch heads chunks chunk_len seen"], first_offset: int, length: int
) -> Float[Tensor, "batch heads length length"]:
    """Weights of local attention, which knows neighbourhoods alone, on all keys.

    Args: first_offset: of the first chunk that is seen, from the query's own; length: without the last chunk's padding.
    """
    batch, heads, chunks, chunk_len, seen = weights.shape
    numbers = torch.arange(chunks, device=weights.device)[:, None] + first_offset
    numbers = (numbers + torch.arange(seen // chunk_len, device=weights.device)) % chunks
    keys = numbers[..., None] * chunk_len + torch.arange(chunk_len, device=weights.device)
    keys = keys.flatten(1)[:, None].expand(chunks, chunk_len, seen).expand_as(weights)
    spread = weights.new_zeros(batch, heads, chunks, chunk_len, chunks * chunk_len)
    # Beyond the ends a neighbour is another chunk, whose weights there are zero: they add nothing to its own.
    return spread.scatter_add(4, keys, weights).flatten(2, 3)[:, :, :length, :length]
