"""How work tells how far it is: a function that is called with a phase, what is done, and the total."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Progress", "telling"]

Progress = Callable[[str, int, int], None]
"""(phase, done, total); total is 0 while it is unknown."""


def telling(show: Progress, phase: str, total: int, first: int = 0) -> Callable[[int], None]:
    """Begin a phase.

    Args:
        show: shows it.
        phase: its name.
        total: 0 while it is unknown.
        first: how much was done before.

    Returns: a function to be called with how much more is done.
    """
    show(phase, first, total)
    return lambda done: show(phase, first + done, total)
