"""Suggestions of the nearest known name for a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


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
