"""The state of a Reformer between calls: the seed of its hashes, and in generation the caches of earlier tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyheads.errors import ShapeError
from manyheads.nn.attention.cache import KeyValueCache
from manyheads.nn.attention.lsh_cache import LSHCache
from manyheads.nn.pytrees import State, register_state
from manyheads.nn.shapes import Bool, Int

Cache = LSHCache | KeyValueCache


@register_state
@dataclass(frozen=True)
class ReformerState(State):
    """The state of a Reformer; see `Reformer.start`.

    Shape: hash_seed () int64 on the CPU: seed of the next training call's rotations; positions (lanes,) int64: number
        of tokens read, if there are caches; caches: one per layer; empty: every call begins a new sequence.
    """

    hash_seed: Tensor
    positions: Tensor
    caches: tuple[Cache, ...] = ()

    def with_next_seed(self) -> ReformerState:
        """Return the state for the next training call. Consecutive seeds are hashed before they are used."""
        return replace(self, hash_seed=(self.hash_seed + 1) & (2**63 - 1))

    def after(self, new_len: int, lengths: Tensor | None, caches: tuple[Cache, ...]) -> ReformerState:
        """Return the state after new_len more tokens, of which `lengths` are real in each lane."""
        return replace(self, positions=self.positions + (new_len if lengths is None else lengths), caches=caches)

    def reset(self, lanes: Bool[Tensor, " lanes"]) -> ReformerState:
        """Empty the caches of the lanes marked True. The hash seed is kept.

        Raises: ShapeError: the number of marks differs from the number of lanes.
        """
        if lanes.shape != self.positions.shape:
            raise ShapeError(
                f"{tuple(lanes.shape)} marks do not fit {len(self.positions)} lanes; give one mark per lane."
            )
        lanes = lanes.to(self.positions.device)
        caches = tuple(cache.reset(lanes) for cache in self.caches)
        return replace(self, positions=self.positions.masked_fill(lanes, 0), caches=caches)

    def reorder(self, rows: Int[Tensor, "*rows"]) -> ReformerState:
        """Return the lanes with these ids, in this order; see `protocols.SearchState.reorder`."""
        rows = rows.flatten()
        caches = tuple(cache.reorder(rows) for cache in self.caches)
        return replace(self, positions=self.positions.index_select(0, rows), caches=caches)


def seed_tensor(seed: int) -> Tensor:
    """Return a hash seed as a state stores it."""
    return torch.tensor(seed, dtype=torch.int64, device="cpu")
