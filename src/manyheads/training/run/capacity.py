"""A check that a model can fit into memory, made before any of its memory is taken."""

from __future__ import annotations

from typing import Any

import torch

from manyheads.catalogue import build_model
from manyheads.errors import ConfigError
from manyheads.training.run.device import free_memory_bytes
from manyheads.training.run.initial import freeze
from manyheads.training.settings import RunConfig

__all__ = ["check_capacity"]

_GIB = 2**30


def check_capacity(config: RunConfig, model_config: Any, device: torch.device, world: int = 1) -> str:
    """Compare the least memory that training needs with what is free, without building the model.

    Weights always exist, and gradients and one moment of the optimiser for those that are not frozen. Activations and
    a second moment come on top, so a run that passes may still not fit; `train --dry-run` and `--fit` measure all.

    Args:
        config: of the run.
        model_config: of the architecture, with vocabulary sizes filled in.
        device: device of the model. Where the free memory is not reported, nothing is checked.
        world: ranks over which FSDP divides gradients and moments.

    Returns: a warning if the model cannot fit and `training.ignore_memory` is set; otherwise empty.
    Raises: ConfigError: the model cannot fit, or a pattern of `training.freeze` is wrong.
    """
    with torch.device("meta"):
        model = build_model(model_config)
    freeze(model, config.training.freeze)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    parts = world if config.training.parallel == "fsdp" else 1
    averaged = parameters if config.training.ema_decay else 0
    needed = 4 * parameters + 4 * (2 * trained + averaged) // parts
    free = free_memory_bytes(device)
    if free is None or needed <= free:
        return ""
    found = (
        f"the model has {parameters:,} parameters. To train them takes at least {needed / _GIB:,.1f} GiB for"
        f" weights, gradients and the optimiser, but {free / _GIB:,.1f} GiB are free on {device}."
    )
    if config.training.ignore_memory:
        return f"{found[0].upper()}{found[1:]} --force continues; the system may end the process."
    raise ConfigError(
        f"{found} Choose a smaller d_model, d_ff, vocabulary or number of layers, or a device with more memory; --force"
        " tries it nevertheless.",
        fields=("d_model", "d_ff", "num_layers"),
    )
