"""Access to attention weights and buckets. Layers return them only within `observe`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

from torch import Tensor, nn

from manyheads.catalogue import shown_as


class Observed(dict[str, list[Tensor]]):
    """What `observe` collects: name of a layer -> a tensor for each call. It is printed as a list of shapes."""

    _repr_mimebundle_ = shown_as("observed")

    def __repr__(self) -> str:
        shapes = {name: [*dict.fromkeys(tuple(one.shape) for one in tensors)] for name, tensors in self.items()}
        calls = [f"{name!r}: {len(self[name])} of shape {', '.join(map(str, of))}" for name, of in shapes.items()]
        return f"Observed({', '.join(calls)})"


@contextmanager
def observe(module: nn.Module, what: Literal["weights", "buckets"] = "weights") -> Iterator[Observed]:
    """Collect the attention weights, or the buckets, of every layer below `module`, one entry per call.

        >>> import torch
        >>> from manyheads.nn import MultiHeadAttention
        >>> model = nn.ModuleDict({"self_attn": MultiHeadAttention(16, 4)})
        >>> with observe(model) as weights:
        ...     out, _ = model["self_attn"](torch.randn(2, 5, 16))
        >>> weights["self_attn"][0].shape  # (batch, heads, q_len, k_len)
        torch.Size([2, 4, 5, 5])

    Args: what: `weights`: before dropout; `buckets` of layers that hash: (batch, heads, rounds, length).

    The module is left as it was, also after an error.
    """
    record = Observed()

    def keep(name: str, tensor: Tensor) -> None:
        record.setdefault(name, []).append(tensor.detach())

    hook = f"{what}_hook"
    layers = {name: layer for name, layer in module.named_modules() if hasattr(layer, hook)}
    before = {name: getattr(layer, hook) for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            setattr(layer, hook, partial(keep, name))
        yield record
    finally:
        for name, layer in layers.items():
            setattr(layer, hook, before[name])
