"""Checks of the labels of a classifier."""

from __future__ import annotations

from collections.abc import Sequence

from manyheads.errors import ConfigError

__all__ = ["check_labels"]


def check_labels(labels: Sequence[str]) -> None:
    """Raises: ConfigError: a label is empty, contains a line break or a tab, or occurs twice."""
    seen: set[str] = set()
    for label in labels:
        if not label.strip() or any(sign in label for sign in "\t\n\r"):
            raise ConfigError(
                f"model.labels contains {label!r}; a label is a text without tabs and line breaks, and not empty.",
                fields=["labels"],
            )
        if label in seen:
            raise ConfigError(f"model.labels contains {label!r} twice; name each label once.", fields=["labels"])
        seen.add(label)
