"""Whether what runs is being compiled as one step of a search; see `decoding.compiled`.

A compiler that reads a model for somebody else's purpose is shown what any compiler understands. One that reads a step
of a search is shown what is fastest there: packed weights and sums in place of small products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["compiles_a_step", "compiling_a_step"]

_compiles = False


def compiles_a_step() -> bool:
    """Whether a compiler reads this, and for a step of a search."""
    return torch.compiler.is_compiling() and _compiles


@contextmanager
def compiling_a_step() -> Iterator[None]:
    """Within the block, what is compiled is a step of a search. Not for several threads at once."""
    global _compiles
    before, _compiles = _compiles, True
    try:
        yield
    finally:
        _compiles = before
