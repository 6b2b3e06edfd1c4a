"""Examples of the models' masks on a few positions, for plots and tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.nn.attention.local import local_attention, spread_chunks
from manyheads.nn.attention.masks import Causal, Lengths, Mask, Window, dense_mask
from manyheads.nn.shapes import Bool

__all__ = ["MASK_KINDS", "MaskExample", "MaskSizes", "mask_examples"]


@dataclass(frozen=True, kw_only=True)
class MaskSizes:
    """The sizes of the examples.

    length: positions. lengths: real tokens of each row. left, right: keys that the window shows before and after a
    query. memory_len: stored positions. chunk_len: positions of a block. before, after: neighbouring blocks that a
    query sees; after is 0 for a causal layer.
    """

    length: int = 8
    lengths: tuple[int, ...] = (8, 5)
    left: int = 2
    right: int = 0
    memory_len: int = 4
    chunk_len: int = 3
    before: int = 1
    after: int = 0


@dataclass(frozen=True)
class MaskExample:
    """One mask as numbers.

    title: what it is, for people. formula: when query i may attend to key j. allowed: (q_len, k_len) bool; True = may
    attend. num_memory: columns at the left that belong to a memory.
    """

    kind: str
    title: str
    formula: str
    allowed: Bool[Tensor, "q_len k_len"]
    num_memory: int = 0


def mask_examples(kinds: tuple[str, ...], sizes: MaskSizes) -> list[MaskExample]:
    """Return the masks of these kinds, in this order; `padding` and `target` give one for each row.

    >>> [example] = mask_examples(("causal",), MaskSizes(length=2))
    >>> example.allowed.tolist()
    [[True, False], [True, True]]

    Args: kinds: names in `MASK_KINDS`.
    """
    return [example for kind in kinds for example in _MAKERS[kind](sizes)]


def _padding(sizes: MaskSizes) -> list[MaskExample]:
    rows = _rows(Lengths(torch.tensor(sizes.lengths)), sizes)
    return [
        MaskExample("padding", f"padding, {real} real tokens", f"j < {real}", allowed)
        for real, allowed in zip(sizes.lengths, rows, strict=True)
    ]


def _target(sizes: MaskSizes) -> list[MaskExample]:
    rows = _rows(Causal() & Lengths(torch.tensor(sizes.lengths)), sizes)
    return [
        MaskExample("target", f"causal and padding, {real} real tokens", f"j <= i and j < {real}", allowed)
        for real, allowed in zip(sizes.lengths, rows, strict=True)
    ]


def _causal(sizes: MaskSizes) -> list[MaskExample]:
    [allowed] = _rows(Causal(), sizes)
    return [MaskExample("causal", "causal", "j <= i", allowed)]


def _window(sizes: MaskSizes) -> list[MaskExample]:
    [allowed] = _rows(Window(left=sizes.left, right=sizes.right), sizes)
    title = f"window, {sizes.left} before and {sizes.right} after"
    return [MaskExample("window", title, f"i - {sizes.left} <= j <= i + {sizes.right}", allowed)]


def _memory(sizes: MaskSizes) -> list[MaskExample]:
    """The masks of a Transformer-XL: a segment after its memory, without and with `same_length`."""
    memory = sizes.memory_len
    [plain] = _rows(Causal(), sizes, memory)
    found = [MaskExample("memory", f"memory of {memory}", f"j <= i + {memory}", plain, memory)]
    if memory:
        [same] = _rows(Causal() & Window(left=memory - 1, right=None), sizes, memory)
        title = f"memory of {memory}, same length"
        found.append(MaskExample("memory", title, f"i < j <= i + {memory}", same, memory))
    return found


def _blocks(sizes: MaskSizes) -> list[MaskExample]:
    """The masks of a Reformer's local layers.

    The layers themselves compute them: a key with a weight above 0 is allowed.
    """
    nothing = torch.zeros(1, 1, sizes.length, 1)
    found: list[Tensor] = []
    causal, most = not sizes.after, sizes.length // sizes.chunk_len + 1  # more neighbours than chunks cost memory
    before, after = min(sizes.before, most), min(sizes.after, most)
    local_attention(
        nothing,
        nothing,
        nothing,
        chunk_len=sizes.chunk_len,
        chunks_before=before,
        chunks_after=after,
        causal=causal,
        weights_hook=found.append,
    )
    allowed = spread_chunks(found[0], before, sizes.length)[0, 0] > 0
    title = f"blocks of {sizes.chunk_len}, {sizes.before} before and {sizes.after} after"
    formula = f"-{sizes.before} <= j // {sizes.chunk_len} - i // {sizes.chunk_len} <= {sizes.after}"
    return [MaskExample("blocks", title, f"{formula}{' and j <= i' if causal else ''}", allowed)]


def _rows(mask: Mask, sizes: MaskSizes, memory_len: int = 0) -> list[Tensor]:
    """Return (length, memory_len + length) bool for each row of the mask."""
    q_len, k_len = sizes.length, memory_len + sizes.length
    allowed = dense_mask(mask, q_len, k_len, torch.device("cpu"), first_query=memory_len)
    assert allowed is not None
    return [row[0].expand(q_len, k_len) for row in allowed]


_MAKERS: dict[str, Callable[[MaskSizes], list[MaskExample]]] = {
    "padding": _padding,
    "causal": _causal,
    "target": _target,
    "window": _window,
    "memory": _memory,
    "blocks": _blocks,
}

MASK_KINDS = tuple(_MAKERS)
"""All kinds, in the order in which they are drawn."""
