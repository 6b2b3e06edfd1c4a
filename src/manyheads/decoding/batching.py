"""Batches of rows of different lengths: grouping of rows, and padding to one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

__all__ = ["Told", "cut_batches", "cut_rows", "map_batches", "padded"]

T = TypeVar("T")
Told = Callable[[int], None]
"""Called after each batch with the number of items that are done."""


def cut_batches(lengths: Sequence[int], max_tokens: int, rows_each: int = 1) -> list[list[int]]:
    """Group indices of sentences by similar length, longest first.

    In a batch rows_each x sentences x longest <= max_tokens. A sentence that exceeds this limit is a batch by itself.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    batches: list[list[int]] = []
    for place in order:
        if batches and rows_each * (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def cut_rows(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Group indices of rows by similar length, longest first, with at most `most` rows per batch."""
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    return [order[start : start + most] for start in range(0, len(order), most)]


def map_batches(work: Callable[[list[int]], Sequence[T]], batches: Sequence[list[int]], told: Told | None) -> list[T]:
    """Return the result for each item, in the order of their numbers. work: batch -> the results of its items."""
    results: dict[int, T] = {}
    for batch in batches:
        results.update(zip(batch, work(batch), strict=True))
        if told is not None:
            told(len(results))
    return [results[number] for number in range(len(results))]


def padded(rows: Sequence[Sequence[int]], pad_id: int = 0, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return rows of ids padded on the right, (rows, longest), and their lengths, (rows,)."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad_id)
    return ids.to(device), torch.tensor([len(row) for row in rows], device=device)
