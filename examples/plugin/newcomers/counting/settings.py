"""Settings of a run that learns to count."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.tasks.language_modelling.settings import TextConfig


@dataclass(frozen=True, kw_only=True)
class CountingConfig(TextConfig):
    """A language model's run."""

    @property
    def task(self) -> str:  # type: ignore[override]
        """See `RunConfig.task`."""
        return "counting"
