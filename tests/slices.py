"""Slices of long lists of cases: `make test` runs a part, another one each time, `make check-long` the others."""

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["drawn", "sliced"]

RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")


def drawn(count: int, parts: int, name: str) -> set[int]:
    """Which of so many cases belong to the slice, one of `parts`, of this run; all of them without xdist.

    The processes of a run draw the same. Without xdist one looks for something, or runs a mutant: then nothing is left
    to chance. name: of the list, so that not all lists have the same slice.
    """
    if not RUN:
        return set(range(count))
    first = random.Random(f"{RUN} {name}").randrange(parts)
    return set(range(first, count, parts))


def sliced(cases: Sequence[Any], parts: int, name: str, ident: Callable[[Any], str] = str) -> list[Any]:
    """The cases as parameters of a test, a tuple as several; those outside the slice are marked slow."""
    import pytest  # here, since processes that tests start draw slices as well

    quick = drawn(len(cases), parts, name)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=ident(case),
            marks=[] if place in quick else [pytest.mark.slow],
        )
        for place, case in enumerate(cases)
    ]
