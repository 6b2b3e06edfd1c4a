"""Access to attention weights and buckets. Layers return them only within `observe`.

`attentions_of` and `buckets_of` take those of a whole model, in the shape that other libraries and viewers use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
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


_LAYER = re.compile(r"(?:^|\.)(?:(encoder|decoder)[._])?layers\.(\d+)\.([\w.]+)$")


class Attentions(NamedTuple):
    """One tensor per layer and stack; a stack that the model does not have is empty.

    Shape: (batch, heads, q_len, k_len) each.

    encoder: self-attention of the source. decoder: self-attention of the target, or of a language model, whose k_len
    includes memory. cross: attention of the target to the source.
    """

    encoder: tuple[Tensor, ...] = ()
    decoder: tuple[Tensor, ...] = ()
    cross: tuple[Tensor, ...] = ()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return shown_as("attentions")(self)


def attentions_of(model: nn.Module, *inputs: Any, **options: Any) -> Attentions:
    """Return all attention weights of one forward pass, before dropout, as Hugging Face's `output_attentions` does.

        found = attentions_of(model, source, source_lengths, target)    # the arguments of `model.log_probs`
        bertviz.head_view(found.cross, ...)                             # or any viewer of (batch, heads, q_len, k_len)

    Works with any model that has `log_probs` and whose attention layers are in `layers`, or in `encoder.layers` and
    `decoder.layers` (or `encoder_layers` and `decoder_layers`). Weights of padding keys are zero; rows of padding
    queries are undefined. The model is not changed; no gradients are kept.

    Args:
        model: in evaluation mode, unless the inputs of later layers should include dropout.
        inputs, options: of `model.log_probs`.

    Cost: q_len x k_len numbers per head, layer and sequence, which models otherwise do not store.
    """
    return by_stack(_observed(model, "weights", inputs, options))


def by_stack(observed: Mapping[str, Tensor]) -> Attentions:
    """Return the weights of layers, which are named as in a model, by their stacks."""
    stacks: dict[str, dict[int, Tensor]] = {"encoder": {}, "decoder": {}, "cross": {}}
    for name, weights in observed.items():
        found = _LAYER.search(name)
        if found is None:
            continue
        stack = "cross" if "cross" in found[3] else found[1] or "decoder"
        stacks[stack][int(found[2])] = weights
    return Attentions(**{name: tuple(layers[index] for index in sorted(layers)) for name, layers in stacks.items()})


def buckets_of(model: nn.Module, *inputs: Any, **options: Any) -> dict[str, Tensor]:
    """Return the buckets of every position in hashed attention, in one forward pass.

    Args: as `attentions_of`.
    Returns: name of the layer -> (batch, heads, rounds, length), whole numbers; empty if no layer hashes. Padding is in
        a separate bucket after the others.
    """
    return _observed(model, "buckets", inputs, options)


def _observed(
    model: nn.Module, what: Literal["weights", "buckets"], inputs: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Tensor]:
    with torch.no_grad(), observe(model, what) as record:
        model.log_probs(*inputs, **options)  # type: ignore[operator]
    found = {name.removeprefix("body."): calls[-1] for name, calls in record.items()}
    # A Reformer may add padding of its own, which is no position of the inputs.
    padding_of = getattr(getattr(model, "config", None), "padding", None)
    if padding_of is None or not (padding := padding_of(inputs[0].shape[1])):
        return found
    places = (..., slice(-padding)) if what == "buckets" else (..., slice(-padding), slice(-padding))
    return {name: tensor[places] for name, tensor in found.items()}
