"""Removal of attention heads: a smaller model that computes what the whole one computes without these heads.

Paper: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar, cast

import torch
from torch import nn

from manyheads.architectures.head_names import Head, all_heads, kept_heads, prunable
from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.catalogue import build_model
from manyheads.errors import RequestError
from manyheads.extras.inspect.head_scores import attention_layers, check_heads

__all__ = ["prune"]

Model = TypeVar("Model", bound=Seq2Seq | LanguageModel)

# The axis of heads in each parameter of an attention module, by the first part of its name; out_proj has it in its
# weight only.
_AXES = {
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "out_proj": 1,
    "score": 0,
    "relative_bias": 0,
    "position_proj": 0,
    "content_bias": 0,
    "position_bias": 0,
    "distance_embedding": 1,
    "distance_bias": 1,
}


@torch.no_grad()
def prune(model: Model, removed: Collection[Head]) -> Model:
    """Return a smaller model without these heads; its weights are copies.

    It computes what `model` computes with `masks_without(model, removed)`, up to rounding. The width of the heads stays
    as it was.

    Raises: RequestError: heads of this architecture cannot be removed, one does not exist, none is named, or a layer
        would have none left.
    """
    config = prunable(model.config)
    check_heads(removed, set(all_heads(config)))
    if not removed:
        raise RequestError("no head is removed, so the model would stay as it is; name at least one.")
    kept = kept_heads(config, removed)
    for kind, layers in kept.items():
        for layer, numbers in enumerate(layers):
            if not numbers:
                raise RequestError(
                    f"all heads of {Head(kind, layer, 0).layer_name} would be removed; keep at least one of each layer."
                )
    smaller: Model = build_model(config.with_heads({kind: tuple(map(len, layers)) for kind, layers in kept.items()}))
    smaller.to(next(model.parameters()).device)
    inside: set[int] = set()
    for kind, names in attention_layers(model).items():
        for name, numbers in zip(names, kept[kind], strict=True):
            old = model.get_submodule(name)
            _copy_heads(old, smaller.get_submodule(name), numbers)
            inside |= {id(parameter) for parameter in old.parameters()}
    own = dict(smaller.named_parameters())
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            own[name].copy_(parameter)
    smaller.train(model.training)
    return smaller


def _copy_heads(old: nn.Module, new: nn.Module, kept: Sequence[int]) -> None:
    """Copy the weights of some heads into a smaller attention module of the same kind."""
    before = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        if name == "out_proj.bias":  # of all heads together
            parameter.copy_(before[name])
            continue
        axis = _AXES[name.partition(".")[0]]
        shape = before[name].shape
        by_head = before[name].view(*shape[:axis], cast(int, old.num_heads), -1, *shape[axis + 1 :])
        chosen = by_head.index_select(axis, torch.tensor(kept, device=parameter.device))
        parameter.copy_(chosen.flatten(axis, axis + 1))
