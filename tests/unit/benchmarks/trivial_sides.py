"""Sides for the test of the harness; run in processes of their own."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

from harness import Step


def sleeper(name: str, milliseconds: float, log: str, chatty: bool = False) -> Step:
    """Sleeps, and writes down when it did."""

    def run() -> None:
        if chatty:
            print("what a library prints")
            sys.stderr.write("what a library complains of\n")
        with Path(log).open("a") as file:
            file.write(name)
        time.sleep(milliseconds / 1000)

    return Step(run, units=10.0, warm=1, precision="none", parameters=100, extra=lambda: {"seven": 7.0})


def broken() -> Step:
    raise ValueError("no such model, sorry")


def mortal(steps: int) -> Step:
    """Ends after so many steps."""
    numbers = itertools.count(1)

    def run() -> None:
        if next(numbers) > steps:
            raise MemoryError("out of memory, as one may be")

    return Step(run, units=1.0, warm=0)
