"""The cache of generation: keys and values of earlier positions, and the newest positions of each bucket."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyheads.nn.attention.lsh_hash import keys_of, sort_positions
from manyheads.nn.attention.lsh_settings import LSHSettings
from manyheads.nn.attention.masks import zero_padding
from manyheads.nn.attention.state import State, register_state
from manyheads.nn.chunking import real_chunks
from manyheads.nn.shapes import Bool, Float, Int


@register_state
@dataclass(frozen=True)
class LSHCache(State):
    """Keys and values of all positions so far, and the newest positions of every bucket of every round.

    A call consumes the cache that it receives: buffers are written in place; `clone()` to branch.

    Shape: keys, values (rows, heads, capacity, head_dim), filled up to each row's length; rings (rows, heads, rounds,
        buckets + 1, chunk_len) int32: the k-th position of a bucket in slot k modulo chunk_len; the last bucket
        is for padding; caught (rows, heads, rounds, buckets + 1) int32: number of positions in a bucket; rotations
        (heads, head_dim, rounds, directions), without rounds for exact attention; lengths (rows,) int64; longest ()
        int64 on the CPU: no row has more positions.
    """

    keys: Tensor
    values: Tensor
    rings: Tensor
    caught: Tensor
    rotations: Tensor
    lengths: Tensor
    longest: Tensor

    @classmethod
    def empty(cls, rows: int, num_buckets: int, chunk_len: int, rotations: Tensor, like: Tensor) -> LSHCache:
        """Return a cache without positions; device and dtype of `like`."""
        heads, head_dim, rounds, _ = rotations.shape
        none = like.new_empty(rows, heads, 0, head_dim)
        rings = torch.zeros(rows, heads, rounds, num_buckets + 1, chunk_len, dtype=torch.int32, device=like.device)
        return cls(
            keys=none,
            values=none,
            rings=rings,
            caught=torch.zeros(rings.shape[:-1], dtype=torch.int32, device=like.device),
            rotations=rotations,
            lengths=torch.zeros(rows, dtype=torch.int64, device=like.device),
            longest=torch.zeros((), dtype=torch.int64, device="cpu"),
        )

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def is_empty(self) -> bool:
        return not int(self.longest)

    def reorder(self, rows: Tensor) -> LSHCache:
        """Return the rows with these ids, (new_rows,), in this order."""
        return replace(
            self,
            keys=self.keys.index_select(0, rows),
            values=self.values.index_select(0, rows),
            rings=self.rings.index_select(0, rows),
            caught=self.caught.index_select(0, rows),
            lengths=self.lengths.index_select(0, rows),
        )

    def reset(self, rows: Bool[Tensor, " rows"]) -> LSHCache:
        """Forget the positions of the marked rows."""
        caught, lengths = self.caught.masked_fill(rows[:, None, None, None], 0), self.lengths.masked_fill(rows, 0)
        # Otherwise the buffers would grow with all positions that were ever written.
        longest = lengths.max().cpu() if len(lengths) else self.longest
        return replace(self, lengths=lengths, caught=caught, longest=longest)

    def filled(
        self, qk: Tensor, v: Tensor, buckets: Tensor | None, lengths: Tensor | None, settings: LSHSettings
    ) -> LSHCache:
        """Return this empty cache with its first positions; see `extended` for the arguments."""
        cache = self._written(keys_of(qk, settings.scale, settings.key_eps), v)
        if buckets is not None:
            cache._catch_all(buckets)
        return cache._longer(qk.shape[2], lengths)

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
        cache, parts = self, []
        for some, real in real_chunks(qk.shape[2], settings.chunk_len, lengths):
            caught = None if buckets is None else buckets[..., some]
            out, cache = cache._extended(qk[:, :, some], v[:, :, some], caught, real, settings)
            parts.append(out)
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0], cache

    def _extended(
        self, qk: Tensor, v: Tensor, buckets: Tensor | None, lengths: Tensor | None, settings: LSHSettings
    ) -> tuple[Tensor, LSHCache]:
        keys = keys_of(qk, settings.scale, settings.key_eps)
        cache = self._written(keys, v)
        if buckets is None:
            out = cache._exactly(qk, int(self.longest) + qk.shape[2])
        else:
            out = cache._hashed(qk, keys, v, buckets, settings)
            exact = min(settings.exact_len, int(self.longest) + qk.shape[2])
            if exact:
                below = self.lengths[:, None] + torch.arange(qk.shape[2], device=qk.device) < settings.exact_len
                out = torch.where(below[:, None, :, None], cache._exactly(qk, exact), out)
        return zero_padding(out, lengths), cache._longer(qk.shape[2], lengths)

    def _exactly(self, qk: Tensor, end: int) -> Tensor:
        """Attend from each new position to all earlier ones among the first `end`."""
        positions = self.lengths[:, None] + torch.arange(qk.shape[2], device=qk.device)
        reach = torch.arange(end, device=qk.device)
        allowed = reach < positions[:, :, None]
        alone = reach == positions[:, :, None]
        allowed = (allowed | (alone & (positions == 0)[:, :, None]))[:, None]
        scores = _wide(torch.matmul(qk, self.keys[:, :, :end].transpose(-1, -2)))
        # The results of queries from `end` on are discarded.
        weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), dim=-1)
        return torch.matmul(weights.to(qk.dtype), self.values[:, :, :end])

    def _hashed(self, qk: Tensor, keys: Tensor, v: Tensor, buckets: Tensor, settings: LSHSettings) -> Tensor:
        """Attend from each new position to the last chunk_len ones of its buckets, and write the rings."""
        rows, heads, rounds, count = buckets.shape
        chunk_len = self.rings.shape[-1]
        time = torch.arange(count, device=qk.device)
        together = (buckets[..., :, None] == buckets[..., None, :]) & (time[:, None] > time)
        ahead = together.sum(dim=-1)  # new positions before it in its bucket
        before = self.caught.gather(-1, buckets)
        slots = torch.arange(chunk_len, device=qk.device)
        # The newest number below `before` at each slot of the ring; negative where the slot is empty.
        number = before[..., None] - 1 - (before[..., None] - 1 - slots) % chunk_len
        number = torch.where(before[..., None] > 0, number, -1)
        allowed = (number >= 0) & (number >= (before + ahead)[..., None] - chunk_len)
        flat = self.rings.flatten(2, 3)
        turn = torch.arange(rounds, device=qk.device)[:, None] * self.rings.shape[3]
        index = (buckets + turn).flatten(2)[..., None].expand(-1, -1, -1, chunk_len)
        found = flat.gather(2, index).view(rows, heads, rounds, count, chunk_len)
        number_new = before + ahead
        self.rings.flatten(-2).scatter_(
            -1,
            buckets * chunk_len + number_new % chunk_len,
            (self.lengths[:, None] + time).int()[:, None, None].expand(-1, heads, rounds, -1),
        )
        self.caught.scatter_add_(-1, buckets, torch.ones_like(buckets, dtype=torch.int32))
        # (rows, heads, new_len, rounds x chunk_len)
        found = torch.where(allowed, found, 0).transpose(2, 3).flatten(3).long()
        allowed = allowed.transpose(2, 3).flatten(3)
        old_keys, old_values = self._at(self.keys, found), self._at(self.values, found)
        to_old = _wide(torch.matmul(old_keys, qk[..., None])[..., 0])
        to_new = _wide(torch.matmul(qk, keys.transpose(-1, -2)))
        new_counts = together.sum(dim=2)
        old_counts = allowed.to(to_old.dtype)
        if settings.correct_duplicates:
            new_counts = new_counts.clamp(max=1)
            same = (found[..., :, None] == found[..., None, :]) & allowed[..., None, :]
            old_counts = old_counts / same.sum(dim=-1).clamp(min=1)
        alone = ~(allowed.any(dim=-1, keepdim=True) | (new_counts > 0).any(dim=-1, keepdim=True))
        itself = torch.eye(count, dtype=torch.bool, device=qk.device)
        shown = torch.where(alone & itself, 0.0, new_counts.to(to_new.dtype).log())
        weights = torch.softmax(torch.cat([to_old + old_counts.log(), to_new + shown], dim=-1), dim=-1).to(v.dtype)
        of_old, of_new = torch.split(weights, [to_old.shape[-1], count], dim=-1)
        out: Tensor = torch.matmul(of_old[..., None, :], old_values)[..., 0, :] + torch.matmul(of_new, v)
        return out

    @staticmethod
    def _at(buffer: Tensor, positions: Tensor) -> Tensor:
        """(rows, heads, new_len, found) -> (rows, heads, new_len, found, head_dim)"""
        rows, heads, _, width = buffer.shape
        first = torch.arange(rows * heads, device=buffer.device).view(rows, heads, 1, 1) * buffer.shape[2]
        return buffer.flatten(0, 2).index_select(0, (first + positions).flatten()).view(*positions.shape, width)

    def _written(self, keys: Tensor, values: Tensor) -> LSHCache:
        """Return the cache with new keys and values at the end of each row, and the old lengths."""
        count = keys.shape[2]
        needed, old = int(self.longest) + count, int(self.longest)
        key_buffer, value_buffer = self.keys, self.values
        if needed > key_buffer.shape[2] or key_buffer.dtype != keys.dtype:
            capacity = max(16, needed, 2 * key_buffer.shape[2])
            key_buffer, value_buffer = (
                _grown(key_buffer, keys, capacity, old),
                _grown(value_buffer, values, capacity, old),
            )
        rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
        positions = self.lengths[:, None] + torch.arange(count, device=keys.device)
        key_buffer[rows, :, positions] = keys.transpose(1, 2)
        value_buffer[rows, :, positions] = values.transpose(1, 2)
        return replace(self, keys=key_buffer, values=value_buffer)

    def _longer(self, count: int, lengths: Tensor | None) -> LSHCache:
        added = count if lengths is None else lengths
        return replace(self, lengths=self.lengths + added, longest=self.longest + count)


def _grown(buffer: Tensor, new: Tensor, capacity: int, filled: int) -> Tensor:
    grown = new.new_zeros(*new.shape[:2], capacity, new.shape[3])
    if filled:
        grown[:, :, :filled] = buffer[:, :, :filled]
    return grown


def _wide(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
