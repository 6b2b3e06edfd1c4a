"""The attention of a whole model prepared for plots: arrays, labels and statistics, for any architecture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from manyheads.errors import ShapeError
from manyheads.extras.inspect.drawings.figure import Array, as_array

__all__ = ["AttentionView", "attention_view", "head_figures", "shown_token", "thinned"]

_JOINERS = "\u200c\u200d"
"""Invisible joiners. Without them the characters around them would be other letters, or several emoji."""


@dataclass(frozen=True, kw_only=True)
class AttentionView:
    """The attention weights of every layer and head of one stack.

    Shape: layers: one (heads, q_len, k_len) per layer; all layers of a view have the same lengths.

    name: `encoder`, `decoder`, `cross`. query_tokens: a label per row; key_tokens: a label per column. num_memory:
    number of memory columns at the left; the first query follows them. is_self: queries and keys are one sequence, so
    distances are defined. block: (rows, columns) of tokens per cell; see `thinned`. figures: entropy and mean distance
    of each head, from weights before thinning: (layers, heads, 2). buckets: of hashed layers, (heads, rounds, length),
    None for others; thinning drops them, because a cell then contains tokens of several buckets.
    """

    name: str
    layers: tuple[Array, ...]
    query_tokens: tuple[str, ...]
    key_tokens: tuple[str, ...]
    num_memory: int = 0
    is_self: bool = True
    block: tuple[int, int] = (1, 1)
    figures: tuple[tuple[tuple[float | None, float | None], ...], ...] = ()
    buckets: tuple[npt.NDArray[np.int64] | None, ...] = ()


def attention_view(
    name: str,
    layers: Sequence[Any],
    *,
    query_tokens: Sequence[str],
    key_tokens: Sequence[str] | None = None,
    num_memory: int = 0,
    is_self: bool | None = None,
    buckets: Sequence[Any] = (),
) -> AttentionView:
    """Check the arguments and return a view.

    Args:
        name: name of the stack.
        layers: weights of each, (heads, q_len, k_len), or (1, heads, q_len, k_len) as from `attentions_of` and Hugging
            Face's models.
        query_tokens: a label per row.
        key_tokens: a label per column; None: those of the queries.
        num_memory: number of memory columns at the left.
        is_self: whether distances are defined; None: yes, unless other keys are given.
        buckets: a layer's (heads, rounds, length), or None for a layer without hashing; empty if no layer hashes.

    Raises: ShapeError: no layer, another rank, more than one sequence, or a wrong number of tokens.
    """
    own = key_tokens is None
    keys = tuple(query_tokens if key_tokens is None else key_tokens)
    arrays = []
    for number, layer in enumerate(layers):
        array = as_array(layer)
        if array.ndim == 4 and array.shape[0] == 1:
            array = array[0]
        if array.ndim != 3 or 0 in array.shape:
            raise ShapeError(
                f"{name}, layer {number + 1}: attention weights of shape {array.shape}; expected (heads, q_len, k_len)"
                " of one sequence."
            )
        if array.shape[1:] != (len(query_tokens), len(keys)):
            raise ShapeError(
                f"{name}, layer {number + 1}: {len(query_tokens)} query tokens and {len(keys)} key tokens for weights"
                f" of shape {array.shape}; give one label per row and one per column."
            )
        arrays.append(array)
    if not arrays:
        raise ShapeError(f"{name}: no layer; give at least one.")
    hashed = tuple(None if one is None else as_array(one).astype(np.int64) for one in buckets)
    for number, one in enumerate(hashed):
        if one is not None and (one.ndim != 3 or one.shape[::2] != (len(arrays[number]), len(keys))):
            raise ShapeError(
                f"{name}, layer {number + 1}: buckets of shape {one.shape}; expected (heads, rounds, length)."
            )
    is_self = own or num_memory > 0 if is_self is None else is_self
    return AttentionView(
        name=name,
        layers=tuple(arrays),
        query_tokens=tuple(map(shown_token, query_tokens)),
        key_tokens=tuple(map(shown_token, keys)),
        num_memory=num_memory,
        is_self=is_self,
        buckets=hashed,
        figures=tuple(tuple(head_figures(head, num_memory if is_self else None) for head in array) for array in arrays),
    )


def head_figures(weights: Array, first_query: int | None) -> tuple[float | None, float | None]:
    """Return the mean over queries of the attention's entropy in bits and of its distance in tokens.

    Args:
        weights: (q_len, k_len); rows of zeros are left out.
        first_query: the column of the first query; None: distances are not defined.

    Returns: two numbers; None for an undefined one.
    """
    looking = weights.sum(axis=1) > 0
    if not looking.any():
        return None, None
    rows = weights[looking]
    logs = np.log2(rows, out=np.zeros_like(rows), where=rows > 0)
    entropy = float(-(rows * logs).sum(axis=1).mean())
    if first_query is None:
        return abs(entropy), None
    queries = np.arange(weights.shape[0])[looking] + first_query
    distances = np.abs(queries[:, None] - np.arange(weights.shape[1])[None])
    return abs(entropy), float((rows * distances).sum(axis=1).mean())


def thinned(view: AttentionView, most: int) -> AttentionView:
    """Return the view with at most `most` rows and columns, by merging neighbours into one cell.

    A cell contains the mean over its queries of the sum over its keys, so a row still sums to one. Memory and segment
    never share a cell.

    Raises: ShapeError: most is below 1.
    """
    if most < 1:
        raise ShapeError(f"pictures of at most {most} rows cannot be drawn; allow at least 1.")
    q_len, k_len = len(view.query_tokens), len(view.key_tokens)
    rows, columns = math.ceil(q_len / most), math.ceil(k_len / most)
    if rows == columns == 1:
        return view
    row_starts = list(range(0, q_len, rows))
    column_starts = [*range(0, view.num_memory, columns), *range(view.num_memory, k_len, columns)]
    counts = np.diff([*row_starts, q_len])
    layers = tuple(
        np.add.reduceat(np.add.reduceat(layer, column_starts, axis=2), row_starts, axis=1) / counts[None, :, None]
        for layer in view.layers
    )
    return replace(
        view,
        layers=layers,
        query_tokens=_joined(view.query_tokens, row_starts),
        key_tokens=_joined(view.key_tokens, column_starts),
        num_memory=math.ceil(view.num_memory / columns),
        block=(rows, columns),
        buckets=(),
    )


def _joined(tokens: tuple[str, ...], starts: list[int]) -> tuple[str, ...]:
    ends = [*starts[1:], len(tokens)]
    return tuple(" ".join(tokens[start:end]) for start, end in zip(starts, ends, strict=True))


def shown_token(token: str) -> str:
    """Return a token without characters that could move, hide or reverse the text beside it."""
    alone = not token.strip(_JOINERS + "₁₂₃₄")  # only joiners, or a byte of one: there is nothing to join
    shown = "".join(
        char if char.isprintable() or (char in _JOINERS and not alone) else f"⟨{ord(char):04X}⟩" for char in token
    )
    return shown or "⟨⟩"
