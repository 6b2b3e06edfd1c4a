"""Where and in which numbers a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import nn

from manyheads.errors import RequestError
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.relative import RelativeAttention
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels.policy import FixedPrecision, measure_precision
from manyheads.nn.linear import Linear, Packed

__all__ = ["Precision", "choose_device", "choose_precision", "inference", "narrow", "pack"]

Precision = Literal["auto", "fp32", "bf16"]


def choose_device(name: str | torch.device = "auto") -> torch.device:
    """The device of that name; `auto` is CUDA if there is one, then MPS, then the CPU.

    Raises: RequestError: no such device here.
    """
    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise RequestError(f"device {name!r} is unknown; use auto, cpu, cuda, cuda:0 ... or mps.") from None
    count = {"cuda": torch.cuda.device_count(), "mps": int(has_mps)}.get(device.type, 1)
    if (device.index or 0) >= count:
        raise RequestError(f"device {name} was asked for, but this machine has {count} such devices; use auto or cpu.")
    return device


def choose_precision(name: str, device: torch.device) -> FixedPrecision:
    """`fp32` or `bf16`: the name itself, or for `auto` what is faster on the device (see `kernels.policy`).

    Raises: RequestError: there is no such precision, or the device has no bf16 products.
    """
    if name == "fp32":
        return "fp32"
    if name not in get_args(Precision):
        raise RequestError(f"precision is {name!r}; use {', '.join(get_args(Precision))}.")
    measured = measure_precision(device)
    if name == "auto":
        return measured.choice
    if not measured.has_bf16:
        raise RequestError(f"precision is bf16, and {device} has no bf16 matrix products; use fp32 or auto.")
    return "bf16"


def narrow(model: nn.Module, precision: FixedPrecision) -> None:
    """For `bf16`, cast the weights of a model's maps in place, once, where autocast would in every call.

    What is computed stays the same to the bit. Tables of embeddings stay as they are, so a head that shares one gets a
    copy. For a model that only runs from now on: what it loses cannot be trained, and `save_pretrained` refuses it.
    """
    if precision != "bf16":
        return
    for module in model.modules():
        if isinstance(module, nn.Linear | LinearHead):
            for name in ("weight", "bias"):
                wide = getattr(module, name)
                if wide is not None:
                    setattr(module, name, nn.Parameter(wide.detach().to(torch.bfloat16), requires_grad=False))


def pack(model: nn.Module) -> None:
    """Keep the weights of a model's maps in oneDNN's layout as well, where that is faster: see `nn.linear.Packed`.

    For a model that only runs from now on, after `narrow`. Weights that are changed later are used as they are then,
    unless it is through `weight.data`: call this again.
    """
    for module in model.modules():
        if isinstance(module, MultiHeadAttention | RelativeAttention):
            maps: tuple[nn.Module, ...] = (module.q_proj, module.k_proj, module.v_proj)
        elif isinstance(module, Linear | LinearHead):
            maps = (module,)
        else:
            continue
        module.packed = Packed(*maps) if Packed.pays(*maps) else None


@contextmanager
def inference(device: torch.device, precision: FixedPrecision) -> Iterator[None]:
    """No gradients; with `bf16` under autocast."""
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        yield
