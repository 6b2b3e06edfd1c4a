"""Hashed and exact attention with shared queries and keys, by the names of texts on the Reformer; see `reformer`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import ShapeError
from manyheads.extras.texts.common import (
    TextShapeError,
    TextValueError,
    also,
    check_at_least,
    check_ids,
    check_rates,
    check_shape,
    explain,
    fits,
    shape_of,
)
from manyheads.nn import LSHSettings
from manyheads.nn.attention.lsh import hash_vectors, lsh_attention
from manyheads.nn.attention.lsh_hash import keys_of, near_pairs

TOKEN_SELF_ATTN_VALUE = -5e4
"""Score of a position for itself: it has a weight only if there is no other key."""


def chunked_sum(tensor: Tensor, chunks: int = 1) -> Tensor:
    """Return the sums of the last axis: (..., width) -> (...). chunks: in how many parts they are computed."""
    check_at_least(1, chunks=chunks)
    if not shape_of("tensor", tensor, "..., width"):
        raise TextShapeError("tensor is one number; it must have the axes (..., width).")
    rows = tensor.reshape(-1, tensor.shape[-1]).chunk(chunks)
    return torch.cat([part.sum(dim=-1) for part in rows]).reshape(tensor.shape[:-1])


def max_neg_value(tensor: Tensor) -> float:
    """Return the lowest number of the tensor's type."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        of = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise also(ShapeError, TypeError, AttributeError)(
            f"tensor is {of}; give one of a floating type: call .float()."
        )
    return -torch.finfo(tensor.dtype).max


