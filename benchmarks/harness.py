"""Sides that take turns: a child process each, all alive at once, one working while the others wait on a pipe.

A child builds its model and warms up, says that it is ready, and waits blocked in a read. The parent asks one after
another, A B C A B C, for so many seconds of steps, and is told the rate. A ratio is of two sides in the same round, so
a machine that is slower for a minute is so for both; what is reported is the median of the rounds' ratios.

A side whose warm-up or first turn takes too long is killed and left out, and the reason is kept.

This file knows neither torch nor manyheads: parent and children of every environment import it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "Child",
    "Side",
    "SideError",
    "Spread",
    "Step",
    "TooSlowError",
    "Turns",
    "markdown_table",
    "spread",
    "take_turns",
]

BUILD_SECONDS = 600.0
"""Longest that a side may take to be built, or to answer after its first turn beyond the seconds it was asked for."""


class SideError(RuntimeError):
    """A side could not be built, or ended."""


class TooSlowError(SideError):
    """A side's warm-up or first turn took longer than the limit; its process was killed."""


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
    folder: of the scripts that build it; another commit's, where commits are compared.
    """

    name: str
    build: str
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    environment: Mapping[str, str] | None = None
    folder: Path = Path(__file__).parent


class Child:
    """A side's process, from the start of its building to its end.

    Args:
        build_seconds: limit of building, and of every later answer beyond the seconds asked for.
        most_seconds: limit of the warm-up, and of the first turn.

    Raises:
        SideError: it could not be built; the message ends with what it complained of.
        TooSlowError: its warm-up took longer than most_seconds.
    """

    def __init__(self, side: Side, build_seconds: float = BUILD_SECONDS, most_seconds: float = BUILD_SECONDS) -> None:
        self.side = side
        self._build_seconds = build_seconds
        self._most_seconds = most_seconds
        self._has_worked = False
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        script = side.folder / "side.py"
        self._process = subprocess.Popen(
            [side.python, str(script), side.build, json.dumps(dict(side.options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            bufsize=0,  # a second line that was already read into a buffer would be invisible to select
            env=None if side.environment is None else dict(side.environment),
            process_group=0,  # so that what it has started is killed with it
        )
        try:
            self._answer(build_seconds, SideError(f"{side.name} was not built within {build_seconds:.0f} s."))
            late = f"the warm-up did not end within {most_seconds:.0f} s"
            self.about = self._answer(most_seconds, TooSlowError(late))
        except BaseException:
            self.close()
            raise

    def ask(self, seconds: float) -> dict[str, Any]:
        """Steps for so long, one at least. Returns: rate, steps, peak_bytes, extra.

        Raises:
            SideError: it ended, or gave no answer.
            TooSlowError: this was its first turn, and it took longer than the limit.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"seconds": seconds}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SideError(f"{self.side.name} has ended: {self._last_words()}") from None
        # A side that has shown its rate is not given up because something else kept the machine busy for a while.
        limit = seconds + self._build_seconds if self._has_worked else self._most_seconds
        late: SideError = SideError(f"{self.side.name} gave no answer for {limit:.0f} s.")
        if not self._has_worked:
            late = TooSlowError(f"the first turn, of {seconds:g} s, did not end within {limit:.0f} s")
        answer = self._answer(limit, late)
        self._has_worked = True
        return answer

    def close(self) -> None:
        """End it; one that does not end by itself is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=20)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._kill()
        self._process.stdout.close()
        self._complaints.close()

    def _kill(self) -> None:
        """The process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self, limit: float, late: SideError) -> dict[str, Any]:
        """Raises: SideError: it ended; or late: the limit, in seconds, has passed, and it was killed."""
        pipe = self._process.stdout
        assert pipe is not None
        if not select.select([pipe], [], [], limit)[0]:
            self._kill()  # it would not hear that it is to end
            raise late
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
        failure: why there are no figures, where the side ended or could not be built; else empty.
        left_out: why it was not measured, where it is too slow on this machine; else empty.
    """

    about: dict[str, Any] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    extras: dict[str, list[float]] = field(default_factory=dict)
    failure: str = ""
    left_out: str = ""


def take_turns(
    sides: Sequence[tuple[Side, float]],
    rounds: int,
    on_progress: Callable[[str], None] = lambda _: None,
    most_seconds: float = BUILD_SECONDS,
) -> dict[str, Turns]:
    """Build all sides, then let each work in turn, `rounds` times.

    Args:
        sides: each with the seconds of one of its turns; they are built in this order.
        told: hears of what goes on.
        most_seconds: limit of a side's warm-up, and of its first turn; a slower side is killed and left out.

    Returns: by name. A side that fails or is too slow takes no further turns and says why; the others go on.
    """
    found = {side.name: Turns() for side, _ in sides}
    children: dict[str, Child] = {}
    try:
        for side, _ in sides:
            on_progress(f"building {side.name}")
            try:
                children[side.name] = Child(side, most_seconds=most_seconds)
                found[side.name].about = children[side.name].about
            except SideError as error:
                _give_up(side, found[side.name], error, on_progress)
        for number in range(rounds):
            on_progress(f"round {number + 1} of {rounds}")
            for side, seconds in sides:
                if side.name in children:
                    _take_turn(children, side, seconds, found[side.name], on_progress)
    finally:
        for child in children.values():
            child.close()
    return found


def _take_turn(
    children: dict[str, Child], side: Side, seconds: float, turns: Turns, on_progress: Callable[[str], None]
) -> None:
    try:
        answer = children[side.name].ask(seconds)
    except SideError as error:
        children.pop(side.name).close()
        _give_up(side, turns, error, on_progress)
        return
    turns.rates.append(answer["rate"])
    turns.peak_bytes = max(turns.peak_bytes, answer["peak_bytes"])
    for name, value in answer["extra"].items():
        turns.extras.setdefault(name, []).append(value)


def _give_up(side: Side, turns: Turns, error: SideError, on_progress: Callable[[str], None]) -> None:
    turns.rates = []
    if isinstance(error, TooSlowError):
        turns.left_out = str(error)
        on_progress(f"{side.name} is left out: {turns.left_out}")
    else:
        turns.failure = str(error)
        on_progress(str(error))


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
