"""Jobs of the engine, their rows, and their events and results."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Batch", "Done", "Event", "Failed", "Job", "QueueFull", "Row"]


@dataclass(frozen=True)
class Row:
    """One unit of a job's work.

    Args:
        content: for the function that begins the batch.
        cost: tokens, prompt and output, times the beams or samples that it occupies; a memory that begins with zeros
            counts as its columns.
        width: beams or samples.
    """

    content: Any
    cost: int
    width: int = 1


@dataclass(frozen=True)
class Event:
    """A partial result of a row."""

    row: int
    content: Any


@dataclass(frozen=True)
class Done:
    """The final result of a row."""

    row: int
    content: Any
    num_tokens: int = 0


@dataclass(frozen=True)
class Failed:
    """The end of a job by an error."""

    error: Exception


class Batch(Protocol):
    """Rows that advance together."""

    def advance(self) -> Iterable[Event | Done]:
        """Take one step. Returns: what is new; `row` counts the rows of the batch."""

    def drop(self, rows: Collection[int]) -> None:
        """Take out rows: they cost nothing from the next step on, and report nothing more."""


class QueueFull(Exception):  # noqa: N818  (an answer, not a fault)
    """Too many tokens wait.

    Args: retry_after: estimated seconds until there is space.
    """

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


@dataclass(eq=False)
class Job:
    """The rows of one request.

    Args:
        key: rows of equal keys may share a batch.
        begin: makes a batch of the contents of rows, which may come from several jobs of this key.
        rows: in the order of their results' numbers.
        told: called on the engine's thread with the events and results of each step; must not block.
        wants_events: whether `told` gets events as well as results.
        wake: called after `told`, once per step for all jobs with the same `wake`; must not block.
        client: who sent it; clients are served in turn.

    Attributes:
        turn: its place among the jobs that wait. next_row: first row that has not started.
        has_news: whether any of its rows had an event or a result.
        is_over: all rows are done, or it was cancelled or failed.
    """

    key: Hashable
    begin: Callable[[Sequence[Any]], Batch]
    rows: Sequence[Row]
    told: Callable[[list[Event | Done | Failed]], None]
    arrived: float = field(default_factory=time.monotonic)
    wants_events: bool = True
    wake: Callable[[], None] | None = None
    client: Hashable = None
    turn: int = 0
    next_row: int = 0
    num_done: int = 0
    has_news: bool = False
    is_over: bool = False

    @property
    def waiting_cost(self) -> int:
        """Tokens of the rows that have not started."""
        return sum(row.cost for row in self.rows[self.next_row :])
