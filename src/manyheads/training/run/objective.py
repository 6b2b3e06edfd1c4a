"""The interface between a training run and its task: data and their order, first state, validation.

Each task implements `Objective` in `tasks/*/objective.py`, and each kind of model has a `SyntheticRun`: training steps
at any size without data, for predictions of memory and speed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from manyheads.catalogue import MODEL_TASKS, TASKS, load
from manyheads.data.sampler import next_position
from manyheads.nn.kernels import policy

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.distributed.group import Group
    from manyheads.text.sides import LanguagePair
    from manyheads.training.record.report import ValidationReport
    from manyheads.training.run.clock import StopFlag
    from manyheads.training.settings import RunConfig

Translate = Callable[[list[str], Callable[[], bool]], list[str]]
"""A function that maps texts to texts with the model.

It calls the second argument often, and raises SearchStopped if that returns True.
"""


class Data(Protocol):
    """Prepared data: its path and its contents."""

    @property
    def digest(self) -> str: ...

    @property
    def tokenizer(self) -> Any: ...


class Batch(Protocol):
    """A micro-batch. size: number of tokens of its larger side, padding included."""

    @property
    def sample_ids(self) -> Tensor: ...

    @property
    def size(self) -> int: ...

    def num_target_tokens(self) -> int: ...

    def describe(self) -> str:
        """Return a text such as `256 rows of 16 source and 16 target tokens`."""

    def rows(self, which: slice) -> Self:
        """Return some of the rows, with the same padding."""

    def to(self, device: torch.device | str) -> Self: ...


class Stream(Protocol):
    """Batches by epoch and row; the same at every call with the same arguments."""

    def rows(self, epoch: int) -> int: ...

    def at(self, epoch: int, row: int, progress: float = 1.0) -> Sequence[Any]:
        """Return the micro-batches of a step. progress: of the run before the step; 1.0: as at the end of the run."""


class Batches:
    """The batches of a run, step by step; with `ahead`, a thread makes those of the next steps meanwhile.

    They are a function of the position alone, so a thread changes no byte of a run, and nothing of it is stored: after
    an interruption the counters say where to go on. What it made for other steps than the next one is thrown away.

    Args:
        stream: of the run.
        progress: number of finished steps -> progress of the run. With `ahead`, a function of the number alone, unless
            the stream has no use for it.
        device: for CUDA, batches are made in pinned memory.
        ahead: number of steps.
    """

    def __init__(self, stream: Stream, progress: Callable[[int], float], device: torch.device, ahead: int) -> None:
        self._stream, self._progress, self._device, self._ahead = stream, progress, device, ahead
        self._thread = ThreadPoolExecutor(1, "batches") if ahead else None
        self._made: deque[tuple[tuple[int, int, int], Future[Sequence[Any]]]] = deque()

    def at(self, epoch: int, row: int, step: int) -> Sequence[Any]:
        """Return the micro-batches of a step. step: number of steps before it. Raises: any error of their making."""
        if self._thread is None:
            return self._stream.at(epoch, row, self._progress(step))
        now = epoch, row, step
        if self._made and self._made[0][0] != now:
            self._drop()
        if not self._made:
            self._ask(now)
        found = self._made.popleft()[1].result()
        last = now
        for place, _ in self._made:
            last = place
        # The thread plans an epoch when it makes its first row; until then its number of rows is not known.
        while len(self._made) < self._ahead and last[0] == epoch:
            epoch_and_row = next_position(*last[:2], self._stream.rows(epoch))
            last = (*epoch_and_row, last[2] + 1)
            self._ask(last)
        return found

    def _ask(self, place: tuple[int, int, int]) -> None:
        assert self._thread is not None
        self._made.append((place, self._thread.submit(self._make, *place)))

    def _make(self, epoch: int, row: int, step: int) -> Sequence[Any]:
        batches = self._stream.at(epoch, row, self._progress(step))
        block = policy.pinning(self._device)
        if block is None:
            return batches
        with block:
            return [batch.pinned() for batch in batches]

    def _drop(self) -> None:
        for _, future in self._made:
            future.cancel()
        self._made.clear()

    def close(self) -> None:
        """End the thread, after the batch that it is making."""
        self._drop()
        if self._thread is not None:
            self._thread.shutdown()


class HeldOutScorer(Protocol):
    """Validates the current model on held-out data."""

    def __bool__(self) -> bool:
        """Whether there is held-out data."""

    def run(self, step: int) -> ValidationReport | None:
        """Return loss and scores; None if the run was told to stop during the validation."""


@runtime_checkable
class Objective(Protocol):
    """The task of a run. config: of the run, with all values filled in that the data determines."""

    @property
    def task(self) -> str:
        """The task's name, which model folders record."""

    @property
    def languages(self) -> Sequence[LanguagePair]:
        """Source and target language of each direction, which model folders record; empty if they are unknown."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def data(self) -> Data: ...

    @property
    def digest(self) -> str:
        """SHA-256 of all training data: that of `data`, or of all data sets of a mix."""

    @property
    def stream(self) -> Stream: ...

    @property
    def model_config(self) -> Any:
        """The architecture's config."""

    @property
    def generation(self) -> Any:
        """The search settings that are stored in a model folder, a dataclass."""

    @property
    def next_command(self) -> str:
        """A command to use the model, without the program's name; `{run}` stands for the run's folder."""

    def describe(self) -> str:
        """Return a few lines about the data. They name every part of it that the settings do not use."""

    def prepare_weights(self, model: Any, group: Group) -> Sequence[str]:
        """Replace some of the random weights of a new model by others that depend on the data; equal on all ranks.

        Returns: sentences for the user.
        """

    def check_device(self, device: torch.device) -> Sequence[str]:
        """Return sentences for the user about how the device computes the batches.

        Raises: ConfigError: it cannot.
        """

    def first_state(self, model: Any) -> Any:
        """Return the model's state before any input; None for models without state."""

    def begin(self, model: Any, lanes: int, seed: int) -> Any:
        """Return the initial state of a micro-batch with `lanes` rows: None, or a state that depends on the seed."""

    def judge(self, model: Any, device: torch.device, stop: StopFlag, translate: Translate | None) -> HeldOutScorer:
        """Return the validator. translate: replaces the model's own search.

        Raises: DataError: the held-out data cannot be used with these settings.
        """

    def judge_sets(self, model: Any, device: torch.device, stop: StopFlag) -> Mapping[str, HeldOutScorer]:
        """Return a judge for each data set of a run that begins from a model: the run's own, those of its mix, and
        those of the model. It uses the test set, or else the validation set; a data set without them is left out.

        Raises: DataError: the held-out data cannot be used with these settings.
        """

    def lighter(self) -> str:
        """Return advice on the settings that reduce memory."""


