"""How far a run is, by steps and by the clock."""

from __future__ import annotations

import time

from manyheads.training.settings import TrainingSettings

__all__ = ["Pace"]


class Pace:
    """A stopwatch that goes on where an earlier part of the run left off.

    Args:
        settings: max_steps and max_minutes.
        elapsed_seconds: of the earlier parts.

    Several ranks must not read their own watches: one that stopped a step later would wait for the others for ever. So
    `agree` sets what all of them read until it is called again.
    """

    def __init__(self, settings: TrainingSettings, elapsed_seconds: float) -> None:
        self._settings = settings
        self._started = time.monotonic() - elapsed_seconds
        self._agreed: float | None = None

    def elapsed(self) -> float:
        """Seconds in the loop, over all parts of the run."""
        return self.measured() if self._agreed is None else self._agreed

    def measured(self) -> float:
        """The same by this process's own watch."""
        return time.monotonic() - self._started

    def agree(self, elapsed_seconds: float) -> None:
        """What is read from now on."""
        self._agreed = elapsed_seconds

    def progress(self, step: int) -> float:
        """Share of the run that is over after `step`: by steps or by the clock, whichever is further."""
        by_steps = step / self._settings.max_steps if self._settings.max_steps else 0.0
        by_clock = self.elapsed() / (60 * self._settings.max_minutes) if self._settings.max_minutes else 0.0
        return min(max(by_steps, by_clock), 1.0)

    def is_over(self) -> bool:
        """Whether the minutes are used up."""
        return bool(self._settings.max_minutes) and self.elapsed() >= 60 * self._settings.max_minutes

    def eta_seconds(self, step: int) -> float | None:
        """Seconds to the end at the pace so far; None while unknown."""
        progress = self.progress(step)
        return self.elapsed() * (1 - progress) / progress if progress else None
