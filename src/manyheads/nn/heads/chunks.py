"""How many rows of logits to make at once, and how many of those to work on element by element."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.nn.linear import onednn_is_faster

__all__ = ["add_tiles", "pad_rows", "rows_at_once", "rows_in_a_tile"]

# Numbers worked on at once by each thread of a CPU: 1 MB in float32, which stays in a core's own cache from one
# operation to the next.
_TILE_NUMBERS = 1 << 18
# Logits at once on a CPU, however many `chunk_tokens` allows: 80 MB in float32. For every chunk the whole weight is
# read again and its gradient added up again, so large ones pay.
_CHUNK_NUMBERS = 20 << 20
# On a processor with AMX a product of logits that had left the cores' shared cache was slow (5 ms against 25 ms, at a
# small vocabulary). So, but where large chunks were measured to be faster, a chunk is kept to 10 MB in bf16, as long as
# it has rows enough to be worth the reading.
_CACHED_NUMBERS, _WORTHWHILE_ROWS = 5 << 20, 512
# Rows of a product on a CPU: oneDNN makes a kernel for every number of rows, and the count of real tokens is always
# another.
_ROWS_MULTIPLE = 64


def rows_at_once(chunk_tokens: int, vocab_size: int, device: torch.device) -> int:
    """Rows of logits that exist at once: `chunk_tokens`, or fewer on a CPU."""
    if device.type != "cpu":
        return chunk_tokens
    fitting = _CHUNK_NUMBERS // vocab_size
    if torch.compiler.is_compiling() or not onednn_is_faster():  # asked first: a compiler reads on from here
        fitting = min(fitting, max(_CACHED_NUMBERS // vocab_size, _WORTHWHILE_ROWS))
    return min(chunk_tokens, max(fitting // _ROWS_MULTIPLE * _ROWS_MULTIPLE, _ROWS_MULTIPLE))


def rows_in_a_tile(rows: int, vocab_size: int, device: torch.device) -> int:
    """Of `rows` rows, how many to pass over at once."""
    return max(1, torch.get_num_threads() * _TILE_NUMBERS // vocab_size) if device.type == "cpu" else rows


def add_tiles(total: Tensor, part: Tensor) -> None:
    """total += part, on a CPU some rows at a time.

    torch widens a part of a narrower type by a copy before it adds; a tile's copy does not leave the cache.
    """
    rows = rows_in_a_tile(len(total), total[0].numel(), total.device)
    for there, more in zip(torch.split(total, rows), torch.split(part, rows), strict=True):
        there += more


def pad_rows(x: Tensor, most: int) -> Tensor:
    """Rows of zeros after x, on a CPU, up to a round number of them that is no more than `most`."""
    count = x.shape[0]
    return F.pad(x, (0, 0, 0, min(-count % _ROWS_MULTIPLE, most - count))) if x.device.type == "cpu" else x
