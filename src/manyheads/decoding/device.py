"""Choice of device and precision for inference."""

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
from manyheads.nn.kernels.linear import Packed
from manyheads.nn.kernels.precision import FixedPrecision, measure_precision
from manyheads.nn.linear import Linear

__all__ = ["Precision", "choose_device", "choose_precision", "inference", "narrow", "pack"]

Precision = Literal["auto", "fp32", "bf16"]


def choose_device(name: str | torch.device = "auto") -> torch.device:
    """Return the device with that name; `auto` is CUDA if available, then MPS, then the CPU.

    Raises: RequestError: this machine has no such device.
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
        raise RequestError(f"device {name} was requested, but this machine has {count} such devices; use auto or cpu.")
    return device


def choose_precision(name: str, device: torch.device) -> FixedPrecision:
    """Return `fp32` or `bf16`: the name itself, or for `auto` the faster one on the device (see `kernels.precision`).

    Raises: RequestError: the precision is unknown, or the device has no bf16 products.
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
    """For `bf16`, cast the weights of a model's linear layers in place once, instead of in every call under autocast.

    The results are identical bit for bit. Embeddings are not cast, so a head that is tied to one gets a copy. Use this
    only for inference: the rounded weights cannot be trained, and `save_pretrained` refuses them.
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
    """Keep a second copy of the weights of linear layers in oneDNN's layout where it is faster: see `nn.linear.Packed`.

    Use this only for inference, after `narrow`. If weights change later, the new values are used; but a change through
    `weight.data` is not detected: call this function again.
    """
    for module in model.modules():
        if isinstance(module, MultiHeadAttention | RelativeAttention):
            maps: tuple[nn.Module, ...] = (module.q_proj, module.k_proj, module.v_proj)
        elif isinstance(module, Linear | LinearHead):
            maps = (module,)
        else:
            continue
        module.packed = Packed(*maps) if Packed.is_worthwhile(*maps) else None


@contextmanager
def inference(device: torch.device, precision: FixedPrecision) -> Iterator[None]:
    """Disable gradients and, for `bf16`, enable autocast."""
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        yield
