"""What ends a run: its steps and minutes, and SIGINT, SIGTERM and SIGHUP, which set a flag, so that the loops end with
a complete checkpoint. A warning says if minutes allow too few steps to learn.

With several ranks a signal to one is enough: the group passes it on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING

import torch

from manyheads.errors import ManyHeadsError

if TYPE_CHECKING:
    from manyheads.distributed.group import Group
    from manyheads.training.settings import RunConfig, TrainingSettings


class RunClock:
    """A stopwatch that continues from the time of earlier parts of the run.

    Args:
        settings: max_steps and max_minutes.
        elapsed_seconds: of the earlier parts.

    Ranks must not read their own clocks: a rank that stopped one step later would wait for the others forever. So
    `agree` sets the time that all ranks read until the next call.
    """

    def __init__(self, settings: TrainingSettings, elapsed_seconds: float) -> None:
        self._settings = settings
        self._started = time.monotonic() - elapsed_seconds
        self._agreed: float | None = None

    def elapsed(self) -> float:
        """Return the agreed seconds in the loop, over all parts of the run."""
        return self.measured() if self._agreed is None else self._agreed

    def measured(self) -> float:
        """Return the same by this process's own clock."""
        return time.monotonic() - self._started

    def agree(self, elapsed_seconds: float) -> None:
        """Set the time to read from now on."""
        self._agreed = elapsed_seconds

    def progress(self, step: int) -> float:
        """Return the progress of the run after `step`, by steps or by the clock, whichever is larger."""
        by_steps = step / self._settings.max_steps if self._settings.max_steps else 0.0
        by_clock = self.elapsed() / (60 * self._settings.max_minutes) if self._settings.max_minutes else 0.0
        return min(max(by_steps, by_clock), 1.0)

    def is_over(self) -> bool:
        """Return whether the minutes are used up."""
        return bool(self._settings.max_minutes) and self.elapsed() >= 60 * self._settings.max_minutes

    def eta_seconds(self, step: int) -> float | None:
        """Return the seconds to the end at the current rate; None while unknown."""
        progress = self.progress(step)
        return self.elapsed() * (1 - progress) / progress if progress else None


FEWEST_STEPS = 150
MOST_LOOKS = 10
"""The number of steps whose time is measured; later steps are not considered."""

_FIRST_MARGIN = 10.0
_EARLY_MARGIN = 2.0
_NUM_EARLY = 4
"""The first step also allocates memory and prepares kernels, the next ones do so for new shapes.

So with fewer measured steps, the warning needs a larger difference.
"""


class FewSteps:
    """Estimates the number of steps from the time of this process's first steps.

    Args:
        config: of the run; without `training.max_minutes` there is no warning.
        device: the model's device.
    """

    def __init__(self, config: RunConfig, device: str) -> None:
        self._config = config
        self._device = device
        training = config.training
        self._limit_seconds = 60 * training.max_minutes
        self._enough = min(FEWEST_STEPS, training.max_steps or FEWEST_STEPS)
        self._seconds: list[float] = []
        self._tokens: list[int] = []
        self._is_over = not self._limit_seconds

    def after(self, step: int, elapsed_seconds: float, seconds: float, num_tokens: int) -> str | None:
        """Record the time of a step.

        Args:
            step: its number in the run.
            elapsed_seconds: of the whole run.
            seconds: of this step.
            num_tokens: target tokens of the step.

        Returns: a warning, at most once; None otherwise.
        """
        if self._is_over:
            return None
        self._seconds.append(seconds)
        self._tokens.append(num_tokens)
        seen = len(self._seconds)
        margin = _FIRST_MARGIN if seen == 1 else _EARLY_MARGIN if seen <= _NUM_EARLY else 1.0
        typical = max(self._typical_seconds(), 1e-9)
        left = max(self._limit_seconds - elapsed_seconds, 0.0)
        is_few = step + margin * left / typical < self._enough
        self._is_over = is_few or seen == MOST_LOOKS
        return self._warning(step + int(left / typical), typical) if is_few else None

    def _typical_seconds(self) -> float:
        """Return the median without the first step, which is the slowest; for two steps the shorter time."""
        return min(self._seconds) if len(self._seconds) <= 2 else median(self._seconds[1:])

    def _warning(self, num_steps: int, seconds: float) -> str:
        config = self._config
        shown = f"{seconds:.2g}" if seconds < 10 else f"{seconds:,.0f}"
        minutes = f"{config.training.max_minutes:g} minute{'' if config.training.max_minutes == 1 else 's'}"
        data = getattr(config, "data", None)
        sizes = [name for name in ("max_tokens", "lanes", "segment_len") if hasattr(data, name)]
        threads = torch.get_num_threads()
        smaller = " or ".join(f"--data.{name}" for name in sizes)
        return (
            f"This run will make about {num_steps:,} step{'' if num_steps == 1 else 's'} in {minutes}; below"
            f" {FEWEST_STEPS} a model learns little. In {config.precision} with"
            f" {threads} thread{'' if threads == 1 else 's'} on {self._device} a step takes {shown} s,"
            f" {median(self._tokens) / seconds:,.0f} target tokens/s. Change what limits it: --precision"
            " (`manyheads doctor` measures which is faster), --num-threads, a lower"
            f" {smaller} or a smaller model, or more --minutes."
        )


SAME_SIGNAL_SECONDS = 3.0
_ASK_SECONDS = 0.2


class StopFlag:
    """Set by the first signal (or by `stop`). `signal_number` is None until then."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None

    def stop(self, number: int = signal.SIGINT) -> None:
        """Request the end of the loops."""
        self.signal_number = int(number)


class SharedStopFlag(StopFlag):
    """One flag for all ranks: setting it on one rank sets it on the others within a fifth of a second.

    This also ends long work that all ranks do equally, such as validation; they agree on it at the next exchange.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group
        self._asked = 0.0
        self._told = False

    def __bool__(self) -> bool:
        if self.signal_number is not None:
            if not self._told:
                self._told = True
                self._group.ask_to_stop(self.signal_number)
            return True
        if time.monotonic() - self._asked < _ASK_SECONDS:
            return False
        self._asked = time.monotonic()
        number = self._group.asked_to_stop()
        if number is None:
            return False
        self.stop(number)
        self._told = True
        return True


@contextmanager
def catch_signals(flag: StopFlag, *, grace: float = 0.0, last_words: Callable[[], str] = str) -> Iterator[StopFlag]:
    """Inside the block the first SIGINT, SIGTERM or SIGHUP sets the flag, the second ends the process at once.

    SIGHUP, which a closed terminal sends, stays ignored where it is ignored, as by nohup.

    Args:
        grace: seconds in which a second signal counts as the first, because a launcher forwards a signal that the
            terminal or the scheduler may already have sent to each process.
        last_words: what to print at the second signal.

    Only the main thread can handle signals; in other threads the block has no effect. The exit code of a second signal
    is 128 + its number, as shells report it. Nothing is lost, because incomplete files have temporary names.
    """

    first: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is not None and time.monotonic() - first >= grace:
            with suppress(OSError, ManyHeadsError):
                os.write(2, last_words().encode("utf-8", "replace"))
            os._exit(128 + number)
        if first is None:
            first = time.monotonic()
            flag.stop(number)

    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # Windows has none
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
