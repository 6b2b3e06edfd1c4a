"""The interface of a task for the planner: training steps at any size, and the settings that determine the size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from manyheads.catalogue import TASKS
from manyheads.training.run.objective import Batch
from manyheads.training.settings import RunConfig

LARGEST = 1 << 24
_SHORT = 16
_PROBE_TOKENS = (512, 2048)


@dataclass(frozen=True)
class Knob:
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


class Trial(Protocol):
    """The steps of a run at any size, without its data. Each task has its own (`tasks/*/plan.py`).

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
        """Return the trial for rows of `length` tokens, with vocabulary sizes in its config.

        Raises: ConfigError: the model cannot read rows of that length, or the size of a vocabulary is unknown.
        """

    def batch(self, length: int, rows: int) -> Batch:
        """Return a micro-batch of random ids."""

    def begin(self, model: Any, lanes: int, seed: int) -> Any:
        """See `Objective.begin`."""

    def knobs(self) -> list[Knob]:
        """Return the settings that determine the size of a step. Of two with the same name the smaller value counts."""


def trial_of(config: RunConfig) -> Trial:
    """Return the trial of a run's task."""
    trial: Trial = TASKS[config.task].module("plan").Trial(config)
    return trial


@dataclass(frozen=True)
class TokenTrial:
    """The common part of trials whose batches are limited in tokens; see `Trial`. unit: what a row is, for people."""

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
        """Rows of the longest length; see `Trial.rows`."""
        tokens: int = self.config.data.max_tokens // self.config.data.accumulate
        return max(1, tokens // self.longest)

    def begin(self, model: Any, lanes: int, seed: int) -> None:
        """See `Trial.begin`."""

    def knobs(self) -> list[Knob]:
        """The tokens of a step; see `Trial.knobs`.

        Long rows have more attention scores, short ones are more. The kind that takes more memory per token decides.
        """
        data, longest = self.config.data, self.longest
        parts = f", accumulate {data.accumulate}" if data.accumulate > 1 else ""
        given = f"{self.unit} of at most {longest:,}{parts}"
        knobs = []
        for length in sorted({min(_SHORT, longest), longest}):
            few, many = (max(1, tokens // length) for tokens in _PROBE_TOKENS)
            steps = {rows * length: (length, rows) for rows in (few, max(many, few + 1))}
            common = {"least": length, "accumulate": data.accumulate}
            knobs.append(Knob("data.max_tokens", data.max_tokens, given, steps, **common))
        return knobs
