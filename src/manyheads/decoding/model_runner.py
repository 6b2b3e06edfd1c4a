"""A model that is ready for inference: on a device, in a precision, with or without compiled steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import nn

from manyheads.architectures.encoders import EncoderEnsemble
from manyheads.architectures.hub import resolve_model_path
from manyheads.architectures.pretrained import load, read_config, save_pretrained, unmixed
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
from manyheads.text.of_folder import has_tokenizer
from manyheads.text.tokenizer import Tokenizer

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


class RunsEncoder(RunsModel[M]):
    """The common part of `Classifier` and `ChartParser`: a model that reads one text, and its tokenizer.

    Args:
        model: a composite; it is put into evaluation mode.
        tokenizer: of texts.
        device: the device of the model; `auto` chooses one.
        precision: `fp32`; `bf16` by autocast; `auto`: the faster one of these on the device.

    Attributes: task: of the model, as in `ARCHITECTURES`. ensemble: the class that makes one model of several.

    Raises: RequestError: no such device or precision.
    """

    task: ClassVar[ModelTask]
    ensemble: ClassVar[type[EncoderEnsemble]]

    def __init__(
        self, model: M, tokenizer: Tokenizer, device: str | torch.device = "auto", precision: Precision = "fp32"
    ) -> None:
        self.runner = ModelRunner(model, device, precision)
        self.tokenizer = tokenizer

    @classmethod
    @unmixed
    def from_pretrained(
        cls,
        path: str | Path | Sequence[str | Path],
        device: str | torch.device = "auto",
        precision: Precision = "fp32",
        *,
        revision: str | None = None,
    ) -> Self:
        """Load a model from a model folder, a run folder, or `owner/name` on the Hugging Face hub.

        Several paths are an ensemble, which averages the models' probabilities (see `architectures.encoders`).

        Raises: ModelFileError: a file is missing, damaged or refused, or the model is for another task. ConfigError,
            DataError: the content of a file is invalid, or the models cannot be averaged. RequestError: no such device
            or precision.
        """
        paths = [path] if isinstance(path, str | Path) else list(path)
        if not paths:
            raise ConfigError("an ensemble needs at least one model, but the list of paths is empty.")
        folders = [model_folder(one, cls.task, revision) for one in paths]
        tokenizers = [Tokenizer.load(folder / "tokenizer.json") for folder in folders]
        for folder, tokenizer in zip(folders[1:], tokenizers[1:], strict=True):
            check_same_vocabulary(folders[0], tokenizers[0].digest, folder, tokenizer.digest)
        chosen = choose_device(device)
        choose_precision(precision, chosen)  # its errors come before weights are read
        models: list[Any] = [load(folder, device=chosen) for folder in folders]
        for folder, one in zip(folders, models, strict=True):
            if tokenizers[0].vocab_size > one.config.vocab_size:
                raise ModelFileError(
                    f"{folder} does not fit together: its tokenizer has {tokenizers[0].vocab_size:,} ids, its model"
                    f" {one.config.vocab_size:,}. Copy the folder again."
                )
        model: Any = models[0] if len(models) == 1 else cls.ensemble(models)
        made = cls(model, tokenizers[0], chosen, precision)
        made.runner.prepare_weights()
        return made

    @property
    def models(self) -> list[Any]:
        """The models of the ensemble, or the only model."""
        model: Any = self.model
        return list(model.models)

    def save_pretrained(self, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a model folder. dtype: see `Translator.save_pretrained`.

        Raises: SaveError: it could not be written, or the weights were rounded to bf16. RequestError: this is an
            ensemble.
        """
        model: Any = self.model
        if self.models[0] is not model:
            raise RequestError("an ensemble cannot be saved as one model folder; save each of its models.")
        save_pretrained(model, path, tokenizer=self.tokenizer, task=self.task, dtype=dtype)


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
