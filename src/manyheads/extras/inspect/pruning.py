"""Factors of attention heads, and removal of heads: a smaller model that computes what the whole one computes without.

Paper: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from manyheads.architectures.head_names import Head, HeadKind, all_heads, kept_heads, prunable
from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.catalogue import build_model
from manyheads.errors import RequestError, ShapeError

__all__ = ["attention_layers", "masked_heads", "masks_without", "prune"]

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


@contextmanager
def masked_heads(model: nn.Module, factors: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the block, multiply each head's output by its factor: 1 keeps a head, 0 removes it.

        >>> from manyheads.nn import MultiHeadAttention
        >>> attention = MultiHeadAttention(16, 4)
        >>> with masked_heads(attention, {"": torch.tensor([1.0, 0.0, 0.5, 1.0])}):
        ...     out, _ = attention(torch.randn(2, 5, 16))

    Factors may have gradients. Reversible layers give them none; they compute again in the backward pass, which
    therefore belongs in the block.

    Paper: Michel et al. 2019, eq. 1. Symbols: xi = factors.
    Args: factors: by the name of an attention module in the model (as in `named_modules`, `observe`): (heads,), or
        (batch, heads) with factors of their own for each row.

    Raises: RequestError: there is no attention of that name. ShapeError: it has another number of heads; in the block:
        the batch has another number of rows.
    """
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for name, masks in factors.items():
            attention = modules.get(name)
            projection, heads = (getattr(attention, part, None) for part in ("out_proj", "num_heads"))
            if not isinstance(projection, nn.Module) or heads is None:
                raise RequestError(f"there is no attention {name!r} in this model; `named_modules` lists the names.")
            if masks.dim() not in (1, 2) or masks.shape[-1] != heads:
                raise ShapeError(
                    f"factors of shape {tuple(masks.shape)} do not fit the {heads} heads of {name!r}; give ({heads},)"
                    f" or (batch, {heads})."
                )
            handle = projection.register_forward_pre_hook(partial(_masked, masks))
            stack.callback(handle.remove)
        yield


def _masked(factors: Tensor, module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Return the merged heads, (batch, q_len, heads x head_dim), times their factors."""
    [merged] = inputs
    if factors.dim() == 2 and len(factors) != len(merged):
        raise ShapeError(f"factors of {len(factors)} rows do not fit a batch of {len(merged)} rows.")
    heads = merged.reshape(*merged.shape[:-1], factors.shape[-1], -1)
    return (heads * factors.to(merged.dtype)[..., None, :, None]).flatten(-2)


def attention_layers(model: Seq2Seq | LanguageModel) -> dict[HeadKind, list[str]]:
    """Return the names of the attention modules of all layers, by kind, in the order of `config.heads_by_layer`.

    Raises: RequestError: heads of this architecture cannot be masked.
    """
    prunable(model.config)
    names = {id(module): name for name, module in model.named_modules()}
    layers: dict[HeadKind, list[nn.Module]] = cast(Any, model.body).attention_layers()
    return {kind: [names[id(module)] for module in modules] for kind, modules in layers.items()}


def masks_without(
    model: Seq2Seq | LanguageModel, removed: Collection[Head] = (), *, rows: int | None = None
) -> dict[str, Tensor]:
    """Return factors for `masked_heads`: 0 for these heads, 1 for all others, in the order of `all_heads`.

    Args: rows: of a batch in which each row has factors of its own; None: one factor for all.

    Raises: RequestError: heads of this architecture cannot be masked, or one does not exist.
    """
    config, device = prunable(model.config), next(model.parameters()).device
    _check(removed, set(all_heads(config)))
    factors: dict[str, Tensor] = {}
    for kind, names in attention_layers(model).items():
        for layer, (name, count) in enumerate(zip(names, config.heads_by_layer()[kind], strict=True)):
            kept = [float(Head(kind, layer, number) not in removed) for number in range(count)]
            mask = torch.tensor(kept, device=device)
            factors[name] = mask if rows is None else mask.expand(rows, -1).clone()
    return factors


@torch.no_grad()
def prune(model: Model, removed: Collection[Head]) -> Model:
    """Return a smaller model without these heads; its weights are copies.

    It computes what `model` computes with `masks_without(model, removed)`, up to rounding. The width of the heads stays
    as it was.

    Raises: RequestError: heads of this architecture cannot be removed, one does not exist, none is named, or a layer
        would have none left.
    """
    config = prunable(model.config)
    _check(removed, set(all_heads(config)))
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


def _check(removed: Collection[Head], known: Collection[Head]) -> None:
    for head in removed:
        if head not in known:
            raise RequestError(f"there is no head {head}; `all_heads(model.config)` lists those that the model has.")
