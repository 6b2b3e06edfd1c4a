"""Random seeds as arithmetic: every consumer derives its own seed from the run's, so no generator state need be stored.

A resumed run draws the same numbers as one that never stopped: what is drawn depends on names and counters alone.
"""

from __future__ import annotations

import hashlib

__all__ = ["derive_seed"]


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed that depends on `seed` and every name, e.g. `derive_seed(1, "dropout", step, micro_step, rank)`.

    Args:
        seed: the run's seed, any integer.
        names: what the seed is for; strings and integers are told apart, and order matters.

    Returns: an integer in [0, 2**63), fit for `torch.manual_seed` and `numpy.random.default_rng`.
    """
    text = repr((int(seed), *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
