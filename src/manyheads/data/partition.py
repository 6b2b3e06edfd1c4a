"""Division of a sequence into contiguous shares."""

from __future__ import annotations


def share(count: int, part: int, parts: int) -> slice:
    """Return the positions of share `part` of `parts` in `count` items: sizes differ by one at most, larger first.

    >>> [share(5, part, 3) for part in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size, more = divmod(count, parts)
    first = part * size + min(part, more)
    return slice(first, first + size + (part < more))
