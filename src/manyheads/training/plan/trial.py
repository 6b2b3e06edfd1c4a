"""The interface of a task for the planner: training steps at any size, and the settings that determine the size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from manyheads.training.run.objective import Batch

__all__ = ["LARGEST", "Knob", "Trial", "token_knobs"]

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


def token_knobs(data: Any, longest: int, unit: str) -> list[Knob]:
    """Return the knobs of batches that are limited in tokens.

    Long rows have more attention scores, short ones are more. The kind that takes more memory per token decides.

    Args:
        data: settings with `max_tokens` and `accumulate`.
        longest: tokens of the longest row.
        unit: what a row is, for people: sentences, texts.
    """
    given = f"{unit} of at most {longest:,}" + (f", accumulate {data.accumulate}" if data.accumulate > 1 else "")
    knobs = []
    for length in sorted({min(_SHORT, longest), longest}):
        few, many = (max(1, tokens // length) for tokens in _PROBE_TOKENS)
        steps = {rows * length: (length, rows) for rows in (few, max(many, few + 1))}
        knobs.append(Knob("data.max_tokens", data.max_tokens, given, steps, least=length, accumulate=data.accumulate))
    return knobs


class Trial(Protocol):
    """The steps of a run at any size, without its data. Each task has its own (`tasks/*/plan.py`).

    config: of the run. rows: rows of its micro-batches.
    """

    @property
    def config(self) -> Any: ...

    @property
    def rows(self) -> int: ...

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
