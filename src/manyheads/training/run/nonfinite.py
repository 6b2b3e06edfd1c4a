"""Location of a NaN or infinity: samples, module and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.distributed.wrap import local, whole
from manyheads.nn.kernels import policy

_SHOWN = 12


@dataclass(frozen=True)
class Fault:
    """The known facts about a step with a non-finite loss, gradient, weight or moment."""

    step: int
    what: str
    micro_batch: int | None
    sample_ids: list[int]
    module: str | None
    bad_parameters: list[str] = field(default_factory=list)
    bad_gradients: list[str] = field(default_factory=list)
    bad_moments: list[str] = field(default_factory=list)
    rank: int | None = None

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.sample_ids[:_SHOWN]))
        more = f", ... ({len(self.sample_ids)} in all)" if len(self.sample_ids) > _SHOWN else ""
        where = f" of micro-batch {self.micro_batch}" if self.micro_batch is not None else ""
        where += f" on rank {self.rank}" if self.rank is not None else ""
        parts = [f"Step {self.step}: {self.what}, found before the update; sample ids{where}: {shown}{more}."]
        if self.module is not None:
            parts.append(f"First bad module: {self.module}.")
        else:
            parts.append("Running the step again did not show it: suspect the hardware.")
        bad = {"parameters": self.bad_parameters, "gradients": self.bad_gradients, "moments": self.bad_moments}
        for kind, names in bad.items():
            if names:
                rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
                parts.append(f"NaN or infinity in the {kind} of {', '.join(names[:3])}{rest}.")
        return " ".join(parts)


@torch.no_grad()
def total_of(parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer) -> Tensor:
    """Return a number, (), that is not finite if any weight or moment is not, whether the step uses it or not.

    For sharded tensors it covers this rank's shards. A plain sum is the cheapest operation that reads all values (a
    fifth of the time of a norm), and non-finite values cannot cancel.
    """
    kept = [local(parameter) for parameter in parameters]
    for parameter in parameters:
        values = optimiser.state.get(parameter, {}).values()
        kept += [local(value) for value in values if value.shape == parameter.shape]
    if policy.saves_launches(kept[0].device):
        # Not the Euclidean norm, which is infinite for finite numbers such as 1e20.
        return torch.stack(torch._foreach_norm(kept, torch.inf)).amax()
    # Sum all vectors together: a call for each would take longer than the computation.
    vectors = [value for value in kept if value.dim() == 1]
    sums = [value.sum() for value in kept if value.dim() != 1]
    return torch.stack([*sums, *([torch.cat(vectors).sum()] if vectors else [])]).sum()


def moments_of(model: nn.Module, optimiser: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Return the optimiser's tensors of each parameter, as (`name (moment)`, tensor). A collective operation if
    sharded.
    """
    return [
        (f"{name} ({key})", whole(value))
        for name, parameter in model.named_parameters()
        for key, value in optimiser.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    ]


def locate_in_state(
    model: nn.Module, kept: Sequence[tuple[str, Tensor]], step: int, sample_ids: Sequence[Sequence[int]]
) -> Fault | None:
    """Return the non-finite weights and moments of a step with finite loss and gradients; None if only their sum
    overflowed.

    Args: kept: see `moments_of`.
    """
    named = dict(model.named_parameters())
    parameters = [name for name, parameter in named.items() if not _finite(parameter)]
    moments = [name for name, value in kept if not _finite(value)]
    if not parameters and not moments:
        return None
    model.zero_grad(set_to_none=True)
    first = (parameters or moments)[0].partition(" ")[0]
    what = "a weight is not finite" if parameters else "a moment of the optimiser is not finite"
    everything = [number for ids in sample_ids for number in ids]
    return Fault(step, what, None, everything, first.rpartition(".")[0], parameters, [], moments)


def first_bad(tensors: Mapping[str, Mapping[str, Tensor]]) -> str | None:
    """Return the first non-finite tensor of a checkpoint, as `file: name`."""
    bad = (
        f"{stem}: {name}" for stem, group in tensors.items() for name, tensor in group.items() if not _finite(tensor)
    )
    return next(bad, None)


def locate(
    model: nn.Module,
    step: int,
    what: str,
    sample_ids: Sequence[Sequence[int]],
    run_micro_batch: Callable[[int], Tensor],
) -> Fault:
    """Compute each micro-batch of a failed step again and check every module until one shows the fault.

    Args:
        model: its gradients are those of the failed step; they are deleted.
        step: number of the step.
        what: "the loss is nan" or similar.
        sample_ids: of every micro-batch.
        run_micro_batch: computes the forward pass of one micro-batch with the same dropout as before; returns the loss.
    """
    named = dict(model.named_parameters())
    parameters = [name for name, parameter in named.items() if not _finite(parameter)]
    gradients = [
        name for name, parameter in named.items() if parameter.grad is not None and not _finite(parameter.grad)
    ]
    for index, ids in enumerate(sample_ids):
        if not ids:
            continue
        model.zero_grad(set_to_none=True)
        module, loss = _watch(model, lambda number=index: run_micro_batch(number))  # type: ignore[misc]
        if module is None and not _finite(loss):
            module = "the head (every module before it is finite)"
        if module is None:
            loss.backward()  # type: ignore[no-untyped-call]
            module = _first_in_backward(named)
        if module is not None:
            model.zero_grad(set_to_none=True)
            return Fault(step, what, index, list(ids), module, parameters, gradients)
    model.zero_grad(set_to_none=True)
    everything = [number for ids in sample_ids for number in ids]
    return Fault(step, what, None, everything, None, parameters, gradients)


def _watch(model: nn.Module, run: Callable[[], Tensor]) -> tuple[str | None, Tensor]:
    """Return the first module that ends with a non-finite value: the innermost, since hooks run when modules end."""
    found: list[str] = []

    def hook_for(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and not all(map(_finite, _tensors(output))):
                found.append(f"{name} ({type(module).__name__})")

        return hook

    handles = [module.register_forward_hook(hook_for(name)) for name, module in model.named_modules() if name]
    try:
        loss = run()
    finally:
        for handle in handles:
            handle.remove()
    return (found[0] if found else None), loss


def _first_in_backward(named: Mapping[str, nn.Parameter]) -> str | None:
    """Return the last parameter in forward order with a non-finite gradient: the first in the backward pass."""
    bad = [name for name, parameter in named.items() if parameter.grad is not None and not _finite(parameter.grad)]
    return f"{bad[-1].rpartition('.')[0] or bad[-1]} (in the backward pass)" if bad else None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _finite(tensor: Tensor) -> bool:
    # The sum of finite numbers may overflow; it takes a fifth of the time.
    return not tensor.is_floating_point() or bool(tensor.sum().isfinite()) or bool(torch.isfinite(tensor).all())
