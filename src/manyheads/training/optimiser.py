"""Adam and AdamW: fused where the device has it, decay on matrices alone, moments saved by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.errors import CheckpointError
from manyheads.training.settings import OptimiserSettings

__all__ = ["build_optimiser", "load_optimiser_tensors", "optimiser_tensors", "split_by_decay"]

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def split_by_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that decay (matrices of maps) and those that do not (embeddings, learned positions, norms, biases).

    A matrix that is an embedding anywhere is one everywhere, a tied output matrix included.
    """
    tables = {id(parameter) for module in model.modules() if _is_table(module) for parameter in module.parameters()}
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for parameter in model.parameters():
        decays = parameter.ndim >= 2 and id(parameter) not in tables
        (decayed if decays else spared).append(parameter)
    return decayed, spared


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or type(module).__name__.endswith("Positions")


def build_optimiser(model: nn.Module, settings: OptimiserSettings) -> torch.optim.Optimizer:
    """An optimiser over all parameters of `model`, on the device where they are."""
    decayed, spared = split_by_decay(model)
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    kind = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
    arguments: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
    }
    groups = [group for group in groups if group["params"]]
    try:
        return kind(groups, fused=True, **arguments)
    except RuntimeError:  # this device or build has no fused kernel
        return kind(groups, **arguments)


def optimiser_tensors(optimiser: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The moments and step counts, as `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`."""
    tensors = {}
    for name, parameter in named.items():
        state = optimiser.state.get(parameter, {})
        for key, value in state.items():
            tensors[f"{key}.{name}"] = value
    return tensors


def load_optimiser_tensors(
    optimiser: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Put back what `optimiser_tensors` gave.

    Raises: CheckpointError: a name or shape does not belong to this model.
    """
    states: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        key, _, name = full_name.partition(".")
        if key not in _MOMENTS or name not in named:
            raise CheckpointError(f"The optimiser's file has {full_name!r}, which this model has no parameter for.")
        parameter = named[name]
        if key != "step" and tensor.shape != parameter.shape:
            raise CheckpointError(
                f"The optimiser's {full_name!r} has shape {tuple(tensor.shape)},"
                f" the parameter {tuple(parameter.shape)}."
            )
        states.setdefault(name, {})[key] = tensor
    for name, state in states.items():
        if state.keys() != set(_MOMENTS):
            raise CheckpointError(f"The optimiser's file lacks a moment of {name!r}.")
        parameter = named[name]
        moved = {key: torch.empty_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
        for key, buffer in moved.items():
            buffer.copy_(state[key])
        # A fused or capturable optimiser counts steps on the device, the plain one on the CPU.
        on_device = any(group.get("fused") or group.get("capturable") for group in optimiser.param_groups)
        count = state["step"].to(parameter.device if on_device else "cpu", copy=True)
        optimiser.state[parameter] = {"step": count, **moved}
