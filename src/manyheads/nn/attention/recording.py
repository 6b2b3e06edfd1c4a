"""Attention weights by request: they are computed only while somebody is looking."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

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

    kinds = (MultiHeadAttention, RelativeAttention)
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, kinds)}
    before = {name: layer.weights_hook for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.weights_hook = partial(keep, name)
        yield record
    finally:
        for name, layer in layers.items():
            layer.weights_hook = before[name]
