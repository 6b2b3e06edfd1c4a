"""The duplication task takes the memory of any other language model."""

from __future__ import annotations

from manyheads.tasks.text.plan import fit

__all__ = ["fit"]
