"""Tests with hundreds of parameters: `make test` runs a part of them, `make check-long` all."""

from __future__ import annotations

import zlib

import pytest

__all__ = ["is_in_sample", "thin"]


def is_in_sample(name: str, one_in: int) -> bool:
    """Return whether a test belongs to the sample; the same on every machine.

    >>> sum(is_in_sample(str(number), 3) for number in range(3000))
    987
    """
    return zlib.crc32(name.encode()) % one_in == 0


def thin(items: list[pytest.Item]) -> None:
    """Make slow what is marked `thinned(n)` and not in the sample of one in n."""
    for item in items:
        marker = item.get_closest_marker("thinned")
        if marker is not None and not is_in_sample(item.name, marker.args[0]):
            item.add_marker(pytest.mark.slow)
