"""The cache of generation: keys and values of earlier positions, and the newest positions of each bucket."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyheads.nn.attention.cache import CacheStep, KeyValueCache
from manyheads.nn.attention.lsh_hash import keys_of, sort_positions
from manyheads.nn.attention.masks import zero_padding
from manyheads.nn.chunking import chunk_slices
from manyheads.nn.kernels import policy
from manyheads.nn.pytrees import State, register_state

if TYPE_CHECKING:
    from manyheads.nn.attention.settings import LSHSettings
    from manyheads.nn.shapes import Bool, Float, Int


@register_state
@dataclass(frozen=True)
class LSHCache(State):
    """Keys and values of all positions so far, and the newest positions of every bucket of every round.

    A call consumes the cache that it receives: buffers are written in place; `clone()` to branch.

    Shape: past: keys and values of one layer; rings (rows, heads, rounds, buckets + 1, chunk_len) int32: the k-th
        position of a bucket in slot k modulo chunk_len; the last bucket is for padding; caught (rows, heads, rounds,
        buckets + 1) int32: number of positions in a bucket; rotations (heads, head_dim, rounds, directions), without
        rounds for exact attention.
    """

    past: KeyValueCache
    rings: Tensor
    caught: Tensor
    rotations: Tensor

    @classmethod
    def empty(cls, rows: int, num_buckets: int, chunk_len: int, rotations: Tensor, like: Tensor) -> LSHCache:
        """Return a cache without positions; device and dtype of `like`."""
        heads, head_dim, rounds, _ = rotations.shape
        rings = torch.zeros(rows, heads, rounds, num_buckets + 1, chunk_len, dtype=torch.int32, device=like.device)
        caught = torch.zeros(rings.shape[:-1], dtype=torch.int32, device=like.device)
        return cls(KeyValueCache.empty(rows, heads, head_dim, like), rings, caught, rotations)

    @property
    def rows(self) -> int:
        return len(self.rings)

    @property
    def is_empty(self) -> bool:
        return not self.past.columns

    def reorder(self, rows: Tensor, *, together: bool = False) -> LSHCache:
        """Return the rows with these ids, in this order. together: rows share no slots, whatever it says."""
        rows = rows.flatten()
        rings, caught = self.rings.index_select(0, rows), self.caught.index_select(0, rows)
        return replace(self, past=self.past.reorder(rows), rings=rings, caught=caught)

    def reset(self, rows: Bool[Tensor, " rows"]) -> LSHCache:
        """Forget the positions of the marked rows."""
        caught = self.caught.masked_fill(rows[:, None, None, None], 0)
        return replace(self, past=self.past.reset(rows), caught=caught)

    def filled(
        self, qk: Tensor, v: Tensor, buckets: Tensor | None, lengths: Tensor | None, settings: LSHSettings
    ) -> LSHCache:
        """Return this empty cache with its first positions; see `extended` for the arguments."""
        if buckets is not None:
            self._catch_all(buckets)
        return replace(self, past=self.past.append(keys_of(qk, settings.scale, settings.key_eps), v, lengths))

    def _catch_all(self, buckets: Tensor) -> None:
        chunk_len, padding = self.rings.shape[-1], self.rings.shape[-2] - 1
        ordered = sort_positions(buckets, chunk_len)
        caught = self.caught.long().scatter_add_(-1, buckets, torch.ones_like(buckets))
        begins = caught.cumsum(dim=-1) - caught
        length = buckets.shape[-1]  # of what is sorted, the rest fills the last chunk
        order, in_order = ordered.order[..., :length], ordered.buckets[..., :length]
        number = torch.arange(length, device=buckets.device) - begins.gather(-1, in_order)
        old = number < caught.gather(-1, in_order) - chunk_len
        bucket = in_order.masked_fill(old, padding)  # that ring is never read
        self.rings.flatten(-2).scatter_(-1, bucket * chunk_len + number % chunk_len, order.int())
        self.caught.copy_(caught)

    def extended(
        self,
        qk: Float[Tensor, "rows heads new_len head_dim"],
        v: Float[Tensor, "rows heads new_len head_dim"],
        buckets: Int[Tensor, "rows heads rounds new_len"] | None,
        lengths: Int[Tensor, " rows"] | None,
        settings: LSHSettings,
    ) -> tuple[Float[Tensor, "rows heads new_len head_dim"], LSHCache]:
        """Return the outputs of new positions, and the cache with these positions; computed a chunk at a time.

        Args:
            buckets: None: exact attention.
            lengths: real new positions of each row; None: all.
        """
        new_len, keys = qk.shape[2], keys_of(qk, settings.scale, settings.key_eps)
        (step,), past = self.past.prepare(new_len, keys.dtype)
        step.write(keys, v)
        before, parts = self.past.row_lengths(), []
        shift = step.slots.start - before  # position p of a row is in slot p + shift
        # Where all rows begin in the same slot, exact attention of the first positions needs no other keys.
        exact = settings.exact_len if self.past.lengths is None else new_len + step.length
        for some in chunk_slices(new_len, settings.chunk_len):
            query, first, stop = qk[:, :, some], before + some.start, step.length + some.stop
            if buckets is None:
                out = _exactly(query, step, first, shift, stop)
            else:
                caught = buckets[..., some]
                out = self._hashed(query, keys[:, :, some], v[:, :, some], caught, settings, step, first, shift)
                below = first[:, None] + torch.arange(query.shape[2], device=qk.device) < settings.exact_len
                if settings.exact_len and (not policy.can_look(below) or bool(below.any())):
                    of_first = _exactly(query, step, first, shift, min(stop, exact))
                    out = torch.where(below[:, None, :, None], of_first, out)
            parts.append(out)
        out = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
        return zero_padding(out, lengths), replace(self, past=past.after(new_len, lengths))

    def _hashed(
        self,
        qk: Tensor,
        keys: Tensor,
        v: Tensor,
        buckets: Tensor,
        settings: LSHSettings,
        step: CacheStep,
        first: Tensor,
        shift: Tensor,
    ) -> Tensor:
        """Attend from each new position to the last chunk_len ones of its buckets, and write the rings.

        first: position of the first query in each row. shift: slot of each row's position 0.
        """
        count, together, positions = buckets.shape[3], None, first[:, None]
        if count > 1:  # a single new position sees no other new one
            time = torch.arange(count, device=qk.device)
            together = (buckets[..., :, None] == buckets[..., None, :]) & (time[:, None] > time)
            positions = positions + time
        found, allowed = self._caught_before(buckets, positions, together)
        slots = found + shift[:, None, None, None]
        old_keys, old_values = _at((step.key, step.value), slots)
        to_old = _wide(torch.matmul(old_keys, qk[..., None])[..., 0])
        counts, sees_old = allowed.to(to_old.dtype), allowed.any(dim=-1, keepdim=True)
        if settings.correct_duplicates:
            same = (found[..., :, None] == found[..., None, :]) & allowed[..., None, :]
            counts = counts / same.sum(dim=-1).clamp(min=1)
        if together is None:
            to_new = torch.zeros_like(to_old[..., :1]).masked_fill(sees_old, -torch.inf)
        else:
            to_new = _wide(torch.matmul(qk, keys.transpose(-1, -2)))
            new_counts = together.sum(dim=2)
            if settings.correct_duplicates:
                new_counts = new_counts.clamp(max=1)
            alone = ~(sees_old | (new_counts > 0).any(dim=-1, keepdim=True))
            itself = torch.eye(count, dtype=torch.bool, device=qk.device)
            to_new = to_new + torch.where(alone & itself, 0.0, new_counts.to(to_new.dtype).log())
        weights = torch.softmax(torch.cat([to_old + counts.log(), to_new], dim=-1), dim=-1).to(v.dtype)
        of_old, of_new = torch.split(weights, [to_old.shape[-1], count], dim=-1)
        out: Tensor = torch.matmul(of_old[..., None, :], old_values)[..., 0, :] + torch.matmul(of_new, v)
        return out

    def _caught_before(self, buckets: Tensor, positions: Tensor, together: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what the rings hold for each new position, and what of it that position sees; write the rings.

        Args: positions: (rows, new_len). together: of `_hashed`: whether the second new position is an earlier one of
            the same bucket; None: there is one new position.
        Returns: (rows, heads, new_len, rounds x chunk_len) each.
        """
        rows, heads, rounds, count = buckets.shape
        chunk_len = self.rings.shape[-1]
        before = self.caught.gather(-1, buckets)
        turns = torch.arange(chunk_len, device=buckets.device)
        # The newest number below `before` at each slot of the ring; negative where the slot is empty.
        newest = before[..., None] - 1
        number = newest - (newest - turns) % chunk_len
        allowed, number_new = number >= 0, before
        if together is not None:
            number_new = before + together.sum(dim=-1)
            allowed &= number >= number_new[..., None] - chunk_len
        flat = self.rings.flatten(2, 3)
        turn = torch.arange(rounds, device=buckets.device)[:, None] * self.rings.shape[3]
        index = (buckets + turn).flatten(2)[..., None].expand(-1, -1, -1, chunk_len)
        found = flat.gather(2, index).view(rows, heads, rounds, count, chunk_len) * allowed
        self.rings.flatten(-2).scatter_(
            -1,
            buckets * chunk_len + number_new % chunk_len,
            positions.int()[:, None, None].expand(-1, heads, rounds, -1),
        )
        self.caught.scatter_add_(-1, buckets, torch.ones_like(buckets, dtype=torch.int32))
        return found.transpose(2, 3).flatten(3).long(), allowed.transpose(2, 3).flatten(3)


