"""Exports whose layout of weights is a peer's of `peers.FORMATS`; `manyheads convert --to` writes the same files."""

from __future__ import annotations

from pathlib import Path

from manyheads.extras.exports import Check, ExportOptions, NotComparedError
from manyheads.extras.peers.convert import write_peer

__all__ = ["deviation", "write"]


def write(model: Path, target: Path, options: ExportOptions) -> list[str]:
    """See `extras.exports`."""
    return write_peer(model, target, options.to).notes


def deviation(model: Path, target: Path, sentences: list[list[int]], options: ExportOptions) -> Check:
    """Raises: NotComparedError: always. The parity tests compare the peers' numbers."""
    raise NotComparedError(f"the code of {options.to} is not a runtime that manyheads can call")
