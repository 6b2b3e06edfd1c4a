"""Attention weights by request: they are computed only while they are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from manyheads.nn.attention.local import LocalSelfAttention, spread_chunks
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.relative import RelativeAttention

__all__ = ["record_attention"]


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
        keep(name, spread_chunks(weights, layer.chunks_before, lengths[name]))

    lengths: dict[str, int] = {}

    def note_length(name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        lengths[name] = inputs[0].shape[-2]

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
