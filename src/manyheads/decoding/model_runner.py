"""A model that is ready for inference: on a device, in a precision, with or without compiled steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from torch import nn

from manyheads.catalogue import ARCHITECTURES, MODEL_TASKS, ModelTask
from manyheads.decoding.compiled import CompiledSteps
from manyheads.decoding.device import (
    Precision,
    choose_device,
    choose_precision,
    inference,
    narrow,
    on_cpu_by_default,
    pack,
)
from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.models.hub import resolve_model_path
from manyheads.models.pretrained import read_config
from manyheads.text.of_folder import has_tokenizer

M = TypeVar("M")


class ModelRunner(Generic[M]):
    """A model in evaluation mode. Translators into several languages share one, so that they move together.

    Args:
        model: a `Searchable` or a `LanguageModel`; a module is moved to the device.
        device: `auto` chooses one.
        precision: see `device.choose_precision`.
        compile_steps: compile the steps of a search.
        plain: compute with torch's own operations alone; see `kernels.policy.fast`.

    Attributes: steps: the model, or `CompiledSteps` of it.

    Raises: RequestError: no such device or precision, or the steps cannot be compiled on this machine.
    """

    def __init__(
        self,
        model: M,
        device: str | torch.device,
        precision: Precision,
        *,
        compile_steps: bool = False,
        plain: bool = False,
    ) -> None:
        self.device = choose_device(device)
        self.precision = choose_precision(precision, self.device)
        self.plain = plain
        if plain and compile_steps:
            raise RequestError(
                "plain computes with torch's own operations alone, not with compile_steps; leave one out."
            )
        self.model = model
        if isinstance(model, nn.Module):
            model.to(self.device).eval()
        self.steps: Any = CompiledSteps(model) if compile_steps else model  # type: ignore[arg-type]

    def prepare_weights(self) -> None:
        """Cast the weights to the precision and pack them, of a model that was loaded only to run here.

        With bf16 the model cannot be trained or saved afterwards; see `device.narrow` and `device.pack`.
        """
        assert isinstance(self.model, nn.Module)
        with on_cpu_by_default():
            narrow(self.model, self.precision)
            if not self.plain:
                pack(self.model)

    @property
    def is_compiled(self) -> bool:
        return isinstance(self.steps, CompiledSteps)

    def to(self, device: str | torch.device) -> None:
        """Move the model. Raises: RequestError: there is no such device, or it has no products in this precision."""
        chosen = choose_device(device)
        choose_precision(self.precision, chosen)
        if isinstance(self.model, nn.Module):
            self.model.to(chosen)
            if not self.plain:
                with on_cpu_by_default():
                    pack(self.model)  # the copies of weights in a faster layout belong to a device
        self.device = chosen
        if self.is_compiled:
            self.steps = CompiledSteps(self.model)  # type: ignore[arg-type]

    def inference(self) -> AbstractContextManager[None]:
        """Disable gradients and compute in the precision within the block."""
        return inference(self.device, self.precision, plain=self.plain)


class RunsModel(Generic[M]):
    """The common part of `Translator`, `Generator` and `RunsEncoder`: an object with a model that runs."""

    runner: ModelRunner[M]

    @property
    def model(self) -> M:
        return self.runner.model

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def precision(self) -> str:
        return self.runner.precision

    def to(self, device: str | torch.device) -> Self:
        """Move the model to another device. Returns: this object. Raises: RequestError: see `ModelRunner.to`."""
        self.runner.to(device)
        return self


def model_folder(path: str | Path, task: ModelTask, revision: str | None = None) -> Path:
    """Return the folder of a model for this task, with its tokenizer.

    Args:
        path: a model folder, a run folder, or `owner/name` on the Hugging Face hub.
        task: as in `ARCHITECTURES`.

    Raises: ModelFileError: there is no such folder, the model is for another task, or it has no tokenizer.
    """
    folder = resolve_model_path(path, revision=revision)
    architecture = read_config(folder).architecture
    if (its_task := ARCHITECTURES[architecture].task) != task:
        raise ModelFileError(f"{folder} holds a {architecture}, which {MODEL_TASKS[its_task].use}.")
    if not has_tokenizer(folder):
        raise ModelFileError(
            f"{folder} has no tokenizer.json, so it cannot read or write text; save the model with it."
        )
    return folder


def check_same_vocabulary(first: Path, vocabulary: str, other: Path, others: str) -> None:
    """Compare the vocabularies of two models of an ensemble. vocabulary, others: digests of theirs.

    Raises: ConfigError: they differ.
    """
    if others != vocabulary:
        raise ConfigError(
            f"{other} has another vocabulary ({others[:12]}) than {first} ({vocabulary[:12]}), so their probabilities"
            " cannot be averaged; train the models of an ensemble on data with the same tokenizer."
        )
