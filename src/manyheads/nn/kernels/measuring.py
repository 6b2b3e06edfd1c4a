"""Compares the speed of implementations on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

ROUNDS = 7
"""Calls of each implementation that are timed; one more comes first, in which libraries prepare their kernels."""


@torch.no_grad()
def least_seconds(*calls: Callable[[], object], rounds: int = ROUNDS, num_threads: int = 1) -> list[float]:
    """Call the functions in turn and return the least time of each.

    Other programs on the machine can only make a time longer. By default one thread computes: on a busy machine two
    threads wait for each other for longer than a small product takes, and the wait would be measured.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        least = [math.inf] * len(calls)
        for number in range(1 + rounds):
            for index, call in enumerate(calls):
                started = time.perf_counter()
                call()
                if number:
                    least[index] = min(least[index], time.perf_counter() - started)
        return [max(seconds, 1e-9) for seconds in least]
    finally:
        torch.set_num_threads(threads)
