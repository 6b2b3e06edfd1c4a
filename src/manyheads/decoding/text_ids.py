"""Sentences to ids and to batches: types are checked, rows of different lengths grouped and padded to one tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from manyheads.errors import RequestError
from manyheads.text.sides import Side

_LINE_BREAKS = re.compile(r"[\r\n]+")


def encode_texts(texts: Sequence[str], side: Side) -> list[list[int]]:
    """Return the ids of each text, which is one sentence.

    A line break inside it becomes a space; line breaks at its ends are removed, because models of sentences were not
    trained on line breaks.

    Raises: RequestError: a text is not a string.
    """
    check_texts(texts)
    return side.encode_batch([" ".join(filter(None, _LINE_BREAKS.split(text))) for text in texts])


def with_end(ids: Sequence[int], side: Side) -> list[int]:
    """Return the ids of a source with its EOS, unless the side's sources have none."""
    return [*ids, side.eos_id] if getattr(side, "ends_sources", True) else list(ids)


def prefix_ids(text: str, side: Side) -> tuple[int, ...]:
    """Return the ids of the beginning of a translation. White space at its end only ends a word: it is no piece."""
    return tuple(side.encode(text.rstrip()))


def check_texts(texts: Sequence[str], what: str = "text") -> None:
    """Raises: RequestError: it is no list, or a text is not a string. what: messages call a text so."""
    # Any kind of sequence will do; a generator would be empty after this check, and a set has no order.
    is_list = hasattr(texts, "__len__") and hasattr(texts, "__getitem__") and not isinstance(texts, bytes | Mapping)
    if not is_list:
        raise RequestError(f"a {type(texts).__name__} was given; give one {what}, a string, or a list of {what}s.")
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise RequestError(f"{what} {number} is a {type(text).__name__}; {what}s are strings.")


T = TypeVar("T")
PADDED_TOKENS = 16_384
"""Tokens of a batch of texts for a language model, padding included."""
OnProgress = Callable[[int], None]
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


def map_batches(
    work: Callable[[list[int]], Sequence[T]], batches: Sequence[list[int]], on_progress: OnProgress | None
) -> list[T]:
    """Return the result for each item, in the order of their numbers. work: batch -> the results of its items."""
    results: dict[int, T] = {}
    for batch in batches:
        results.update(zip(batch, work(batch), strict=True))
        if on_progress is not None:
            on_progress(len(results))
    return [results[number] for number in range(len(results))]


def padded(rows: Sequence[Sequence[int]], pad_id: int = 0, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return rows of ids padded on the right, (rows, longest), and their lengths, (rows,)."""
    ids = pad_sequence([torch.tensor(row, device="cpu") for row in rows], batch_first=True, padding_value=pad_id)
    return ids.to(device), torch.tensor([len(row) for row in rows], device=device)
