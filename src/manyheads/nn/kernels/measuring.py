"""Measurements of speed on this machine, by which `policy` chooses in inference and `precision` in a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

ROUNDS = 7
"""Calls of each implementation that are timed; one more comes first, in which libraries prepare their kernels."""
# The measured step: the number of rows, the number of weights and their shape. All weights together have 12 MB, more
# than the cache of a core, as in a model.
_MEASURED_ROWS, _MEASURED_WEIGHTS, _MEASURED_SHAPE = 32, 12, (1024, 256)
# With more rows, torch chooses the library: 128 rows were 1.12 to 1.18 times as fast from packed weights, 2,048 rows
# were slower.
MOST_PACKED_ROWS = 128


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


@cache
def packing_gain() -> float:
    """Return how many times as fast products of few rows are with packed float32 weights; 0 if torch cannot pack them.

    All threads compute: a part of what packing saves is a copy that one thread makes while the others wait.
    """
    weights = [torch.ones(_MEASURED_SHAPE) for _ in range(_MEASURED_WEIGHTS)]
    x = torch.ones(_MEASURED_ROWS, _MEASURED_SHAPE[1])
    try:
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, MOST_PACKED_ROWS) for weight in weights]
        multiply = torch.ops.mkldnn._linear_pointwise
        plain_seconds, packed_seconds = least_seconds(
            lambda: [F.linear(x, weight) for weight in weights],
            lambda: [multiply(x, weight, None, "none", [], "") for weight in packed],
            rounds=5,
            num_threads=torch.get_num_threads(),
        )
    except RuntimeError:
        return 0.0
    return plain_seconds / packed_seconds


@cache
def products_gain() -> float:
    """Return how many times as fast as SDPA matrix products are for four queries (beams) of each (batch, head) pair.

    On two threads with AVX2 SDPA was slower than on one (322 and 201 us; products 132 and 200).
    """
    query, key = torch.ones(16, 4, 4, 64), torch.ones(16, 4, 32, 64)
    products_seconds, sdpa_seconds = least_seconds(
        lambda: torch.softmax(query @ key.transpose(-1, -2), -1) @ key,
        lambda: F.scaled_dot_product_attention(query, key, key),
        num_threads=torch.get_num_threads(),
    )
    return sdpa_seconds / products_seconds
