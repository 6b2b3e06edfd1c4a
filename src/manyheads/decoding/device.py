"""Choice of device and precision for inference."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import nn

from manyheads.errors import RequestError
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.linear import Packed, Packs
from manyheads.nn.kernels.precision import FixedPrecision, measure_precision

Precision = Literal["auto", "fp32", "bf16", "tf32"]


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
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(has_mps)}.get(device.type)
    if count is None:  # another kind of accelerator, or none at all, such as torch's `meta`
        accelerator = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count() if accelerator and accelerator.type == device.type else 0
    if (device.index or 0) >= count:
        raise RequestError(f"device {name} was requested, but this machine has {count} such devices; use auto or cpu.")
    return device


def choose_precision(name: str, device: torch.device) -> FixedPrecision:
    """Return the precision itself, or for `auto` the faster one of fp32 and bf16 (see `kernels.precision`).

    Raises: RequestError: the precision is unknown or another engine's, or the device has no such products.
    """
    if name == "fp32":
        return "fp32"
    if name == "int8":
        raise RequestError(
            "precision is int8, in which only the engine ctranslate2 computes: for translators that are loaded from a"
            " folder; use fp32, bf16 or auto."
        )
    if name not in get_args(Precision):
        raise RequestError(f"precision is {name!r}; use {', '.join(get_args(Precision))}.")
    if name == "tf32":
        if lack := policy.tf32_lack(device):
            raise RequestError(f"precision is tf32, {lack}.")
        return "tf32"
    measured = measure_precision(device)
    if name == "auto":
        return measured.choice
    if not measured.has_bf16:
        raise RequestError(f"precision is bf16, and {device} has no bf16 matrix products; use fp32 or auto.")
    return "bf16"


def warn_of_slow_bf16(device: torch.device) -> None:
    """Warn on standard error if bf16 products are slower than fp32 ones on this device."""
    factor = measure_precision(device).bf16_factor
    if factor is not None and factor < 1:
        sys.stderr.write(
            f"warning: on this machine ({device}) bf16 matrix products run at {factor:.2g} times the rate of fp32 ones;"
            " --precision fp32 or auto is faster.\n"
        )


def narrow(model: nn.Module, precision: FixedPrecision) -> None:
    """For `bf16`, cast the weights of a model's linear layers in place once, instead of in every call under autocast.

    The results are identical bit for bit. Embeddings are not cast, so a head that is tied to one gets a copy. Use this
    only for inference: the rounded weights cannot be trained, and `save_pretrained` refuses them.
    """
    if precision != "bf16":
        return
    for module in model.modules():
        is_map = isinstance(module, Packs) and module in module.packed_maps()
        if is_map or isinstance(module, nn.Linear):
            for name in ("weight", "bias"):
                wide = getattr(module, name)
                if wide is not None:
                    setattr(module, name, nn.Parameter(wide.detach().to(torch.bfloat16), requires_grad=False))


def pack(model: nn.Module) -> None:
    """Keep a second copy of the weights of linear layers where products with it are faster: see `kernels.linear`.

    Use this only for inference, after `narrow`. If weights change later, the new values are used; but a change through
    `weight.data` is not detected: call this function again.
    """
    with policy.fast():
        for module in model.modules():
            if isinstance(module, Packs):
                maps = module.packed_maps()
                module.packed = Packed(*maps) if Packed.is_worthwhile(*maps) else None


def on_cpu_by_default() -> AbstractContextManager[Any]:
    """Within the block, make tensors whose device is not named on the CPU, whatever `torch.set_default_device` says."""
    try:
        is_cpu = torch.get_default_device().type == "cpu"
    except (AssertionError, RuntimeError):  # a default device that this machine lacks
        is_cpu = False
    return nullcontext() if is_cpu else torch.device("cpu")


@contextmanager
def inference(device: torch.device, precision: FixedPrecision, *, plain: bool = False) -> Iterator[None]:
    """Disable gradients, and compute in the precision. A tensor whose device is not named is made on the CPU.

    Args: plain: compute with torch's own operations alone; see `kernels.policy.fast`.
    """
    casting = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    multiplying = policy.tf32_products(precision == "tf32")
    with on_cpu_by_default(), torch.inference_mode(), policy.fast(not plain), casting, multiplying:
        yield