def _exactly(qk: Tensor, step: CacheStep, first: Tensor, shift: Tensor, stop: int) -> Tensor:
    """Attend from each new position to all earlier ones among the first `stop` keys.

    first: position of the first query in each row; shift: slot of each row's position 0.
    """
    keys, values = step.filled()
    positions = first[:, None] + torch.arange(qk.shape[2], device=qk.device)
    reach = step.slots.first + torch.arange(stop, device=qk.device) - shift[:, None]
    allowed = (reach >= 0)[:, None] & (reach[:, None] < positions[:, :, None])
    alone = reach[:, None] == positions[:, :, None]
    allowed = (allowed | (alone & (positions == 0)[:, :, None]))[:, None]
    scores = _wide(torch.matmul(qk, keys[:, :, :stop].transpose(-1, -2)))
    # The results of queries from `stop` on are discarded.
    weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), dim=-1)
    return torch.matmul(weights.to(qk.dtype), values[:, :, :stop])


def _at(buffers: tuple[Tensor, Tensor], slots: Tensor) -> list[Tensor]:
    """(rows, heads, new_len, found) -> (rows, heads, new_len, found, head_dim), of keys and of values"""
    rows, heads, capacity, _ = buffers[0].shape
    first = torch.arange(rows * heads, device=slots.device).view(rows, heads, 1, 1) * capacity
    index = (first + slots).flatten()
    return [one.flatten(0, 2).index_select(0, index).view(*slots.shape, one.shape[3]) for one in buffers]


def _wide(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
