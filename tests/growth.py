"""Whether work takes time in proportion to its size; for readers, whose input strangers choose."""

import gc
from collections.abc import Callable
from time import process_time

__all__ = ["assert_grows_in_proportion"]

GROWTH, FACTOR, FLOOR_SECONDS, ATTEMPTS = 8, 30, 0.05, 4


def seconds(work: Callable[[int], object], size: int) -> float:
    """Processor time, without collections of garbage, which is other tests'."""
    gc.disable()
    try:
        start = process_time()
        work(size)
        return process_time() - start
    finally:
        gc.enable()


def assert_grows_in_proportion(work: Callable[[int], object], size: int) -> None:
    """Fail if `work` of eight times the size takes far more than eight times as long; a square takes 64 times."""
    measured = []
    for _ in range(ATTEMPTS):  # others may disturb a measurement
        large = seconds(work, GROWTH * size)
        if large < FLOOR_SECONDS:
            return
        small = seconds(work, size)
        if large < FLOOR_SECONDS + FACTOR * small:
            return
        measured.append((small, large))
    raise AssertionError(f"seconds of size {size} and {GROWTH * size}: {measured}")
