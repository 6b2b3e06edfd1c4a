"""Suggestions of the nearest known name for a mistyped one.

Checks of settings, for `__post_init__` of their dataclasses: ranges of numbers, and labels.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from typing import Any

from manyheads.errors import ConfigError


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to `name` (dashes and underscores are equivalent), or None if none is similar.

    For dotted names the last part is also compared alone, so that `dmodel` finds `model.d_model`, and the first letters
    of its words, so that `lr` finds `learning_rate`.
    """
    wanted = name.replace("-", "_").lower()
    best, score = None, 0.0
    for candidate in known:
        folded = candidate.replace("-", "_").lower()
        whole = difflib.SequenceMatcher(None, wanted, folded).ratio()
        tails = difflib.SequenceMatcher(None, wanted.rpartition(".")[2], folded.rpartition(".")[2]).ratio()
        initials = "".join(word[:1] for word in folded.rpartition(".")[2].split("_"))
        if len(initials) > 1 and initials == wanted.rpartition(".")[2]:
            tails = 0.9
        likeness = max(whole, 0.99 * tails) + (0.02 if folded.startswith(wanted) else 0.0)
        if likeness > score:
            best, score = candidate, likeness
    return best if score >= 0.6 else None


def not_among(given: str, name: str, known: Collection[str]) -> str:
    """Return a message about a name that is not known: `--to is 'onx'; there are: onnx, web. Did you mean onnx?`

    Args: given: its beginning, up to the name.
    """
    return f"{given} {name!r}; there are: {', '.join(known)}.{did_you_mean(name, known)}"


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ` Did you mean NAME?` with a leading space, or an empty string, to append to a message."""
    best = nearest(name, known)
    return f" Did you mean {prefix}{best}?" if best else ""


MOST_LAYERS = 1024
"""Maximum number of layers of a stack.

The deepest published model of these kinds has fewer; each layer takes about 100 kB of Python objects.
"""

MOST_LANES = 2**16
"""Maximum number of rows in a batch of segments. Far fewer keep a GPU busy, and each lane has its own memory."""

MOST_THREADS = 1024
"""Maximum number of CPU threads. With 100,000 threads torch's first product ends the process without a message."""

MOST_UNITS = 2**24
"""Maximum of any other size of a model or a batch: widths, heads, ids, positions, rows."""

MOST_COUNT = 2**53
"""Maximum of all other whole numbers: floats cannot represent larger ones exactly, and libraries accept 63 bits."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; NaN and infinity are in none.

    Args:
        low: the least number.
        high: the greatest.
        wanted: completes the sentence "it must be ...".
        excluded: one of the bounds, if that number itself is not allowed.
    """

    low: float
    high: float
    wanted: str
    excluded: float | None = None

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and value != self.excluded and math.isfinite(value)


def at_least(low: float) -> Range:
    """All numbers from `low` on."""
    return Range(low, math.inf, f"at least {low}")


def between(low: float, high: float) -> Range:
    """All numbers from `low` to `high`."""
    return Range(low, high, f"from {low:,} to {high:,}")


ABOVE_ZERO = Range(0, math.inf, "above 0", excluded=0)
BELOW_ONE = Range(0, 1, "in [0, 1)", excluded=1)
FRACTION = Range(0, 1, "in [0, 1]")
POSITIVE_FRACTION = Range(0, 1, "in (0, 1]", excluded=0)


def check(settings: Any, section: str, allowed: Range, *names: str, hint: str = "") -> None:
    """Compare fields with a range. None is in every range.

    Args:
        settings: a dataclass.
        section: its name and a dot, for the message; empty if it has no name; `--` for options of a command.
        allowed: the range of each field.
        names: of the fields.
        hint: added to the message.

    Raises: ConfigError: a number is outside.
    """
    for name in names:
        value = getattr(settings, name)
        shown = name.replace("_", "-") if section == "--" else name
        is_huge = isinstance(value, int) and value > MOST_COUNT
        if is_huge and allowed.high == math.inf:
            wanted = f"{allowed.wanted} and at most {MOST_COUNT:,}"
            raise ConfigError(f"{section}{shown} is {_shown(value)}; it must be {wanted}{hint}.", fields=[name])
        if value is not None and value not in allowed:
            wanted = f"a finite number {allowed.wanted}" if value == allowed.high == math.inf else allowed.wanted
            raise ConfigError(f"{section}{shown} is {_shown(value)}; it must be {wanted}{hint}.", fields=[name])


def one_or_more(value: Any) -> Any:
    """Return a single text or number as a tuple of one, anything else as it is: a text is never taken as letters."""
    return (value,) if isinstance(value, str | int | float) else value


def set_tuples(settings: Any) -> None:
    """Make the fields whose type is a tuple tuples: of one text or number, or of the items of a list."""
    for item in fields(settings):
        if str(item.type).startswith("tuple["):
            value = one_or_more(getattr(settings, item.name))
            object.__setattr__(settings, item.name, tuple(value) if isinstance(value, list) else value)


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
