"""Progress of a run by steps and by the clock."""

from __future__ import annotations

import time

from manyheads.training.settings import TrainingSettings


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
