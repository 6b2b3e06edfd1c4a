"""The common part of the composites that read a whole text at once and predict something about it, and of ensembles of
them.

Ensembles of translators and of language models: see `ensemble`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn

from manyheads.decoding.model_runner import (
    M,
    ModelRunner,
    Precision,
    RunsModel,
    check_same_vocabulary,
    choose_device,
    choose_precision,
    model_folder,
)
from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.models.ensemble import shortest_limit
from manyheads.models.pretrained import load, save_pretrained, unmixed
from manyheads.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from manyheads.catalogue import ModelTask


class EncoderWithHead(nn.Module):
    """An encoder and its head, the object that is trained, saved, loaded and evaluated."""

    def __init__(self, body: nn.Module, head: nn.Module, config: Any) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.config = config

    def tie_weights(self) -> None:
        """Do nothing: no parameters are shared."""

    def card_text(self) -> str:
        return ""

    @property
    def models(self) -> Sequence[EncoderWithHead]:
        """This model; of an ensemble: its models."""
        return [self]

    @property
    def max_len(self) -> int | None:
        """Maximum length of a text; see the config's `longest_input`."""
        longest: int | None = self.config.longest_input
        return longest


class EncoderEnsemble(nn.Module):
    """Several such models as one: their probabilities are averaged.

    Args: models: at least one; the same model twice counts twice. Sizes and architectures may differ.

    Attributes: config: the first model's. names: fields of a config that are equal in all models.

    Raises: ConfigError: there is no model, or the models do not predict the same names.
    Cost: time and memory are the sums of those of the models.
    """

    names: tuple[str, ...]
    models: Any

    def __init__(self, models: Sequence[EncoderWithHead]) -> None:
        super().__init__()
        if not models:
            raise ConfigError("an ensemble needs at least one model, but none was given.")
        self.config: Any = models[0].config
        for number, model in enumerate(models, 1):
            for name in self.names:
                its, mine = getattr(model.config, name), getattr(self.config, name)
                if its != mine:
                    raise ConfigError(
                        f"model {number} of the ensemble has {_difference(name, its, mine)}, but model 1 has"
                        f" {_difference(name, mine, its)}; only models that predict the same can be averaged."
                    )
        self.models = nn.ModuleList(models)

    @property
    def max_len(self) -> int | None:
        """Maximum length of a text: the smallest limit of the models; None: there is no limit."""
        return shortest_limit(self.models)


def _difference(name: str, its: Any, other: Any) -> str:
    """A field for a message: what one has and the other does not."""
    if isinstance(its, str):
        return f"{name} {its!r}"
    alone = [value for value in its if value not in other]
    if alone:
        return f"the {name} {', '.join(map(repr, alone[:3]))}{' ...' if len(alone) > 3 else ''}"
    return f"{len(its)} {name}" if len(its) != len(other) else f"the {name} in another order"


class RunsEncoder(RunsModel[M]):
    """The common part of `Classifier` and `ChartParser`: a model that reads one text, and its tokenizer.

    Args:
        model: a composite; it is put into evaluation mode.
        tokenizer: of texts.
        device: the device of the model; `auto` chooses one.
        precision: `fp32`; `bf16` by autocast; `auto`: the faster one of these on the device; `tf32` (NVIDIA GPUs).

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

        Several paths are an ensemble, which averages the models' probabilities (see `models.ensemble`).

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
