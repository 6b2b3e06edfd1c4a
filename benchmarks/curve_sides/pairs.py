"""Sentence pairs as peers read them: a line a sentence, its tokens' ids with spaces between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["read_ids", "write_ids"]


def read_ids(path: Path) -> list[list[int]]:
    return [[int(one) for one in line.split()] for line in path.read_text("utf-8").split("\n")[:-1]]


def write_ids(path: Path, rows: Sequence[Sequence[int]]) -> None:
    path.write_text("".join(" ".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