def sort_key_val(t1: Tensor, t2: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Return t1 sorted, and t2, which may lack axes or have some of size 1, in the same order."""
    shape, other = shape_of("t1", t1, "..., places"), shape_of("t2", t2, "..., places")
    if not fits(other, shape) or not -len(shape) <= dim < len(shape):
        raise also(TextShapeError, IndexError)(
            f"t1 has the shape {shape} and t2 {other}, sorted along axis {dim}; t2 must have t1's shape, or 1 in its"
            " place, and t1 the axis."
        )
    ordered = t1.sort(dim=dim)
    return ordered.values, t2.expand_as(t1).gather(dim, ordered.indices)


def batched_index_select(values: Tensor, indices: Tensor) -> Tensor:
    """Return rows of each element of a batch: (batch, length, width), (batch, some) -> (batch, some, width)."""
    check_shape("values", values, ["batch", "length", "width"])
    check_shape("indices", indices, [values.shape[0], "some"], "one row of places for each element of the batch")
    check_ids(indices, "indices", values.shape[1], "give values with {} places or more")
    return values.take_along_dim(indices.long()[..., None], dim=1)


def _scores(
    qk: Tensor, queries: int, input_mask: Tensor | None, input_attn_mask: Tensor | None, for_itself: float | None = None
) -> Tensor:
    """Return the scores of shared queries and keys, (rows, queries, length), masked by what is padding.

    Args: for_itself: the score of a position for itself where no mask hides it.
    """
    scale, eps = qk.shape[-1] ** -0.5, 1e-24 / qk.shape[-1]
    scores = torch.matmul(qk[:, :queries], keys_of(qk, scale, eps).transpose(-1, -2))
    if for_itself is not None:
        scores = scores.masked_fill(torch.eye(*scores.shape[1:], dtype=torch.bool, device=qk.device), for_itself)
    lowest, length = max_neg_value(scores), qk.shape[1]
    _check_mask("input_attn_mask", input_attn_mask, (len(qk), length, length))
    _check_mask("input_mask", input_mask, (len(qk), length))
    if input_attn_mask is not None:
        missing = (0, length - input_attn_mask.shape[-1], 0, max(0, queries - input_attn_mask.shape[-2]))
        real = F.pad(input_attn_mask.bool(), missing, value=True)
        scores = scores.masked_fill(~real[:, :queries], lowest)
    if input_mask is not None:
        real = F.pad(input_mask.bool(), (0, length - input_mask.shape[1]), value=True)
        scores = scores.masked_fill(~(real[:, :queries, None] & real[:, None]), lowest)
    return scores


def _check_mask(name: str, mask: Tensor | None, longest: tuple[int, ...]) -> None:
    """Check a mask, which may be shorter than the positions: those after it may be attended to."""
    if mask is None:
        return
    shape = shape_of(name, mask, "batch x heads, ..., positions")
    if len(shape) != len(longest) or shape[0] != longest[0] or any(a > b for a, b in zip(shape, longest, strict=True)):
        raise TextShapeError(f"{name} has the shape {shape}; it must be {longest}, or have fewer positions.")


def _check_vectors(qk: Tensor, v: Tensor, query_len: int | None) -> int:
    """Check the vectors, and return the number of queries."""
    for name, x in {"qk": qk, "v": v}.items():
        shape_of(name, x, "batch x heads, length, width")
    if qk.dim() != 3 or v.dim() != 3 or qk.shape[:2] != v.shape[:2]:
        raise TextShapeError(
            f"qk has the shape {tuple(qk.shape)} and v {tuple(v.shape)}; both must be (batch x heads, length, width) of"
            " the same batch and length."
        )
    if query_len is None:
        return qk.shape[1]
    if not isinstance(query_len, int) or not 1 <= query_len <= qk.shape[1]:
        raise also(TextShapeError, TypeError)(
            f"query_len is {query_len!r}; it must be a whole number from 1 to {qk.shape[1]}, the length of qk."
        )
    return query_len


class LSHAttention(nn.Module):
    """Hashed attention of shared queries and keys; see `forward`. The parameters are those of the original."""

    def __init__(
        self,
        dropout: float = 0.0,
        bucket_size: int = 64,
        n_hashes: int = 8,
        causal: bool = False,
        allow_duplicate_attention: bool = True,
        attend_across_buckets: bool = True,
        rehash_each_round: bool = True,
        drop_for_hash_rate: float = 0.0,
        random_rotations_per_head: bool = False,
        return_attn: bool = False,
    ) -> None:
        super().__init__()
        check_rates(dropout=dropout, drop_for_hash_rate=drop_for_hash_rate)
        check_at_least(1, bucket_size=bucket_size, n_hashes=n_hashes)
        if not rehash_each_round and not allow_duplicate_attention:
            raise TextValueError(
                "rehash_each_round and allow_duplicate_attention are both False; set one of them to True.",
                fields=["rehash_each_round", "allow_duplicate_attention"],
            )
        self.dropout, self.dropout_for_hash = nn.Dropout(dropout), nn.Dropout(drop_for_hash_rate)
        self.causal, self.bucket_size, self.n_hashes = causal, bucket_size, n_hashes
        self._rehash_each_round, self._random_rotations_per_head = rehash_each_round, random_rotations_per_head
        self._allow_duplicate_attention, self._attend_across_buckets = allow_duplicate_attention, attend_across_buckets
        self._return_attn = return_attn
        self.replayed: list[Tensor] | None = None
        self.noted: list[Tensor] | None = None

    def settings(self, head_dim: int) -> LSHSettings:
        """Return the settings of `nn.attention.lsh.lsh_attention`."""
        return LSHSettings(
            num_hashes=self.n_hashes,
            chunk_len=self.bucket_size,
            causal=self.causal,
            visible="chunk",
            within_bucket=not self._attend_across_buckets,
            correct_duplicates=not self._allow_duplicate_attention,
            look_across_rounds=True,
            wrap=True,
            scale=head_dim**-0.5,
            key_eps=1e-24 / head_dim,
        )

    def hash_vectors(self, n_buckets: int, vecs: Tensor, **unused: Any) -> Tensor:
        """Return the bucket of each vector in each round: (rows, length, width) -> (rows, n_hashes x length).

        h(x) = argmax [xR; -xR], plus n_buckets for each earlier round.
        Raises: TextValueError: n_buckets is odd, or below 2.
        """
        check_shape("vecs", vecs, ["rows", "length", "width"])
        if not isinstance(n_buckets, int) or n_buckets < 2 or n_buckets % 2:
            raise TextValueError(
                f"n_buckets is {n_buckets!r}; it must be even, because a direction and its opposite are two buckets."
            )
        rows, _, width = vecs.shape
        rounds = self.n_hashes if self._rehash_each_round else 1
        shape = (rows if self._random_rotations_per_head else 1, width, rounds, n_buckets // 2)
        rotations = torch.randn(shape, dtype=vecs.dtype, device=vecs.device).expand(rows, -1, -1, -1)
        vecs = self.dropout_for_hash(vecs).detach()
        if self._rehash_each_round:
            buckets = hash_vectors(vecs[None], rotations, (n_buckets,))[0].long()
        else:  # one rotation: the last round uses the best bucket, the round before it the second best
            rotated = torch.matmul(vecs, rotations[:, :, 0])
            ranked = torch.cat([rotated, -rotated], dim=-1).argsort(dim=-1)
            buckets = ranked[..., -self.n_hashes :].transpose(1, 2)
        offsets = torch.arange(self.n_hashes, device=vecs.device)[:, None] * n_buckets
        return (buckets + offsets).flatten(1)

    def forward(
        self,
        qk: Tensor,
        v: Tensor,
        query_len: int | None = None,
        input_mask: Tensor | None = None,
        input_attn_mask: Tensor | None = None,
        pos_emb: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend. qk, v: (rows, length, width), the rows batch x heads; masks: True = may attend.

        Returns: (rows, query_len, width); the weights (rows, query_len, length) with `return_attn`, otherwise empty;
            and the buckets of `hash_vectors`.
        Raises: TextShapeError: shapes differ.
        """
        queries, length = _check_vectors(qk, v, query_len), qk.shape[1]
        n_buckets = max(2, 2 * math.ceil(length / (2 * self.bucket_size)))
        buckets = self.hash_vectors(n_buckets, qk)  # also if they are known: random numbers stay in step
        if self.replayed is not None:
            buckets = self.replayed.pop(0)
        if self.noted is not None:
            self.noted.append(buckets)
        in_rounds = buckets.reshape(-1, self.n_hashes, length) % n_buckets
        if pos_emb is not None:
            qk = apply_rotary_pos_emb(qk, pos_emb)
        settings, nothing = self.settings(qk.shape[-1]), qk.new_empty(0)
        if input_mask is None and input_attn_mask is None and queries == length and not self._return_attn:
            rate = self.dropout.p if self.training else 0.0
            return lsh_attention(qk[None], v[None], in_rounds[None], settings, dropout_rate=rate)[0], nothing, buckets
        counts = near_pairs(in_rounds[None], settings)[0].sum(dim=1)[:, :queries]
        if settings.correct_duplicates:
            counts = counts.clamp(max=1)
        weights = self._weights(_scores(qk, queries, input_mask, input_attn_mask), counts, queries)
        return torch.matmul(self.dropout(weights), v), weights if self._return_attn else nothing, buckets

    def _weights(self, scores: Tensor, counts: Tensor, queries: int) -> Tensor:
        """Return the weights of each pair. counts: how often it meets in all rounds."""
        query = torch.arange(queries, device=scores.device)[:, None]
        key = torch.arange(scores.shape[2], device=scores.device)
        if self.causal:
            scores = scores.masked_fill((query < key) & (key < queries), max_neg_value(scores))
        scores = scores.masked_fill(query == key, TOKEN_SELF_ATTN_VALUE)
        return torch.softmax(scores + counts.to(scores.dtype).log(), dim=-1)


class FullQKAttention(nn.Module):
    """Exact attention of shared queries and keys; a position sees itself only if it sees no other."""

    def __init__(self, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        check_rates(dropout=dropout)
        self.causal, self.dropout = causal, nn.Dropout(dropout)

    def forward(
        self,
        qk: Tensor,
        v: Tensor,
        query_len: int | None = None,
        input_mask: Tensor | None = None,
        input_attn_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend; see `LSHAttention.forward`. Returns: the output, the weights, and no buckets."""
        queries = _check_vectors(qk, v, query_len)
        scores = _scores(qk, queries, input_mask, input_attn_mask, TOKEN_SELF_ATTN_VALUE)
        if self.causal:
            query, key = (torch.arange(count, device=qk.device) for count in scores.shape[1:])
            scores = scores.masked_fill((query[:, None] < key) & (key < queries), max_neg_value(scores))
        weights = self.dropout(scores.softmax(dim=-1))
        return torch.matmul(weights, v), weights, torch.empty(0)


def refuse_options(**options: Any) -> None:
    """Raises: TextValueError: an option has a value that there is not here."""
    for name, value in options.items():
        if value:
            raise TextValueError(
                f"{name} is {value!r}; there is no counterpart here: leave it at {type(value)()!r}.", fields=[name]
            )


class LSHSelfAttention(nn.Module):
    """Self-attention with shared queries and keys, hashed for sequences longer than `full_attn_thres`."""

    def __init__(
        self,
        dim: int,
        heads: int = 8,
        bucket_size: int = 64,
        n_hashes: int = 8,
        causal: bool = False,
        dim_head: int | None = None,
        attn_chunks: int | None = 1,
        random_rotations_per_head: bool = False,
        attend_across_buckets: bool = True,
        allow_duplicate_attention: bool = True,
        num_mem_kv: int = 0,
        one_value_head: bool = False,
        use_full_attn: bool = False,
        full_attn_thres: int | None = None,
        return_attn: bool = False,
        post_attn_dropout: float = 0.0,
        dropout: float = 0.0,
        n_local_attn_heads: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        check_at_least(1, dim=dim, heads=heads)
        if not dim_head and dim % heads:
            raise TextValueError(
                f"dim {dim} is not divisible by heads {heads}; change one of them, for example to dim"
                f" {math.ceil(dim / heads) * heads}, or give dim_head.",
                fields=["dim", "heads"],
            )
        refuse_options(n_local_attn_heads=n_local_attn_heads)
        check_at_least(0, num_mem_kv=num_mem_kv)
        dim_head = dim_head or dim // heads
        self.dim, self.heads, self.dim_head, self.attn_chunks = dim, heads, dim_head, attn_chunks or 1
        self.toqk = nn.Linear(dim, dim_head * heads, bias=False)
        self.tov = nn.Linear(dim, dim_head * (1 if one_value_head else heads), bias=False)
        self.to_out = nn.Linear(dim_head * heads, dim)
        self.bucket_size = bucket_size
        self.mem_kv = nn.Parameter(torch.randn(1, num_mem_kv, dim)) if num_mem_kv else None
        self.lsh_attn = LSHAttention(
            dropout=dropout,
            bucket_size=bucket_size,
            n_hashes=n_hashes,
            causal=causal,
            allow_duplicate_attention=allow_duplicate_attention,
            attend_across_buckets=attend_across_buckets,
            random_rotations_per_head=random_rotations_per_head,
            return_attn=return_attn,
            **kwargs,
        )
        self.full_attn = FullQKAttention(causal=causal, dropout=dropout)
        self.post_attn_dropout = nn.Dropout(post_attn_dropout)
        self.use_full_attn = use_full_attn
        self.full_attn_thres = bucket_size if full_attn_thres is None else full_attn_thres
        self.callback: Callable[[Tensor, Tensor], Any] | None = None

    def _in_heads(self, x: Tensor) -> Tensor:
        """(batch, length, heads x dim_head), or (batch, length, dim_head) -> (batch x heads, length, dim_head)."""
        in_heads = x.view(*x.shape[:2], x.shape[2] // self.dim_head, self.dim_head).expand(-1, -1, self.heads, -1)
        return in_heads.transpose(1, 2).flatten(0, 1)

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None = None,
        input_mask: Tensor | None = None,
        input_attn_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        pos_emb: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend: (batch, length, dim) -> the same. keys: more positions, which are read but give no output, after the
        trained ones of num_mem_kv. Masks: True = may attend, (batch, length), (batch, length, all positions) and
        (batch, keys).
        """
        check_shape("x", x, ["batch", "length", self.dim])
        batch, length = x.shape[:2]
        if keys is not None:
            check_shape("keys", keys, [batch, "keys", self.dim])
        trained = () if self.mem_kv is None else (self.mem_kv.expand(batch, -1, -1),)
        together = torch.cat([x, *trained, *(() if keys is None else (keys,))], dim=1)
        is_full = self.use_full_attn or together.shape[1] <= self.full_attn_thres
        if input_mask is not None or context_mask is not None:
            real = together.new_ones(together.shape[:2], dtype=torch.bool)
            if input_mask is not None:
                check_shape("input_mask", input_mask, [batch, length], "True = may attend")
                real[:, :length] = input_mask.bool()
            if context_mask is not None:
                count = 0 if keys is None else keys.shape[1]
                check_shape("context_mask", context_mask, [batch, count], "True = may attend")
                real[:, together.shape[1] - count :] = context_mask.bool()
            input_mask = real.repeat_interleave(self.heads, dim=0)
        if input_attn_mask is not None:
            check_shape("input_attn_mask", input_attn_mask, [batch, length, together.shape[1]], "True = may attend")
            input_attn_mask = input_attn_mask.repeat_interleave(self.heads, dim=0)
        qk, v = self._in_heads(self.toqk(together)), self._in_heads(self.tov(together))
        attention = self.full_attn if is_full else self.lsh_attn
        parts = [
            attention(q, value, query_len=length, input_mask=mask, input_attn_mask=pairs, pos_emb=pos_emb)
            for q, value, mask, pairs in zip(
                *(_chunks(one, self.attn_chunks, len(qk)) for one in (qk, v, input_mask, input_attn_mask)), strict=True
            )
        ]
        out, attn, buckets = (torch.cat(several) for several in zip(*parts, strict=True))
        if self.callback is not None:
            shape = (batch, self.heads)
            self.callback(attn.reshape(*shape, length, -1), buckets.reshape(*shape, -1))
        merged = out.view(batch, self.heads, length, self.dim_head).transpose(1, 2).flatten(2)
        return cast(Tensor, self.post_attn_dropout(self.to_out(merged)))


def _chunks(x: Tensor | None, chunks: int, rows: int) -> Iterable[Tensor | None]:
    """Return the rows of a tensor in several parts; None for each part if there is no tensor."""
    parts = torch.arange(rows).chunk(chunks)
    return [None] * len(parts) if x is None else x.chunk(chunks)


def apply_rotary_pos_emb(qk: Tensor, sinu_pos: Tensor) -> Tensor:
    """Rotate pairs of neighbouring features by their position's angle: (rows, length, width) -> the same.

    Args: sinu_pos: of `FixedPositionalEmbedding`, (1, positions, width); later positions stay as they are.
    """
    check_shape("qk", qk, ["rows", "length", "width"])
    check_shape("sinu_pos", sinu_pos, [1, "positions", qk.shape[2]], "a table for vectors of an even width")
    sine, cosine = (half.repeat_interleave(2, dim=-1) for half in sinu_pos[0].to(qk.dtype).chunk(2, dim=-1))
    count = min(qk.shape[1], sine.shape[0])
    turned, rest = qk[:, :count], qk[:, count:]
    even, odd = turned[..., ::2], turned[..., 1::2]
    across = torch.stack([-odd, even], dim=-1).flatten(-2)
    return torch.cat([turned * cosine[:count] + across * sine[:count], rest], dim=1)


explain(globals())
