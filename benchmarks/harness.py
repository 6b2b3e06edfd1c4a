"""Sides that take turns: a child process each, all alive at once, one working while the others wait on a pipe.

A child builds its model and warms up, says that it is ready, and waits blocked in a read. The parent asks one after
another, A B C A B C, for so many seconds of steps, and is told the rate. A ratio is of two sides in the same round, so
a machine that is slower for a minute is so for both; what is reported is the median of the rounds' ratios.

This file knows neither torch nor manyheads: parent and children of every environment import it.
"""

from __future__ import annotations

import json
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Child", "Side", "SideError", "Spread", "Step", "Turns", "markdown_table", "spread", "take_turns"]

BUILD_SECONDS = 1800.0
"""Longest that a side may take to build and warm up, or to answer beyond the seconds it was asked for."""


class SideError(RuntimeError):
    """A side could not be built, or ended."""


@dataclass(frozen=True)
class Step:
    """What a side does again and again, made by its builder in the child.

    Attributes:
        run: one step.
        units: what one step gets through: tokens, bytes, operations.
        warm: steps before the first round.
        precision: what it computes in, for people.
        parameters: how many are trained; None where there are none, or nobody can tell.
        flops: of the products of one step, by formula; None where no formula is.
        extra: further figures of the steps since it was last called.
    """

    run: Callable[[], object]
    units: float
    warm: int = 2
    precision: str = ""
    parameters: int | None = None
    flops: float | None = None
    extra: Callable[[], Mapping[str, float]] | None = None


@dataclass(frozen=True)
class Side:
    """Attributes:
    name: what tables call it.
    build: `module:function` of this folder, which gives a `Step`.
    options: the function's keywords, as JSON can hold them.
    python: the interpreter.
    environment: the whole of it; None passes on this process's own.
    """

    name: str
    build: str
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    environment: Mapping[str, str] | None = None


class Child:
    """A side's process, from its being built on.

    Raises: SideError: it could not be built; the message ends with what it complained of.
    """

    def __init__(self, side: Side, build_seconds: float = BUILD_SECONDS) -> None:
        self.side = side
        self._patience = build_seconds
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        script = Path(__file__).with_name("side.py")
        self._process = subprocess.Popen(
            [side.python, str(script), side.build, json.dumps(dict(side.options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=None if side.environment is None else dict(side.environment),
        )
        try:
            self.about = self._answer(0.0)
        except BaseException:
            self.close()
            raise

    def ask(self, seconds: float) -> dict[str, Any]:
        """Steps for so long, one at least. Returns: rate, steps, peak_bytes, extra."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"seconds": seconds}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SideError(f"{self.side.name} has ended: {self._last_words()}") from None
        return self._answer(seconds)

    def close(self) -> None:
        """End it; one that does not end by itself is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=20)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._complaints.close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        pipe = self._process.stdout
        assert pipe is not None
        # A child writes a line at a time and only when asked, so nothing is ever left in the buffer.
        if not select.select([pipe], [], [], seconds + self._patience)[0]:
            self._process.kill()  # it would not hear that it is to end
            raise SideError(f"{self.side.name} gave no answer for {seconds + self._patience:.0f} s.")
        line = pipe.readline()
        if not line:
            raise SideError(f"{self.side.name} has ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._complaints.seek(0)
        lines = self._complaints.read().decode("utf-8", "replace").strip().split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")[:400]


@dataclass
class Turns:
    """What a side did in all rounds.

    Attributes:
        about: what it said when it was ready: precision, threads, parameters, flops, units, torch.
        rates: units a second, a round each.
        peak_bytes: of the process, the highest resident set up to the last round.
        extras: further figures, a round each.
        failure: why there are no figures; empty where there are.
    """

    about: dict[str, Any] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    extras: dict[str, list[float]] = field(default_factory=dict)
    failure: str = ""


def take_turns(
    sides: Sequence[tuple[Side, float]], rounds: int, told: Callable[[str], None] = lambda _: None
) -> dict[str, Turns]:
    """Build all sides, then let each work in turn, `rounds` times.

    Args:
        sides: each with the seconds of one of its turns; they are built in this order.
        told: hears of what goes on.

    Returns: by name. A side that fails is left out of further rounds and says why; the others go on.
    """
    found = {side.name: Turns() for side, _ in sides}
    children: dict[str, Child] = {}
    try:
        for side, _ in sides:
            told(f"building {side.name}")
            try:
                children[side.name] = Child(side)
                found[side.name].about = children[side.name].about
            except SideError as error:
                found[side.name].failure = str(error)
                told(str(error))
        for number in range(rounds):
            told(f"round {number + 1} of {rounds}")
            for side, seconds in sides:
                if side.name in children:
                    _take_turn(children, side, seconds, found[side.name], told)
    finally:
        for child in children.values():
            child.close()
    return found


def _take_turn(
    children: dict[str, Child], side: Side, seconds: float, turns: Turns, told: Callable[[str], None]
) -> None:
    try:
        answer = children[side.name].ask(seconds)
    except SideError as error:
        children.pop(side.name).close()
        turns.rates, turns.failure = [], str(error)
        told(str(error))
        return
    turns.rates.append(answer["rate"])
    turns.peak_bytes = max(turns.peak_bytes, answer["peak_bytes"])
    for name, value in answer["extra"].items():
        turns.extras.setdefault(name, []).append(value)


@dataclass(frozen=True)
class Spread:
    """A figure over the rounds."""

    median: float
    lowest: float
    highest: float


def spread(ours: Sequence[float], other: Sequence[float] | None = None, factor: float = 1.0) -> Spread:
    """Of a figure; or of its ratio to another side's in the same round.

    Args: factor: what every value is multiplied by.

    Raises: ValueError: nothing was measured, or the sides have unlike numbers of rounds.
    """
    if not ours or (other is not None and len(other) != len(ours)):
        raise ValueError(f"{len(ours)} rounds against {None if other is None else len(other)}; there must be as many.")
    values = [factor * value for value in ours]
    if other is not None:
        values = [value / beside for value, beside in zip(values, other, strict=True)]
    return Spread(statistics.median(values), min(values), max(values))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> list[str]:
    """Lines of a table, padded so that it reads well unrendered too; the first num_left columns stand on the left."""
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if place < num_left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    marks = ["-" * (width + 2) if place < num_left else "-" * (width + 1) + ":" for place, width in enumerate(widths)]
    return [line(header), f"|{'|'.join(marks)}|", *map(line, rows)]
