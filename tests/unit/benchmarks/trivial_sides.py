"""Sides for the test of the harness; run in processes of their own."""

import fcntl
import itertools
import subprocess
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


def tardy(warm: int, lock: str) -> Step:
    """Takes `warm` steps at once and never ends the next: a process that it starts sleeps. Both hold the lock."""
    numbers = itertools.count(1)

    def run() -> None:
        if next(numbers) > warm:
            with Path(lock).open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                subprocess.run([sys.executable, "-c", "import time; time.sleep(3600)"], pass_fds=[file.fileno()])

    return Step(run, units=1.0, warm=1)


def broken() -> Step:
    raise ValueError("no such model, sorry")


def mortal(steps: int) -> Step:
    """Ends after so many steps."""
    numbers = itertools.count(1)

    def run() -> None:
        if next(numbers) > steps:
            raise MemoryError("out of memory, as one may be")

    return Step(run, units=1.0, warm=0)


def endless() -> Step:
    """Is never built."""
    while True:
        time.sleep(3600)


def slower_later(seconds: float) -> Step:
    """Its first two steps take no time, the warm-up among them; every later one so many seconds."""
    numbers = itertools.count(1)
    return Step(lambda: time.sleep(seconds) if next(numbers) > 2 else None, units=1.0, warm=1)