class PlainObjective:
    """Defaults of an `Objective`: the data has no recorded languages, and the first weights do not depend on it."""

    languages: Sequence[LanguagePair] = ()

    def prepare_weights(self, model: Any, group: Group) -> Sequence[str]:
        return ()

    def check_device(self, device: torch.device) -> Sequence[str]:
        return ()


def open_objective(config: RunConfig, data_dir: Path, progress: Progress | None = None) -> Objective:
    """Open the data of a run, by the function of this name of its task.

    Args:
        config: of the run.
        data_dir: the folder of an embedded corpus after its preparation; a resumed run finds it there again.
        progress: called with the progress of the preparation.

    Raises: DataError, ConfigError, SaveError: the data cannot be used.
    """
    objective = TASKS[config.task].module("objective").open_objective(config, data_dir, progress)
    assert isinstance(objective, Objective), f"{type(objective).__name__} lacks a part of the interface"
    return objective


LARGEST = 1 << 24
_SHORT_STEP = 16
_PROBE_TOKENS = (512, 2048)


@dataclass(frozen=True)
class SizeSetting:
    """A setting that determines the size of a step.

    Attributes:
        setting: its name.
        now: its value in the config.
        given: a description of the settings on which its largest value depends.
        steps: sizes of a micro-batch -> (length, rows) of the step that is measured for each.
        least, most: the smallest and largest size to consider.
        accumulate: the setting's value is `accumulate` times the size.
    """

    setting: str
    now: int
    given: str
    steps: Mapping[int, tuple[int, int]]
    least: int = 1
    most: int = LARGEST
    accumulate: int = 1


class SyntheticRun(Protocol):
    """The steps of a run at any size, without its data. Each kind of model has its own (`catalogue.MODEL_TASKS`).

    config: of the run. longest: tokens of its longest row. rows: rows of its micro-batches. vocabulary: a line about
    its size, which `at` sets if the config has none.
    """

    @property
    def config(self) -> Any: ...

    @property
    def longest(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def vocabulary(self) -> str: ...

    def at(self, length: int) -> Self:
        """Return the steps for rows of `length` tokens, with vocabulary sizes in its config.

        Raises: ConfigError: the model cannot read rows of that length, or the size of a vocabulary is unknown.
        """

    def batch(self, length: int, rows: int) -> Batch:
        """Return a micro-batch of random ids."""

    def begin(self, model: Any, lanes: int, seed: int) -> Any:
        """See `Objective.begin`."""

    def size_settings(self) -> list[SizeSetting]:
        """Return the settings that determine the size of a step. Of two with the same name the smaller value counts."""


def synthetic_run_of(config: RunConfig) -> SyntheticRun:
    """Return steps of a run's task at any size."""
    synthetic_run: SyntheticRun = load(MODEL_TASKS[TASKS[config.task].model_task].synthetic_run)(config)
    return synthetic_run


@dataclass(frozen=True)
class SyntheticTokenRun:
    """The steps of a task that limits its batches in tokens; see `SyntheticRun`. unit: the word for a row."""

    config: Any
    vocabulary: str = ""
    unit: ClassVar[str]

    @property
    def longest(self) -> int:
        """Tokens of the longest row; here, of rows with one side."""
        longest: int = self.config.data.max_len
        return longest

    @property
    def rows(self) -> int:
        """Rows of the longest length; see `SyntheticRun.rows`."""
        tokens: int = self.config.data.max_tokens // self.config.data.accumulate
        return max(1, tokens // self.longest)

    def begin(self, model: Any, lanes: int, seed: int) -> None:
        """See `SyntheticRun.begin`."""

    def size_settings(self) -> list[SizeSetting]:
        """The tokens of a step; see `SyntheticRun.size_settings`.

        Long rows have more attention scores, short ones are more. The kind that takes more memory per token decides.
        """
        data, longest = self.config.data, self.longest
        parts = f", accumulate {data.accumulate}" if data.accumulate > 1 else ""
        given = f"{self.unit} of at most {longest:,}{parts}"
        size_settings = []
        for length in sorted({min(_SHORT_STEP, longest), longest}):
            few, many = (max(1, tokens // length) for tokens in _PROBE_TOKENS)
            steps = {rows * length: (length, rows) for rows in (few, max(many, few + 1))}
            common = {"least": length, "accumulate": data.accumulate}
            size_settings.append(SizeSetting("data.max_tokens", data.max_tokens, given, steps, **common))
        return size_settings
