"""The common part of learning an encoder with one head: classifiers and chart parsers.

Rows have one length each, such as texts with a label or sentences with a tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from manyheads.data.collate import round_up
from manyheads.data.sampler import EpochBatches
from manyheads.errors import ConfigError, DataError
from manyheads.tasks.data_sets import fewer_tokens, known_sets
from manyheads.tasks.held_out import chosen_split
from manyheads.training.run.objective import PlainObjective, Translate

if TYPE_CHECKING:
    from manyheads.data.settings import RowSettings
    from manyheads.training.record.report import ValidationReport
    from manyheads.training.run.clock import StopFlag


B = TypeVar("B")


class RowStream(ABC, Generic[B]):
    """The training batches of a run, by epoch and row: a pure function of the rows, the settings and the seed.

    Args:
        lengths: of all rows, in the unit of the settings.
        settings: budget, longest row and policy.
        seed: determines the order.

    Raises: DataError: no row is left, or a row is too long and the policy is `fail`.
    """

    def __init__(self, lengths: NDArray[np.int32], settings: RowSettings, seed: int) -> None:
        self.settings, self.seed = settings, seed
        name, unit = settings.row, settings.unit
        over = lengths > settings.max_len
        self.num_rows, self.num_too_long, self.longest = len(lengths), int(over.sum()), int(lengths.max(initial=0))
        if self.num_too_long and settings.too_long == "fail":
            first = int(over.argmax())
            raise DataError(
                f"{self.num_too_long} training {name}s are too long; the first is {name} {first + 1} with"
                f" {lengths[first]} {unit}, and data.max_len is {settings.max_len}. Raise it, or set data.too_long to"
                f" {settings.remedy}."
            )
        self._kept = np.arange(len(lengths)) if settings.too_long == "truncate" else np.flatnonzero(~over)
        if not len(self._kept):
            longer = f"all {self.num_rows} are longer than data.max_len {settings.max_len}"
            raise DataError(f"No training {name}s are left: {longer if self.num_rows else 'the set is empty'}.")
        limited = np.minimum(lengths[self._kept], settings.max_len)
        self._lengths = round_up(limited, settings.pad_to_multiple, settings.max_len)
        self._plan = lru_cache(maxsize=2)(self._make_plan)

    def _make_plan(self, epoch: int) -> EpochBatches:
        budget = {"max_tokens": self.settings.max_tokens, "accumulate": self.settings.accumulate}
        return EpochBatches.build(self._lengths, self._lengths, seed=self.seed, epoch=epoch, **budget)

    @abstractmethod
    def describe(self) -> str:
        """Return one line for users: what is used, and the setting that cuts or removes rows."""

    @abstractmethod
    def collate(self, sample_ids: NDArray[np.int64], **limits: Any) -> B:
        """Return a batch of some rows. limits: `max_len` and `pad_to_multiple`."""

    def rows(self, epoch: int) -> int:
        """Return the number of optimiser steps of an epoch; epochs can differ by a few."""
        return len(self._plan(epoch))

    def at(self, epoch: int, row: int, progress: float = 1.0) -> list[B]:
        """Return the micro-batches of one optimiser step, none of them empty. progress: has no effect."""
        limits = {"max_len": self.settings.max_len, "pad_to_multiple": self.settings.pad_to_multiple}
        shares = [self._kept[share] for share in self._plan(epoch)[row]]
        return [self.collate(share, **limits) for share in shares if len(share)]


@dataclass(frozen=True)
class EncoderJudge(ABC):
    """Judges a model on held-out rows: texts with labels, or sentences with trees.

    Args:
        model: a composite.
        data: with the rows.
        split: `valid` or `test`.
        config: budgets and precision.
        device: where the model is.
        stop: looked at between batches.

    Raises: DataError: a row is longer than the model's positions; this is reported now, not at the first validation.
    """

    model: Any
    data: Any
    split: str
    config: Any
    device: torch.device
    stop: StopFlag

    def __post_init__(self) -> None:
        longest, settings = self.config.model.longest_input, self.config.data
        if self.store is None or longest is None:
            return
        lengths = self.store.lengths
        if lengths.max(initial=0) > longest:
            raise DataError(
                f"{settings.row.capitalize()} {int(lengths.argmax()) + 1} of {self.data.path} {self.split} has"
                f" {lengths.max()} {settings.unit}, but the model has {longest} positions; raise model.max_len, or"
                f" leave the {settings.row} out."
            )

    @property
    def store(self) -> Any:
        """Return the store of the held-out rows; None if the data has no such split."""
        return getattr(self.data, self.split)

    def __bool__(self) -> bool:
        """Whether there is anything to validate on."""
        return self.store is not None and len(self.store) > 0

    @abstractmethod
    def run(self, step: int) -> ValidationReport | None:
        """See `HeldOutScorer.run`."""


class EncoderObjective(PlainObjective):
    """Rows for such a model. Subclasses set `stream`, `task` and `next_command`.

    Args: config: of the run, with what the data determines. data: its prepared data.

    Attributes: judges: the class of its judge. names: settings of the model, and fields of the data, with the names of
        what the head predicts, in the order of its scores.
    """

    judges: ClassVar[type[EncoderJudge]]
    names: ClassVar[tuple[str, ...]]
    stream: Any
    generation = None

    def __init__(self, config: Any, data: Any) -> None:
        self.config, self.model_config = config, config.model
        self.data, self.digest = data, data.digest

    def describe(self) -> str:
        return f"{self.data.describe()}\n{self.stream.describe()}"

    def first_state(self, model: Any) -> None:
        """See `Objective.first_state`."""

    def begin(self, model: Any, lanes: int, seed: int) -> None:
        """See `Objective.begin`."""

    def judge(self, model: Any, device: torch.device, stop: StopFlag, translate: Translate | None) -> EncoderJudge:
        return self.judges(model, self.data, "valid", self.config, device, stop)

    def judge_sets(self, model: Any, device: torch.device, stop: StopFlag) -> dict[str, EncoderJudge]:
        """See `Objective.judge_sets`. A data set with other names is left out."""
        found = {}
        sets = known_sets(self.config.initial.data, {self.config.data.path: self.data}, type(self.data).open)
        for path, data in sets.items():
            split = chosen_split({"test": data.test, "valid": data.valid}, None)
            if split is not None and all(getattr(data, name) == getattr(self.data, name) for name in self.names):
                found[f"{path} {split}"] = self.judges(model, data, split, self.config, device, stop)
        return found

    def lighter(self) -> str:
        return fewer_tokens(self.config.data)


def with_names(config: Any, data: Any, *names: str) -> Any:
    """Return the config of a run with the vocabulary size of its data, and these settings of the model from the data.

    Raises: ConfigError: the model has fewer ids than the tokenizer of the data.
    """
    model, size = config.model, data.tokenizer.vocab_size
    if model.vocab_size and model.vocab_size < size and not config.initial.model:
        raise ConfigError(
            f"model.vocab_size is {model.vocab_size:,}, but the tokenizer of {data.path} gives {size:,} ids; set it to"
            " 0, which uses them all."
        )
    known = {name: getattr(data, name) for name in names}
    return replace(config, model=replace(model, vocab_size=max(model.vocab_size, size), **known))
