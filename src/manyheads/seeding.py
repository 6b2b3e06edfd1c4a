"""Seeds as a pure function: every use derives its seed from the run's seed, so no generator state is stored.

A resumed run draws the same numbers as an uninterrupted one, because they depend only on names and counters.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed that depends on `seed` and all names, e.g. `derive_seed(1, "dropout", step, micro_step,
    rank)`.

    Args:
        seed: the run's seed, any integer.
        names: the purpose of the seed; strings and integers differ, and their order matters.

    Returns: an integer in [0, 2**63), valid for `torch.manual_seed` and `numpy.random.default_rng`.
    """
    text = repr((int(seed), *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
