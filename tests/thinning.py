"""Tests with many parameters: `make test` runs a part of them, `make check-long` all."""

import zlib
from collections import defaultdict

import pytest
from slices import drawn

__all__ = ["is_in_sample", "thin"]


def is_in_sample(name: str, one_in: int) -> bool:
    """Return whether a test belongs to the sample; the same on every machine.

    >>> sum(is_in_sample(str(number), 3) for number in range(3000))
    987
    """
    return zlib.crc32(name.encode()) % one_in == 0


def thin(items: list[pytest.Item]) -> None:
    """Make slow what is marked `thinned(n)` or `one_in(n)` and not in the sample of one in n.

    `thinned` has the same sample everywhere, for lists of hundreds; `one_in` draws another in each run, and all without
    xdist: of a test's parameters, or of all tests that name the same group.
    """
    groups: defaultdict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("thinned")
        if marker is not None and not is_in_sample(item.name, marker.args[0]):
            item.add_marker(pytest.mark.slow)
        marker = item.get_closest_marker("one_in")
        if marker is not None and not item.get_closest_marker("slow"):
            name = item.nodeid.partition("[")[0] if len(marker.args) < 2 else marker.args[1]
            groups[name, marker.args[0]].append(item)
    for (name, parts), group in groups.items():
        chosen = drawn(len(group), parts, name)
        for place, item in enumerate(group):
            if place not in chosen:
                item.add_marker(pytest.mark.slow)
