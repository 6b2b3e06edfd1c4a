"""One optimiser step: accumulate, check, clip, update.

Dropout draws from torch's global generator, which is seeded before every micro-batch from (seed, step, micro-batch);
so no generator's state is ever saved, and a resumed step drops the same units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.architectures.protocols import Output
from manyheads.seeding import derive_seed
from manyheads.training.memory import Memory
from manyheads.training.nonfinite import Fault, locate, locate_in_state, total_of
from manyheads.training.objective import Batch
from manyheads.training.settings import RunConfig

__all__ = ["StepResult", "Stepper"]


@dataclass(frozen=True)
class StepResult:
    """Sums over the step's target tokens. fault: why there was no update, or None."""

    loss_sum: float
    nll_sum: float
    num_tokens: int
    grad_norm: float
    fault: Fault | None = None


class Stepper:
    """Takes optimiser steps with `model`.

    Args:
        model: `forward(batch, state, label_smoothing=..., chunk_tokens=...)` gives an `Output`.
        optimiser: its groups' `lr` is set at each step.
        config: seed, precision, clipping, smoothing.
        device: where the model is.
        memory: what the model remembers from step to step; a step that is not taken makes it forget.
        begin: (rows, seed) -> what a micro-batch goes on from where there is no memory; None: from nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        config: RunConfig,
        device: torch.device,
        memory: Memory | None = None,
        begin: Callable[[int, int], Any] | None = None,
    ) -> None:
        self._model = model
        self._optimiser = optimiser
        self._config = config
        self._device = device
        self._memory = Memory() if memory is None else memory
        self._begin = begin
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def autocast(self) -> AbstractContextManager[object]:
        """bf16 products over float32 weights, if the config asks for it."""
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._config.precision == "bf16")

    def take(self, batches: Sequence[Batch], step: int, learning_rate: float) -> StepResult:
        """Update the model on all micro-batches of a step, unless loss, gradients, weights or moments are not finite.

        The loss of every micro-batch is divided by the target tokens of all of them, so that the split does not matter.
        """
        self._model.train()
        self._optimiser.zero_grad(set_to_none=True)
        num_tokens = max(sum(batch.num_target_tokens() for batch in batches), 1)
        losses, nlls = [], []
        states = {}
        for micro, batch in enumerate(batches):
            if len(batch.sample_ids):
                output = self._forward(batch, step, micro)
                (output.loss_sum / num_tokens).backward()  # type: ignore[no-untyped-call]
                losses.append(output.loss_sum.detach())
                nlls.append(output.nll_sum.detach())
                states[micro] = output.state
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        state = total_of(self._parameters, self._optimiser)
        sums = torch.stack(
            [torch.stack(losses).sum(), torch.stack(nlls).sum(), norm, state]
        ).tolist()  # one wait for the device
        loss_sum, nll_sum, grad_norm, _ = sums
        fault = None if all(map(math.isfinite, sums)) else self._find_fault(batches, step, loss_sum, grad_norm)
        if fault is None:
            self._update(norm, learning_rate)
            self._memory.keep(states)
        else:
            self._memory.forget()
        return StepResult(loss_sum, nll_sum, num_tokens, grad_norm, fault)

    def _forward(self, batch: Batch, step: int, micro: int) -> Output:
        state = self._memory.of(micro)
        if state is None and self._begin is not None:
            state = self._begin(len(batch.sample_ids), derive_seed(self._config.seed, "hashes", step, micro))
        torch.manual_seed(derive_seed(self._config.seed, "dropout", step, micro))
        settings = self._config.training
        options: dict[str, Any] = {"r_drop": settings.r_drop} if settings.r_drop else {}
        if settings.num_sampled:
            options["num_sampled"] = settings.num_sampled
        with self.autocast():
            output: Output = self._model(
                batch.to(self._device),
                state,
                label_smoothing=settings.label_smoothing,
                chunk_tokens=settings.chunk_tokens,
                **options,
            )
        return output

    def _update(self, norm: Tensor, learning_rate: float) -> None:
        if self._config.optimiser.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._config.optimiser.clip_norm, norm)
        for group in self._optimiser.param_groups:
            group["lr"] = learning_rate * group.get("rate_scale", 1.0)
        self._optimiser.step()

    def _find_fault(self, batches: Sequence[Batch], step: int, loss_sum: float, grad_norm: float) -> Fault | None:
        sample_ids = [batch.sample_ids.tolist() for batch in batches]
        if math.isfinite(loss_sum) and math.isfinite(grad_norm):
            return locate_in_state(self._model, self._optimiser, step, sample_ids)
        if math.isfinite(loss_sum):
            what = f"the gradient's norm is {grad_norm}"
        else:
            what = f"the loss is {loss_sum}"
        return locate(
            self._model,
            step,
            what,
            sample_ids,
            lambda micro: self._forward(batches[micro], step, micro).loss_sum,
        )
