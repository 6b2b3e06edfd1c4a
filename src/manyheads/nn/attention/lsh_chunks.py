"""Hashed attention chunk by chunk, in memory that does not grow with the number of scores.

Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 2, fig. 2: sort by bucket, cut into chunks, attend to the own chunk
and its neighbours. The rounds' outputs, weighted by their shares of the normaliser (eq. 6), are one softmax over the
pairs of all rounds: so each round adds exp(score) times value, and exp(score), to sums that are divided at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.nn.attention.lsh_hash import sort_positions
from manyheads.nn.attention.lsh_settings import LSHSettings
from manyheads.nn.chunking import chunk_slices
from manyheads.nn.kernels.dropout import scaled_mask

__all__ = ["chunked_attention", "ranks_of", "sorting_order"]

# Scores worked on at once on a CPU: in bfloat16 they stay in a core's own cache from one operation to the next.
_TILE_NUMBERS = 1 << 19
# The same where there is no such cache.
_TILE_NUMBERS_ELSEWHERE = 1 << 26
# Places (rows x rounds x length) whose results exist, sorted, at once; a row's at least.
_GROUP_PLACES = 1 << 16
# Positions of a row that are worked on at once in float32, where that is done to all of them.
_PIECE_LEN = 1 << 13
# Up to this bound on all scores they need no shift before exp: e^60 and e^-60, and sums of thousands of them, are well
# within the range of float32 and of bfloat16.
_SAFE_SCORE = 60.0
# Where nothing is to be seen: exp of it is 0.
_NOTHING = -1e9
# Codes of marks multiply to 128 a bit where they agree and to -128 where they do not: e^(60 - 256) is 0.
_CODE_QUERY, _CODE_KEY = 8.0, 16.0


def sorting_order(
    buckets: Int[Tensor, "batch heads rounds length"],
    settings: LSHSettings,
    lengths: Int[Tensor, " batch"] | None = None,
) -> Int[Tensor, "batch heads rounds places"]:
    """All that `chunked_attention` needs to know of buckets: who stands where, and where a bucket ends.

    Returns: int32; at each place of the sorted sequence, padded to whole chunks, twice the position that stands there,
        plus 1 where its bucket is not that of the place before. Padding stands last, in its own order.
    """
    length = buckets.shape[3]
    if lengths is not None:
        padding = (torch.arange(length, device=buckets.device) >= lengths[:, None])[:, None, None]
        buckets = torch.where(padding, buckets.amax() + 1, buckets)
    ordered = sort_positions(buckets, settings.chunk_len)
    changes = F.pad(ordered.buckets[..., 1:] != ordered.buckets[..., :-1], (1, 0))
    return (2 * ordered.order + changes).int()


def ranks_of(order: Int[Tensor, "batch heads rounds places"], length: int) -> Int[Tensor, "batch heads rounds length"]:
    """Buckets that give this `sorting_order`, numbered without gaps."""
    marks = (order & 1).cumsum(-1)
    return marks.gather(-1, _places(order, length))


def _places(order: Tensor, length: int) -> Tensor:
    """Where each position stands, int64."""
    numbers = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(numbers).scatter_(-1, (order >> 1).long(), numbers)[..., :length]


def chunked_attention(
    qk: Float[Tensor, "batch heads length head_dim"],
    v: Float[Tensor, "batch heads length value_dim"],
    order: Int[Tensor, "batch heads rounds places"],
    settings: LSHSettings,
    lengths: Int[Tensor, " batch"] | None = None,
    dropout_rate: float = 0.0,
    known: tuple[Tensor, ...] = (),
) -> tuple[Float[Tensor, "batch heads length value_dim"], tuple[Tensor, ...]]:
    """See `lsh_attention`.

    Args:
        order: of `sorting_order`, with the same lengths.
        dropout_rate: a query that sees nothing keeps its own value whatever the rate.
        known: what an earlier call with the same arguments, up to rounding, returned second: nothing is computed but,
            in time, gradients.

    Returns: the output, and what makes another call's forward pass unnecessary: the output again and a number a query.
    Cost: time rounds x length x chunk_len; memory rounds x length x width for a few heads at a time; for the backward
        pass inputs, output and a whole number a round and position.
    """
    keeps = torch.is_grad_enabled() and (qk.requires_grad or v.requires_grad)
    if not keeps:
        qk, v = qk.detach(), v.detach()
    seed = int(torch.randint(1 << 62, ())) if dropout_rate else 0
    arguments = (qk, v, order, settings, lengths, dropout_rate, seed, keeps, known)
    out, *rest = _ChunkedAttention.apply(*arguments)  # type: ignore[no-untyped-call]
    return out, (out.detach(), *rest)


class _ChunkedAttention(torch.autograd.Function):
    """Keeps no scores: the backward pass makes them again, already normalised."""

    @staticmethod
    def forward(
        ctx: Any,
        qk: Tensor,
        v: Tensor,
        order: Tensor,
        settings: LSHSettings,
        lengths: Tensor | None,
        rate: float,
        seed: int,
        keeps: bool,
        known: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        if known:
            out, log_sums, alone, safe = known
        else:
            with torch.autocast(qk.device.type, enabled=False):
                layout = _lay_out(order, qk.shape[2], lengths)
                inputs = _Inputs.of(qk, v, settings, safe=None)
                out, log_sums, alone = _forward(_groups(inputs, layout, settings, rate, seed), inputs)
                safe = torch.tensor(inputs.safe)
        out = out.view(v.shape)
        if keeps:
            ctx.save_for_backward(qk, v, out, log_sums, alone, order, lengths)
            ctx.settings, ctx.rate, ctx.seed, ctx.safe = settings, rate, seed, bool(safe)
        rest = tuple(one.view_as(one) for one in (log_sums, alone, safe))  # new ones: outputs belong to one graph
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)
        return out, *rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        qk, v, out, log_sums, alone, order, lengths = ctx.saved_tensors
        with torch.autocast(qk.device.type, enabled=False):
            inputs = _Inputs.of(qk, v, ctx.settings, ctx.safe)
            layout = _lay_out(order, qk.shape[2], lengths)
            groups = _groups(inputs, layout, ctx.settings, ctx.rate, ctx.seed)
            grad_qk, grad_v = _backward(groups, inputs, out.flatten(0, 1), log_sums, alone, grad_out.flatten(0, 1))
        return grad_qk.view(qk.shape).to(qk.dtype), grad_v.view(v.shape).to(v.dtype), *[None] * 7


@dataclass(frozen=True)
class _Layout:
    """Who stands where once sorted; rows are batch x heads.

    Shape: order (rows, rounds, places): the position at a place, or `length` where there is none; marks (rows, rounds,
        places): numbers that tell a bucket from those near it; places (rows, rounds, length): where a position stands;
        real (rows, length) bool, or empty where all are.
    """

    order: Tensor
    marks: Tensor
    places: Tensor
    real: Tensor


def _lay_out(order: Tensor, length: int, lengths: Tensor | None) -> _Layout:
    heads = order.shape[1]
    order = order.flatten(0, 1)
    positions = (order >> 1).clamp(max=length)
    real = torch.empty(0, dtype=torch.bool, device=order.device)
    if lengths is not None:
        each = lengths.repeat_interleave(heads)
        real = torch.arange(length, device=order.device) < each[:, None]
        positions = positions.masked_fill(positions >= each[:, None, None], length)
    marks = (order & 1).cumsum(-1, dtype=torch.int32)
    return _Layout(positions, marks, _places(order, length).int(), real)


@dataclass
class _Inputs:
    """Queries, keys and values by row. Shape: q, k (rows, length, head_dim), v (rows, length, value_dim), all of one
    type; factors (rows, length, 1): q times it is k. safe: no score is above `_SAFE_SCORE`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    factors: Tensor
    safe: bool

    @classmethod
    def of(cls, qk: Tensor, v: Tensor, settings: LSHSettings, safe: bool | None) -> _Inputs:
        known = (torch.bfloat16, torch.float32, torch.float64)
        compute = qk.dtype if qk.dtype in known else torch.float32
        q = qk.to(compute).flatten(0, 1)
        k = torch.empty_like(q)
        factors = q.new_empty(*q.shape[:2], 1, dtype=torch.promote_types(compute, torch.float32))
        # In pieces, since in a wider type they take as much again and more.
        for piece, key, factor in _pieces(q, k, factors):
            wide = piece.to(factor.dtype)
            torch.sum(wide.square(), dim=-1, keepdim=True, out=factor)
            factor.add_(settings.key_eps * q.shape[-1]).rsqrt_().mul_(settings.scale)
            torch.mul(wide, factor, out=key)
        if safe is None:
            longest = factors.amin().reciprocal() * settings.scale if q.numel() else factors.new_zeros(())
            safe = bool(longest * settings.scale <= _SAFE_SCORE)
        return cls(q, k, v.to(compute).flatten(0, 1), factors, safe)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same parts, (1, some, width), of tensors of (rows, length, width); all at once on a device."""
    rows, length = tensors[0].shape[:2]
    if tensors[0].device.type != "cpu":
        yield tensors
        return
    for row in range(rows):
        for some in chunk_slices(length, _PIECE_LEN):
            yield tuple(one[row : row + 1, some] for one in tensors)


@dataclass
class _Group:
    """Some rows, sorted: makes the weights of a few chunks at a time.

    Chunks of all rows and rounds stand in one line. A query chunk has `len(offsets)` key chunks.
    """

    settings: LSHSettings
    layout: _Layout
    rows: slice
    length: int
    coded: bool
    dtype: torch.dtype
    rate: float
    seed: int
    index: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    marks: Tensor = field(init=False)
    num_rows: int = field(init=False)
    num_chunks: int = field(init=False)
    _scratch: dict[str, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        order, marks = self.layout.order[self.rows], self.layout.marks[self.rows]
        self.num_rows, rounds, places = order.shape
        self.chunk_len = self.settings.chunk_len
        self.a_round = places // self.chunk_len
        self.num_chunks = self.num_rows * rounds * self.a_round
        first = torch.arange(self.num_rows, device=order.device, dtype=torch.int32)[:, None, None] * self.length
        self.nobody = self.num_rows * self.length
        index = torch.where(order < self.length, order + first, self.nobody)
        turns = torch.arange(self.num_rows * rounds, device=order.device, dtype=torch.int32).view(-1, rounds, 1)
        self.offsets = tuple(range(-self.settings.chunks_before, self.settings.chunks_after + 1))
        # One chunk more, the last: of nobody.
        self.index = self._lined(index, self.nobody)
        self.positions = self._lined(torch.where(order < self.length, order, 1 << 30), 1 << 30)
        if self.settings.visible == "bucket":
            # Two neighbouring chunks hold 2 chunk_len buckets at most; neighbouring rounds differ in one bit more.
            bits = max(1, (2 * self.chunk_len - 1).bit_length())
            self.bits = bits + 1
            marks = marks % (1 << bits) + (turns % 2 << bits)
            self.marks = self._lined(marks, 1 << self.bits)
        else:
            self.marks = self._lined(marks + turns * (places + 1), -1)
            self.neighbours = [self._neighbours(offset, rounds) for offset in self.offsets]
        if self.coded:
            numbers = torch.arange(1 << self.bits, device=order.device)[:, None]
            signs = (numbers >> torch.arange(self.bits, device=order.device) & 1) * 2.0 - 1
            self.codes = F.pad(signs, (0, 0, 0, 1)).to(self.dtype)  # nobody's is 0: it agrees with none
        if self.settings.correct_duplicates:
            self._note_meetings(rounds)
        here = torch.arange(self.chunk_len, device=order.device)
        before, within = here[:, None] <= here, here[:, None] > here
        self.band = torch.stack([before, within])[:, None]  # of visible "bucket": the chunk before, the own
        self.hidden = torch.where(self.band, -_CODE_QUERY * _CODE_KEY * getattr(self, "bits", 0), _NOTHING).to(
            self.dtype
        )

    def _lined(self, x: Tensor, nobody: int) -> Tensor:
        """(rows, rounds, places) -> (chunks + 1, chunk_len)"""
        return F.pad(x.reshape(-1, self.chunk_len), (0, 0, 0, 1), value=nobody)

    def _neighbours(self, offset: int, rounds: int) -> Tensor:
        """The chunk at an offset from every chunk; `num_chunks` where there is none."""
        settings, device = self.settings, self.layout.order.device
        chunk = torch.arange(self.num_chunks, device=device)
        ring = self.a_round * rounds if settings.look_across_rounds else self.a_round
        place = chunk % ring + offset
        if settings.wrap:
            return chunk - chunk % ring + place % ring
        return torch.where((place >= 0) & (place < ring), chunk + offset, self.num_chunks)

    def _note_meetings(self, rounds: int) -> None:
        """Of every position and round its place (or chunk) and its bucket, to count where a pair meets."""
        places = self.layout.places[self.rows].long()
        turns = torch.arange(self.num_rows * rounds, device=places.device).view(-1, rounds, 1)
        lined = places + turns * (self.a_round * self.chunk_len)
        marks = self.marks[:-1].reshape(-1)[lined]
        if self.settings.visible == "chunk":
            lined = lined // self.chunk_len
        # (rows x length + 1, rounds) each
        self.stands = F.pad(lined.transpose(1, 2).reshape(-1, rounds), (0, 0, 0, 1), value=-(1 << 40))
        self.of_bucket = F.pad(marks.transpose(1, 2).reshape(-1, rounds), (0, 0, 0, 1), value=-2)

    def tiles(self) -> Iterator[slice]:
        """Chunks to work on at once."""
        device = self.layout.order.device
        most = _TILE_NUMBERS if device.type == "cpu" else _TILE_NUMBERS_ELSEWHERE
        step = max(1, most // (self.chunk_len**2 * len(self.offsets)))
        return (slice(first, min(first + step, self.num_chunks)) for first in range(0, self.num_chunks, step))

    def keys(self, tile: slice) -> list[Any]:
        """What `take` takes the key chunks by, an offset each."""
        if self.settings.visible == "chunk":
            return [neighbours[tile] for neighbours in self.neighbours]
        return [slice(tile.start - 1, tile.stop - 1), tile]

    def take(self, table: Tensor, chunks: Any) -> Tensor:
        """Rows of a table, (rows x length + 1, width), as chunks: (chunks, chunk_len, width)."""
        index = self._of(self.index, chunks)
        return table.index_select(0, index.reshape(-1)).view(*index.shape, table.shape[1])

    def take_keys(self, table: Tensor, tile: slice) -> list[Tensor]:
        if self.settings.visible == "chunk":
            return [self.take(table, chunks) for chunks in self.keys(tile)]
        both = self.take(table, slice(tile.start - 1, tile.stop))
        return [both[:-1], both[1:]]

    def _of(self, lined: Tensor, chunks: Any) -> Tensor:
        if isinstance(chunks, slice) and chunks.start < 0:
            return torch.cat([lined[-1:], lined[: chunks.stop]])
        return lined[chunks]

    def operands(self, tile: slice, queries: Tensor, keys: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Query chunks and the key chunks of each offset, from tables that have room for codes where they are coded."""
        q = self.take(queries, tile)
        if not self.coded:
            return q, self.take_keys(keys, tile)
        around = slice(tile.start - 1, tile.stop)
        both, marks = self.take(keys, around), self._of(self.marks, around)
        codes = self.codes.index_select(0, marks.reshape(-1)).view(*marks.shape, self.bits)
        torch.mul(codes[1:], _CODE_QUERY, out=q[..., q.shape[2] - self.bits :])
        torch.mul(codes, _CODE_KEY, out=both[..., both.shape[2] - self.bits :])
        return q, [both[:-1], both[1:]]

    def scores(self, q: Tensor, keys: list[Tensor]) -> Tensor:
        """(offsets, chunks, chunk_len, chunk_len), of `operands`; where they are coded, hidden ones are far below 0."""
        scores = self.scratch("scores", len(q))
        for at, key in enumerate(keys):
            if self.coded:
                hidden = self.hidden[at].expand(len(q), -1, -1)
                torch.baddbmm(hidden, q, key.transpose(1, 2), out=scores[at])
            else:
                torch.bmm(q, key.transpose(1, 2), out=scores[at])
        return scores

    def scratch(self, name: str, num_chunks: int) -> Tensor:
        """Room for a tile of scores, the same from tile to tile: fresh memory costs more than what is done with it."""
        found = self._scratch.get(name)
        if found is None or found.shape[1] != num_chunks:
            shape = (len(self.offsets), num_chunks, self.chunk_len, self.chunk_len)
            found = torch.empty(shape, dtype=self.dtype, device=self.index.device)
            self._scratch[name] = found
        return found

    def weights(self, tile: slice, q: Tensor, keys: list[Tensor]) -> Tensor:
        """exp(scores), 0 where nothing is to be seen; in the room of the scores."""
        scores = self.scores(q, keys)
        if not self.coded:
            # What is hidden may be far higher than what is seen: it must stay finite, so that 0 times it is 0.
            scores.clamp_(max=_SAFE_SCORE)
        weights = scores.exp_()
        counts = self.counts(tile)
        return weights if counts is None else weights.mul_(counts)

    def counts(self, tile: slice) -> Tensor | None:
        """How much each pair counts: like `scores`; None where the codes say it all."""
        if self.coded and not self.settings.correct_duplicates:
            return None
        settings = self.settings
        own_positions, own_marks = self.positions[tile][:, :, None], self.marks[tile][:, :, None]
        parts = []
        for at, chunks in enumerate(self.keys(tile)):
            marks = self._of(self.marks, chunks)[:, None]
            if settings.visible == "bucket":
                seen = (own_marks == marks) & self.band[at]
            else:
                positions = self._of(self.positions, chunks)[:, None]
                seen = positions < own_positions if settings.causal else positions != own_positions
                seen = seen & (positions < 1 << 30)
                if settings.within_bucket:
                    seen = seen & (own_marks == marks)
            weight = seen.to(self.dtype)
            if settings.correct_duplicates:
                weight /= self._meetings(tile, chunks).clamp(min=1).to(self.dtype)
            parts.append(weight)
        return torch.stack(parts)

    def _meetings(self, tile: slice, chunks: Any) -> Tensor:
        """In how many places over all rounds each pair meets. Cost: a pass over the pairs a round, and more than one
        where a round looks into others.
        """
        own, other = self.index[tile], self._of(self.index, chunks)
        stands, other_stands = self.stands[own][:, :, None], self.stands[other][:, None]
        of_bucket, other_bucket = self.of_bucket[own][:, :, None], self.of_bucket[other][:, None]
        rounds = stands.shape[-1]
        count = torch.zeros(*stands.shape[:2], other.shape[1], dtype=torch.int32, device=own.device)
        for turn in range(rounds):
            here = stands[..., turn]
            if self.settings.visible == "bucket":
                apart = here - other_stands[..., turn]
                together = of_bucket[..., turn] == other_bucket[..., turn]
                count += together & (apart > 0) & (apart <= self.chunk_len)
                continue
            for neighbours in self.neighbours:
                wanted = F.pad(neighbours, (0, 1), value=-1)[here.clamp(min=0)]
                for other_turn in range(rounds) if self.settings.look_across_rounds else [turn]:
                    met = wanted == other_stands[..., other_turn]
                    if self.settings.within_bucket:
                        met = met & (of_bucket[..., turn] == other_bucket[..., other_turn])
                    count += met
        return count

    def kept(self, tile: slice, like: Tensor) -> Tensor | None:
        """The dropout of a tile's weights: the same whenever it is asked for."""
        if not self.rate:
            return None
        number = self.seed + self.rows.start * 1_000_003 + tile.start
        return scaled_mask(like, self.rate, torch.Generator(like.device).manual_seed(number % (1 << 63)))

    def real(self, x: Tensor) -> Tensor:
        """x, (rows, length, width), with zeros at padding."""
        real = self.layout.real
        return x * real[self.rows][..., None].to(x.dtype) if real.numel() else x

    def unsorted(self, lined: Tensor) -> Tensor:
        """Sums over the rounds, by position. lined: (chunks, chunk_len, width) -> (rows x length, width)."""
        places = self.layout.places[self.rows]
        rows, rounds, length = places.shape
        first = torch.arange(rows * rounds, device=places.device, dtype=torch.int32).view(rows, rounds, 1)
        where = (places + first * (self.a_round * self.chunk_len)).transpose(1, 2).reshape(rows * length, rounds)
        # Both add in float32 at least, and round once.
        if lined.device.type == "cpu" and not _has_bags():
            return lined.flatten(0, 1)[where.long()].sum(1)
        return F.embedding_bag(where.contiguous(), lined.flatten(0, 1), mode="sum")


