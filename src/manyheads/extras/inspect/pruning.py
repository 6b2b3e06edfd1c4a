"""Removal of attention heads: a smaller model that computes what the whole one computes without these heads.

Paper: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from manyheads.architectures.head_names import Head, HeadKind, all_heads, kept_heads, prunable
from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.catalogue import build_model
from manyheads.errors import RequestError
from manyheads.nn.attention.head_masks import HeadMasks
from manyheads.nn.attention.no_heads import copy_heads

__all__ = ["attention_layers", "masks_without", "prune"]

Model = TypeVar("Model", bound=Seq2Seq | LanguageModel)


def attention_layers(model: Seq2Seq | LanguageModel) -> dict[HeadKind, list[nn.Module]]:
    """Return the attention modules of all layers, by kind, in the order of `config.heads_by_layer`.

    Raises: RequestError: heads of this architecture cannot be masked.
    """
    prunable(model.config)
    layers: dict[HeadKind, list[nn.Module]] = cast(Any, model.body).attention_layers()
    return layers


def masks_without(
    model: Seq2Seq | LanguageModel, removed: Collection[Head] = (), *, rows: int | None = None
) -> HeadMasks:
    """Return factors of 0 for these heads and of 1 for all others.

    Args: rows: of a batch in which each row has factors of its own; None: one factor for all.

    Raises: RequestError: heads of this architecture cannot be masked, or one does not exist.
    """
    config, like = prunable(model.config), next(model.parameters())
    _check(removed, set(all_heads(config)))
    masks: dict[str, list[Tensor]] = {}
    for kind, counts in config.heads_by_layer().items():
        masks[kind] = []
        for layer, count in enumerate(counts):
            kept = [float(Head(kind, layer, number) not in removed) for number in range(count)]
            factors = torch.tensor(kept, device=like.device)
            masks[kind].append(factors if rows is None else factors.expand(rows, -1).clone())
    return HeadMasks(**masks)


@torch.no_grad()
def prune(model: Model, removed: Collection[Head]) -> Model:
    """Return a smaller model without these heads; its weights are copies.

    It computes what `model` computes with `masks_without(model, removed)`, up to rounding. The width of the heads stays
    as it was. Of a layer without heads the residual is left, and the bias of its output, if it has one.

    Raises: RequestError: heads of this architecture cannot be removed, one does not exist, or none is named.
    """
    config = prunable(model.config)
    _check(removed, set(all_heads(config)))
    if not removed:
        raise RequestError("no head is removed, so the model would stay as it is; name at least one.")
    kept = kept_heads(config, removed)
    smaller: Model = build_model(config.with_heads({kind: tuple(map(len, layers)) for kind, layers in kept.items()}))
    smaller.to(next(model.parameters()).device)
    old, new = attention_layers(model), attention_layers(smaller)
    inside: set[int] = set()
    for kind, layers in kept.items():
        for layer, numbers in enumerate(layers):
            copy_heads(old[kind][layer], new[kind][layer], numbers)
            inside |= {id(parameter) for parameter in old[kind][layer].parameters()}
    own = dict(smaller.named_parameters())
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            own[name].copy_(parameter)
    smaller.train(model.training)
    return smaller


def _check(removed: Collection[Head], known: Collection[Head]) -> None:
    for head in removed:
        if head not in known:
            raise RequestError(f"there is no head {head}; `all_heads(model.config)` lists those that the model has.")
