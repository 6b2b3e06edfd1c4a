"""What differs between the tasks that a run may learn, and nothing else: the loop knows this page only.

Data and its order, how a step's batch is put to the model, how the model is judged. A newcomer is one file beside
`translation.py` and one line in `assembly.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from manyheads.training.report import ValidationReport
from manyheads.training.settings import RunConfig
from manyheads.training.signals import StopFlag

__all__ = ["Batch", "Data", "Judge", "Objective", "Stream", "Translate"]

Translate = Callable[[list[str], Callable[[], bool]], list[str]]
"""Texts to texts by the model; the second argument is asked often, and answers True to make it raise SearchStopped."""


class Described(Protocol):
    """Says in a line or a few what it is."""

    def describe(self) -> str: ...


class Tokenizer(Protocol):
    """What a model folder keeps of a tokenizer."""

    @property
    def digest(self) -> str: ...

    def files(self) -> dict[str, bytes]: ...


class Data(Described, Protocol):
    """Prepared data: where it is and what it holds."""

    @property
    def digest(self) -> str: ...

    @property
    def tokenizer(self) -> Any: ...


class Batch(Protocol):
    """A micro-batch. size: numbers that a side of it takes, padding included."""

    @property
    def sample_ids(self) -> Tensor: ...

    @property
    def size(self) -> int: ...

    def num_target_tokens(self) -> int: ...

    def describe(self) -> str:
        """`256 rows of 16 source and 16 target tokens`"""
        ...

    def rows(self, which: slice) -> Self:
        """Some of the rows, padded as they are."""
        ...

    def to(self, device: torch.device | str) -> Self: ...


class Stream(Described, Protocol):
    """Batches by epoch and row, the same at every call."""

    def rows(self, epoch: int) -> int: ...

    def at(self, epoch: int, row: int) -> Sequence[Any]: ...

    def next_position(self, epoch: int, row: int) -> tuple[int, int]: ...


class Judge(Protocol):
    """Judges the model as it is on held-out data."""

    def __bool__(self) -> bool:
        """Whether there is anything to judge on."""
        ...

    def run(self, step: int) -> ValidationReport | None:
        """Loss and scores now; None if the run was told to stop meanwhile."""
        ...


class Objective(Protocol):
    """One task of one run. config: of the run, with all that the data decides filled in."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def data(self) -> Data: ...

    @property
    def stream(self) -> Stream: ...

    @property
    def model_config(self) -> Any:
        """The architecture's."""
        ...

    @property
    def generation(self) -> Any:
        """Settings of the search that a model folder keeps, a dataclass."""
        ...

    @property
    def next_command(self) -> str:
        """What to do with the model, after the program's name; `{run}` stands for the run's folder."""
        ...

    def describe(self) -> str:
        """A few lines about the data, and about every part of it that the settings leave unused."""
        ...

    def first_state(self, model: Any) -> Any:
        """What the model remembers of nothing; None for models that remember nothing."""
        ...

    def begin(self, model: Any, lanes: int, seed: int) -> Any:
        """What a micro-batch of so many rows goes on from where nothing came before: None, or a state of the seed."""
        ...

    def judge(self, model: Any, device: torch.device, stop: StopFlag, translate: Translate | None) -> Judge:
        """What validates. translate: stands in for the model's own search.

        Raises: DataError: held-out data cannot be judged with these settings.
        """
        ...

    def lighter(self) -> str:
        """Which settings ask less of memory."""
        ...