@cache
def _has_bags() -> bool:
    """Whether torch's sums of chosen rows work here; its library for CPUs cannot start without /proc/cpuinfo."""
    try:
        F.embedding_bag(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1), mode="sum")
    except RuntimeError:
        return False
    return True


def _groups(inputs: _Inputs, layout: _Layout, settings: LSHSettings, rate: float, seed: int) -> Iterator[_Group]:
    rows, length = inputs.q.shape[:2]
    step = max(1, _GROUP_PLACES // max(1, layout.order.shape[1] * layout.order.shape[2]))
    if inputs.q.device.type != "cpu":
        step = max(1, rows)
    coded = settings.visible == "bucket" and inputs.q.dtype == torch.bfloat16 and inputs.safe
    for first in range(0, rows, step):
        some = slice(first, min(first + step, rows))
        yield _Group(settings, layout, some, length, coded, inputs.q.dtype, rate, seed)


def _columns(dtype: torch.dtype) -> int:
    """How many numbers of a type stand for one of float32 (or float64)."""
    return 3 if dtype == torch.bfloat16 else 1


def _table(x: Tensor, extra: Tensor | float | None, codes: int) -> Tensor:
    """x, (rows, length, width), as the rows of a table with one of zeros behind them; the numbers `extra`, (rows,
    length) or one for all, in more columns; room for codes in the last.

    The product of two such tables' rows has the numbers' product in it, in float32: what is subtracted from scores.
    """
    rows, length, width = x.shape
    parts = 0 if extra is None else _columns(x.dtype)
    total = width + parts + codes
    table = x.new_zeros(rows * length + 1, -(-total // 16) * 16 if x.dtype == torch.bfloat16 else total)
    table[:-1, :width] = x.flatten(0, 1)
    if isinstance(extra, Tensor):
        rest = extra.flatten()
        for column in range(width, width + parts):
            part = rest.to(x.dtype)
            table[:-1, column] = part
            rest = rest - part
    elif extra is not None:
        table[:, width : width + parts] = extra
    return table


def _forward(groups: Iterator[_Group], inputs: _Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The output (rows, length, value_dim); the logarithm of each position's sum, and whether it sees nothing, (rows,
    length).
    """
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    out = torch.empty_like(inputs.v)
    log_sums = inputs.q.new_empty(inputs.q.shape[:2], dtype=wide)
    alone = torch.empty_like(log_sums, dtype=torch.bool)
    for group in groups:
        q, k, v = inputs.q[group.rows], inputs.k[group.rows], inputs.v[group.rows]
        codes = group.bits if group.coded else 0
        shift = None if inputs.safe else _highest(group, q, k)
        queries = _table(q, None if shift is None else -shift, codes)
        keys, values = _table(k, None if shift is None else 1.0, codes), _table(v, None, 0)
        lined = values.new_empty(group.num_chunks, group.chunk_len, values.shape[1])
        sums = values.new_empty(group.num_chunks, group.chunk_len, 1, dtype=wide)
        for tile in group.tiles():
            weights = group.weights(tile, *group.operands(tile, queries, keys))
            sums[tile] = weights.sum(dim=-1, keepdim=True, dtype=wide).sum(dim=0)
            kept = group.kept(tile, weights)
            if kept is not None:
                weights *= kept
            first, *others = zip(weights, group.take_keys(values, tile), strict=True)
            torch.bmm(*first, out=lined[tile])
            for one, value in others:
                lined[tile].baddbmm_(one, value)
        sums = group.unsorted(sums)
        nothing = sums == 0
        attended = group.unsorted(lined)[:, : v.shape[2]] / sums.masked_fill(nothing, 1.0)
        attended = torch.where(nothing, v.flatten(0, 1), attended.to(v.dtype)).view(v.shape)
        out[group.rows] = group.real(attended)
        log_sum = sums.masked_fill(nothing, 1.0).log().view(q.shape[:2])
        log_sums[group.rows] = log_sum if shift is None else log_sum + shift
        alone[group.rows] = nothing.view(q.shape[:2])
    return out, log_sums, alone


def _highest(group: _Group, q: Tensor, k: Tensor) -> Tensor:
    """Each position's highest score over all rounds, (rows, length); 0 where it sees nothing."""
    queries, keys = _table(q, None, 0), _table(k, None, 0)
    lined = queries.new_empty(group.num_chunks, group.chunk_len)
    for tile in group.tiles():
        scores = group.scores(*group.operands(tile, queries, keys))
        counts = group.counts(tile)
        assert counts is not None
        lined[tile] = scores.masked_fill_(counts == 0, -torch.inf).amax(dim=(0, 3))
    places = group.layout.places[group.rows].long()
    highest = lined.view(*places.shape[:2], -1).gather(2, places).amax(dim=1)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    return highest.to(torch.promote_types(q.dtype, torch.float32))


def _backward(
    groups: Iterator[_Group], inputs: _Inputs, out: Tensor, log_sums: Tensor, alone: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of queries, which are keys too, and of values: (rows, length, width)."""
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    grad_qk, grad_values = torch.empty_like(inputs.q), torch.empty_like(inputs.v)
    for group in groups:
        q, k, v = inputs.q[group.rows], inputs.k[group.rows], inputs.v[group.rows]
        grad = group.real(grad_out[group.rows].to(q.dtype))
        shares = (grad.to(wide) * out[group.rows]).sum(dim=-1)
        codes = group.bits if group.coded else 0
        queries, keys = _table(q, -log_sums[group.rows], codes), _table(k, 1.0, codes)
        # With dropout, the shares are taken off after it.
        grads = _table(grad, None if group.rate else -shares, 0)
        values = _table(v, None if group.rate else 1.0, 0)
        all_shares = _table(shares[..., None], None, 0)
        lined_q = queries.new_empty(group.num_chunks, group.chunk_len, queries.shape[1])
        lined_k = keys.new_empty(group.num_chunks + 1, group.chunk_len, keys.shape[1])
        lined_v = grads.new_empty(group.num_chunks + 1, group.chunk_len, grads.shape[1])
        if group.settings.visible == "chunk":
            lined_k.zero_()
            lined_v.zero_()
        for tile in group.tiles():
            query, key_chunks = group.operands(tile, queries, keys)
            weights = group.weights(tile, query, key_chunks)
            grad_tile, value_chunks = group.take(grads, tile), group.take_keys(values, tile)
            grad_weights = group.scratch("gradients", len(query))
            for one, value in zip(grad_weights, value_chunks, strict=True):
                torch.bmm(grad_tile, value.transpose(1, 2), out=one)
            kept = group.kept(tile, weights)
            if kept is not None:
                grad_weights *= kept
                grad_weights -= group.take(all_shares, tile).to(grad_weights.dtype)
            grad_scores = grad_weights.mul_(weights)
            if kept is not None:
                weights *= kept
            torch.bmm(grad_scores[0], key_chunks[0], out=lined_q[tile])
            for one, key in zip(grad_scores[1:], key_chunks[1:], strict=True):
                lined_q[tile].baddbmm_(one, key)
            # The own chunks first: what is written there, a later tile's chunks before it are added to.
            for at, chunks in reversed(list(enumerate(group.keys(tile)))):
                _add_products(lined_k, chunks, tile, grad_scores[at], query)
                _add_products(lined_v, chunks, tile, weights[at], grad_tile)
        head_dim, value_dim = q.shape[2], v.shape[2]
        grad_q = group.unsorted(lined_q)[:, :head_dim].to(wide)
        grad_k = group.unsorted(lined_k[:-1])[:, :head_dim].to(wide)
        grad_v = group.unsorted(lined_v[:-1])[:, :value_dim]
        # k = q f, with f = scale / sqrt(q.q + eps d): the part along q is taken out.
        factors, flat = inputs.factors[group.rows].flatten(0, 1), q.flatten(0, 1).to(wide)
        along = (flat * grad_k).sum(dim=-1, keepdim=True) * (factors / group.settings.scale).square()
        grad_qk[group.rows] = (grad_q + factors * (grad_k - flat * along)).view(q.shape).to(q.dtype)
        grad_values[group.rows] = grad_v.view(v.shape) + torch.where(alone[group.rows][..., None], grad, 0.0)
    return grad_qk, grad_values


def _add_products(lined: Tensor, chunks: Any, own: slice, left: Tensor, right: Tensor) -> None:
    """Add left^T right of every query chunk to its key chunk; or write it, to the own chunks."""
    if not isinstance(chunks, slice):
        lined.index_add_(0, chunks, torch.bmm(left.transpose(1, 2), right))
    elif chunks == own:
        torch.bmm(left.transpose(1, 2), right, out=lined[own])
    else:
        absent = max(0, -chunks.start)  # a first chunk has none before it
        lined[chunks.start + absent : chunks.stop].baddbmm_(left[absent:].transpose(1, 2), right[absent:])
