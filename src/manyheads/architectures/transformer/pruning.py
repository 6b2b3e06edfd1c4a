"""Removal of attention heads: a smaller model that computes what the whole one computes without these heads.

Paper: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.transformer.build import build
from manyheads.architectures.transformer.config import HEAD_KINDS, HeadKind, TransformerConfig
from manyheads.architectures.transformer.model import Transformer
from manyheads.errors import ConfigError, RequestError
from manyheads.nn.attention.head_masks import HeadMasks, NoHeads
from manyheads.nn.attention.multi_head import MultiHeadAttention

__all__ = ["Head", "heads_of", "masks_without", "parse_heads", "prune", "transformer_of"]


class Head(NamedTuple):
    """One attention head. layer, number: from 1, as in `inspect attention`."""

    kind: HeadKind
    layer: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind}.{self.layer}.{self.number}"


def transformer_of(model: object, name: str = "this model") -> Seq2Seq:
    """Return the model, if its heads can be masked and removed.

    Raises: RequestError: it is no encoder-decoder Transformer.
    """
    if not (isinstance(model, Seq2Seq) and isinstance(model.body, Transformer)):
        architecture = getattr(getattr(model, "config", None), "architecture", type(model).__name__)
        raise RequestError(
            f"{name} is a {architecture}; heads can be masked and pruned in a transformer (encoder and decoder) only."
        )
    return model


def heads_of(config: TransformerConfig) -> list[Head]:
    """Return all heads that the model has, stack by stack and layer by layer."""
    layers = {
        "encoder": config.num_encoder_layers,
        "decoder": config.num_decoder_layers,
        "cross": config.num_decoder_layers,
    }
    return [
        Head(kind, layer + 1, number + 1)
        for kind in HEAD_KINDS
        for layer in range(layers[kind])
        for number in range(config.layer_heads(kind, layer))
    ]


def parse_heads(names: Collection[str], config: TransformerConfig) -> list[Head]:
    """Return the named heads: `encoder.1.3` is head 3 of layer 1, `cross.2` all heads of layer 2.

    >>> config = TransformerConfig(num_encoder_layers=1, num_decoder_layers=1, d_model=8, num_heads=2)
    >>> [str(head) for head in parse_heads(["cross.1", "encoder.1.2"], config)]
    ['encoder.1.2', 'cross.1.1', 'cross.1.2']

    Raises: RequestError: a head does not exist.
    """
    known = heads_of(config)
    wanted: set[Head] = set()
    for name in names:
        found = [head for head in known if name in (str(head), f"{head.kind}.{head.layer}")]
        if not found:
            raise RequestError(f"there is no head {name!r}; {_known(config)}")
        wanted.update(found)
    return [head for head in known if head in wanted]


def _known(config: TransformerConfig) -> str:
    layers = {
        kind: [config.layer_heads(kind, layer) for layer in range(count)]
        for kind, count in zip(
            HEAD_KINDS,
            (config.num_encoder_layers, config.num_decoder_layers, config.num_decoder_layers),
            strict=True,
        )
    }
    shown = ", ".join(f"{kind} {' '.join(map(str, counts)) or 'none'}" for kind, counts in layers.items())
    return f"heads are named STACK.LAYER.HEAD from 1 on, as encoder.1.2; the layers have so many: {shown}."


def masks_without(
    config: TransformerConfig, removed: Collection[Head], like: Tensor, *, rows: int | None = None
) -> HeadMasks:
    """Return factors of 0 for these heads and of 1 for all others. rows: of a batch with factors of its own each."""
    gone = set(removed)
    masks: dict[str, list[Tensor]] = {}
    for kind in HEAD_KINDS:
        count = config.num_encoder_layers if kind == "encoder" else config.num_decoder_layers
        masks[kind] = []
        for layer in range(count):
            heads = range(config.layer_heads(kind, layer))
            kept = [float(Head(kind, layer + 1, number + 1) not in gone) for number in heads]
            factors = torch.tensor(kept, dtype=like.dtype, device=like.device)
            masks[kind].append(factors if rows is None else factors.expand(rows, -1).clone())
    return HeadMasks(**masks)


@torch.no_grad()
def prune(model: Seq2Seq, removed: Collection[Head]) -> Seq2Seq:
    """Return a smaller model without these heads; its weights are copies.

    It computes what `model` computes with `masks_without(removed)`, up to rounding. The width of the heads stays as it
    was. A layer without heads keeps the bias of its output, if it has one, and the residual.

    Raises: ConfigError: no head is removed.
    """
    if not removed:
        raise ConfigError("no head is removed, so the model would stay as it is; name at least one.")
    config: TransformerConfig = model.config
    kept: dict[str, list[list[int]]] = {}
    gone = set(removed)
    for kind in HEAD_KINDS:
        count = config.num_encoder_layers if kind == "encoder" else config.num_decoder_layers
        kept[kind] = [
            [
                number
                for number in range(config.layer_heads(kind, layer))
                if Head(kind, layer + 1, number + 1) not in gone
            ]
            for layer in range(count)
        ]
    counts = {f"{kind}_heads": tuple(map(len, layers)) for kind, layers in kept.items()}
    smaller = build(replace(config, **counts))
    smaller.to(next(model.parameters()).device)
    old, new = dict(_attentions(model)), dict(_attentions(smaller))
    inside: set[int] = set()
    for (kind, layer), attention in old.items():
        _copy_attention(attention, new[kind, layer], kept[kind][layer])
        inside |= {id(parameter) for parameter in attention.parameters()}
    own = dict(smaller.named_parameters())
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            own[name].copy_(parameter)
    return smaller.train(model.training)


def _attentions(model: Seq2Seq) -> Iterator[tuple[tuple[HeadKind, int], nn.Module]]:
    """Yield each attention layer with its kind and number from 0."""
    for index, layer in enumerate(model.body.encoder.layers):
        yield ("encoder", index), layer.self_attn
    for index, layer in enumerate(model.body.decoder.layers):
        yield ("decoder", index), layer.self_attn
        yield ("cross", index), layer.cross_attn


def _copy_attention(old: nn.Module, new: nn.Module, kept: list[int]) -> None:
    """Copy the weights of some heads. kept: their numbers from 0 in the old layer."""
    if isinstance(new, NoHeads) or isinstance(old, NoHeads):
        bias = cast(Tensor | None, old.out_proj.bias)
        if bias is not None:
            cast(Tensor, new.out_proj.bias).copy_(bias)
        return
    assert isinstance(old, MultiHeadAttention)
    assert isinstance(new, MultiHeadAttention)
    heads = torch.tensor(kept, device=old.q_proj.weight.device)
    for name in ("q_proj", "k_proj", "v_proj"):
        before, after = getattr(old, name), getattr(new, name)
        after.weight.copy_(before.weight.unflatten(0, (old.num_heads, -1))[heads].flatten(0, 1))
        if before.bias is not None:
            after.bias.copy_(before.bias.unflatten(0, (old.num_heads, -1))[heads].flatten())
    new.out_proj.weight.copy_(old.out_proj.weight.unflatten(1, (old.num_heads, -1))[:, heads].flatten(1))
    if old.out_proj.bias is not None:
        new.out_proj.bias.copy_(old.out_proj.bias)
    if isinstance(old.score, nn.Module) and isinstance(new.score, nn.Module):
        scores: Mapping[str, Tensor] = dict(new.score.named_parameters())
        for name, parameter in old.score.named_parameters():
            scores[name].copy_(parameter[heads])  # each kind of score has a first axis of heads
