"""Makes a padded batch from sentences of a store, without a Python loop over sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from manyheads.data.batch import PairBatch

if TYPE_CHECKING:
    from manyheads.data.store import PairStore, TokenSide

Lengths = TypeVar("Lengths", int, NDArray[np.integer[Any]])


def collate(
    store: PairStore,
    sample_ids: NDArray[np.integer[Any]],
    *,
    pad_id: int,
    bos_id: int,
    eos_id: int,
    max_source_len: int | None = None,
    max_target_len: int | None = None,
    pad_to_multiple: int = 1,
) -> PairBatch:
    """Return a batch of some samples, in the given order.

    Args:
        store: all samples.
        sample_ids: (batch,) positions in the store, at least one.
        pad_id: the id of padding, on the right.
        bos_id: the first id of each target.
        eos_id: the last id of each source and target.
        max_source_len: longer sources are truncated to this length, which includes EOS.
        max_target_len: longer targets are truncated to this length, which includes BOS and EOS.
        pad_to_multiple: both sides are padded to a multiple of this length, but not beyond the two limits.
    """
    samples = np.asarray(sample_ids, np.int64)
    source, source_lengths = padded_rows(store.source, samples, [], eos_id, pad_id, max_source_len, pad_to_multiple)
    target, target_lengths = padded_rows(
        store.target, samples, [bos_id], eos_id, pad_id, max_target_len, pad_to_multiple
    )
    return PairBatch(
        source=torch.from_numpy(source),
        source_lengths=torch.from_numpy(source_lengths),
        target=torch.from_numpy(target),
        target_lengths=torch.from_numpy(target_lengths),
        sample_ids=torch.from_numpy(samples.copy()),
        pad_id=pad_id,
    )


def round_up(length: Lengths, multiple: int, limit: int | None) -> Lengths:
    """Return the next multiple, or the limit if that is lower; `length` itself is within the limit."""
    rounded = -(-length // multiple) * multiple
    return rounded if limit is None else np.minimum(rounded, limit)


def padded_rows(
    side: TokenSide,
    samples: NDArray[np.int64],
    head: list[int],
    eos_id: int,
    pad_id: int,
    max_len: int | None,
    multiple: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """head + ids + EOS of each sample, padded on the right, (batch, len), and the lengths, (batch,)."""
    begin = len(head)
    starts = side.offsets[samples]
    lengths = side.offsets[samples + 1] - starts
    if max_len is not None:
        lengths = np.minimum(lengths, max_len - begin - 1)
    longest = int(lengths.max(initial=0))
    width = round_up(begin + longest + 1, multiple, max_len)
    batch = np.full((len(samples), width), pad_id, np.int64)
    batch[:, :begin] = head
    columns = np.arange(longest)
    known = columns < lengths[:, None]  # (batch, longest)
    batch[:, begin : begin + longest][known] = side.ids[(starts[:, None] + columns)[known]]
    batch[np.arange(len(samples)), begin + lengths] = eos_id
    return batch, lengths + begin + 1
