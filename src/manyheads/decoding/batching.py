"""Batches of rows of different lengths: grouping of rows, and padding to one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

T = TypeVar("T")
PADDED_TOKENS = 16_384
"""Tokens of a batch of texts for a language model, padding included."""
Told = Callable[[int], None]
"""Called after each batch with the number of items that are done."""


def cut_batches(
    lengths: Sequence[int], max_tokens: int = PADDED_TOKENS, rows_each: int = 1, max_rows: int | None = None
) -> list[list[int]]:
    """Group indices of sentences by similar length, longest first.

    In a batch rows_each x sentences x longest <= max_tokens, and rows_each x sentences <= max_rows, if that is given. A
    sentence that exceeds a limit is a batch by itself.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    batches: list[list[int]] = []
    for place in order:
        rows = rows_each * (len(batches[-1]) + 1) if batches else 0
        if rows and rows * lengths[batches[-1][0]] <= max_tokens and (max_rows is None or rows <= max_rows):
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


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
    ids = pad_sequence([torch.tensor(row, device="cpu") for row in rows], batch_first=True, padding_value=pad_id)
    return ids.to(device), torch.tensor([len(row) for row in rows], device=device)
