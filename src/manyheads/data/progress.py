"""Progress of long work: a function that is called with a phase, the amount done, and the total."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""(phase, done, total); total is 0 while it is unknown."""


def telling(show: Progress, phase: str, total: int, first: int = 0) -> Callable[[int], None]:
    """Begin a phase.

    Args:
        show: displays the progress.
        phase: name of the phase.
        total: 0 if it is unknown.
        first: amount that was done before.

    Returns: a function to call with the amount done since then.
    """
    show(phase, first, total)
    return lambda done: show(phase, first + done, total)
