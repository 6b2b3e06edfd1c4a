"""The clock and the result of a side of `curves.py`: minutes of training, with looks at the quality on the way.

The clock runs while updates are computed, batches included. It stands still while the side looks at its quality.
Importing, reading the data and building the model come before it starts. A side calls `look_if_due` before each update,
so a look comes after the first update that ends at or after its time, and is recorded at the time that it comes.

This file knows neither torch nor manyheads: sides of every environment import it.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Look", "Run", "Task", "inverse_sqrt", "task_of_command_line"]

REPORT_SECONDS = 1.0
"""Of training, after which a run writes `progress.txt` again. `curves.py` reads it less often, and finds a new line."""

Look = Callable[[str], Mapping[str, Any]]


@dataclass(frozen=True)
class Task:
    """What a side is told, as JSON in its first argument.

    Attributes:
        data: folder that `curves_data` has written.
        out: folder of this run, for its result and translations.
        minutes: of training.
        max_updates: ends the run earlier; 0: never.
        num_looks: at even distances in time, the last at the end; 0: none, only the speed is measured.
        precision: `fp32`, or `bf16` by autocast.
        sized_for: the precision whose sizes the presets have: the machine's, also where the other's speed is measured.
        seed: of weights, dropout and order.
        small: small models, to see that it works.
        length: tokens of a sequence, of `long`.
        lanes: sequences of an update, of `long`.
        exact: our decoder in place of the Reformer, of `long`.
    """

    data: Path
    out: Path
    minutes: float
    max_updates: int = 0
    num_looks: int = 6
    precision: str = "fp32"
    sized_for: str = "fp32"
    seed: int = 1
    small: bool = False
    length: int = 0
    lanes: int = 1
    exact: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """Of the data: ids of special tokens, sizes, bytes of held-out text."""
        facts: dict[str, Any] = json.loads((self.data / "facts.json").read_text("utf-8"))
        return facts


def task_of_command_line() -> Task:
    told = json.loads(sys.argv[1])
    return Task(**{**told, "data": Path(told["data"]), "out": Path(told["out"])})


@dataclass
class Run:
    """The clock of a run, and what it has recorded.

    Args:
        task: minutes, updates and looks.
        look: name -> what is found: hypotheses written to a file of that name, or nats of the held-out text. It is
            called with `valid-1`, `valid-2`, ..., while the clock stands still.
    """

    task: Task
    look: Look
    updates: int = 0
    tokens: int = 0
    looks: list[dict[str, Any]] = field(default_factory=list)
    _spent: float = 0.0
    _since: float | None = None
    _reported: float = 0.0

    def seconds(self) -> float:
        """Of training so far."""
        return self._spent + (0.0 if self._since is None else time.perf_counter() - self._since)

    def progress(self) -> float:
        """From 0 to 1, by the clock or by the updates, whichever is larger."""
        by_updates = self.updates / self.task.max_updates if self.task.max_updates else 0.0
        return min(1.0, max(by_updates, self.seconds() / (60 * self.task.minutes)))

    def look_if_due(self) -> bool:
        """To be called before each update. Returns: whether training is over."""
        if self._since is None:
            self._since = time.perf_counter()
        progress = self.progress()
        due = math.floor(progress * self.task.num_looks + 1e-9)
        if due > (self.looks[-1]["number"] if self.looks else 0):
            self._look(due)
        return progress >= 1.0

    def _look(self, number: int) -> None:
        self._spent, self._since = self.seconds(), None
        found = dict(self.look(f"valid-{number}"))
        counted = {"number": number, "seconds": self._spent, "updates": self.updates, "tokens": self.tokens}
        self.looks.append({**counted, **found})
        self._since = time.perf_counter()

    def count(self, tokens: int) -> None:
        """To be called after each update. tokens: that it was computed on, without padding."""
        self.updates += 1
        self.tokens += tokens
        if self.seconds() - self._reported >= REPORT_SECONDS:
            self._report()

    def _report(self) -> None:
        """Say in `progress.txt` how far the run is."""
        self._reported = self.seconds()
        speed = f"{self.tokens / self._reported:,.0f} tokens/s"
        line = f"{self._reported / 60:.1f} of {self.task.minutes:g} minutes, {self.updates} updates, {speed}\n"
        (self.task.out / "progress.txt").write_text(line, encoding="utf-8")

    def train(self, update: Callable[[Run], int]) -> None:
        """Compute updates until the minutes are over. update: does one, and returns its tokens."""
        while not self.look_if_due():
            self.count(update(self))

    def write(self, parameters: int, settings: Mapping[str, Any], test: Mapping[str, Any] | None = None) -> None:
        """Write `side.json` into the folder of the run."""
        torch = sys.modules.get("torch")
        seconds = self.looks[-1]["seconds"] if self.looks else self.seconds()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        result = {
            "precision": self.task.precision,
            "parameters": parameters,
            "settings": dict(settings),
            "seconds": seconds,
            "updates": self.updates,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / seconds if seconds else 0.0,
            "peak_bytes": peak,
            "threads": None if torch is None else int(torch.get_num_threads()),
            "torch": None if torch is None else str(torch.__version__),
            "looks": self.looks,
            "test": dict(test or {}),
        }
        (self.task.out / "side.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def inverse_sqrt(update: int, peak: float, warm: int) -> float:
    """Linear to the peak in `warm` updates, then falling with the square root. update: counted from 1."""
    return peak * min(update / warm, math.sqrt(warm / update))
