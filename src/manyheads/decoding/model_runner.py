"""A model that is ready for inference: on a device, in a precision, with or without compiled steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from torch import nn

from manyheads.architectures.pretrained import load
from manyheads.decoding.compiled import CompiledSteps
from manyheads.decoding.device import (
    InferencePrecision,
    Precision,
    choose_device,
    choose_precision,
    inference,
    narrow,
    pack,
)

__all__ = ["ModelRunner", "RunsModel", "load_for_inference"]

M = TypeVar("M")


class ModelRunner(Generic[M]):
    """A model in evaluation mode. Translators into several languages share one, so that they move together.

    Args:
        model: a `Searchable` or a `LanguageModel`; a module is moved to the device.
        device: `auto` chooses one.
        precision: see `device.choose_precision`.
        compile_steps: compile the steps of a search.

    Attributes: steps: the model, or `CompiledSteps` of it.

    Raises: RequestError: no such device or precision, or the steps cannot be compiled on this machine.
    """

    def __init__(self, model: M, device: str | torch.device, precision: Precision, *, compile_steps: bool) -> None:
        self.device = choose_device(device)
        self.precision = choose_precision(precision, self.device)
        self.model = model
        if isinstance(model, nn.Module):
            model.to(self.device).eval()
            if self.precision == "int8":
                pack(model, "int8")
        self.steps: Any = CompiledSteps(model) if compile_steps else model  # type: ignore[arg-type]

    @property
    def is_compiled(self) -> bool:
        return isinstance(self.steps, CompiledSteps)

    def to(self, device: str | torch.device) -> None:
        """Move the model. Raises: RequestError: there is no such device, or it has no products in this precision."""
        chosen = choose_device(device)
        choose_precision(self.precision, chosen)
        if isinstance(self.model, nn.Module):
            self.model.to(chosen)
            pack(self.model)  # the copies of weights in a faster layout belong to a device
        self.device = chosen
        if self.is_compiled:
            self.steps = CompiledSteps(self.model)  # type: ignore[arg-type]

    def inference(self) -> AbstractContextManager[None]:
        """Disable gradients and compute in the precision within the block."""
        return inference(self.device, self.precision)


class RunsModel(Generic[M]):
    """The common part of `Translator` and `Generator`: an object with a model that runs."""

    runner: ModelRunner[M]

    @property
    def model(self) -> M:
        return self.runner.model

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def precision(self) -> InferencePrecision:
        return self.runner.precision

    def to(self, device: str | torch.device) -> Self:
        """Move the model to another device. Returns: this object. Raises: RequestError: see `ModelRunner.to`."""
        self.runner.to(device)
        return self


def load_for_inference(
    folder: Path, device: str | torch.device, precision: Precision
) -> tuple[Any, torch.device, InferencePrecision]:
    """Load the model of a folder, with weights in the precision. Returns: the model, its device, its precision.

    Raises: RequestError: no such device or precision. Others: see `pretrained.load`.
    """
    chosen = choose_device(device)
    chosen_precision = choose_precision(precision, chosen)
    model = load(folder, device=chosen)
    narrow(model, chosen_precision)
    pack(model, chosen_precision)
    return model, chosen, chosen_precision
