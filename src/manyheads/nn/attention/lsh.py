"""Self-attention among positions that hash to the same bucket.

Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from manyheads.errors import RequestError, ShapeError
from manyheads.nn.attention.lsh_cache import LSHCache
from manyheads.nn.attention.lsh_hash import (
    hash_vectors,
    mark_padding,
    pair_weights,
    rotations,
    shared_qk_attention,
    visible_pairs,
)
from manyheads.nn.attention.masks import check_rows
from manyheads.nn.attention.multi_head import (
    TensorLine,
    heads_fact,
    merge_heads,
    output_tensor,
    split_heads,
    width_of_heads,
)
from manyheads.nn.attention.settings import LSHSettings
from manyheads.nn.chunking import neighbours
from manyheads.nn.kernels.dropout import dropout
from manyheads.nn.kernels.lsh import bucket_ranks, chunked_attention, hashed_order, sorting_order
from manyheads.nn.layers import Linear, initialise
from manyheads.nn.shapes import Float, Int, check_rates, explained

__all__ = ["LSHSelfAttention", "LSHSettings", "hash_vectors", "lsh_attention", "rotations", "shared_qk_attention"]


def lsh_attention(
    qk: Float[Tensor, "batch heads length head_dim"],
    v: Float[Tensor, "batch heads length value_dim"],
    buckets: Int[Tensor, "batch heads rounds positions"],
    settings: LSHSettings,
    *,
    lengths: Int[Tensor, " batch"] | None = None,
    dropout_rate: float = 0.0,
) -> Float[Tensor, "batch heads length value_dim"]:
    """Return the weighted sum of the values that each query sees, with one softmax over all rounds.

    Paper: Kitaev et al. 2020, sec. 2, eq. 2 to 6, and appendix A. The outputs of the rounds, weighted by their parts of
    the normaliser (eq. 14), are one softmax over the pairs of all rounds (eq. 12). This softmax is what is computed, so
    the weights sum to 1. Differs: a pair that meets in n rounds counts n times; with `settings.correct_duplicates`
    once, by N_ij of eq. 13.
    Args:
        qk: queries; normalised to unit length they are also the keys.
        buckets: the result of `hash_vectors`.
        settings: which keys a query sees.
        lengths: number of real positions of each row, padding on the right; None: all.
        dropout_rate: of the weights; 0 outside training.

    Returns: a query without visible keys gets its own value; zeros at positions beyond the length of a row.
    Raises: ShapeError: the shapes of qk, v and buckets do not match.
    """
    if buckets.shape[:2] != qk.shape[:2] or buckets.shape[3] != qk.shape[2] or v.shape[:3] != qk.shape[:3]:
        raise ShapeError(
            f"queries {tuple(qk.shape)}, values {tuple(v.shape)} (batch, heads, length, width) and buckets"
            f" {tuple(buckets.shape)} (batch, heads, rounds, length) do not match."
        )
    return _attend_in_order(qk, v, sorting_order(buckets, settings, lengths), settings, lengths, dropout_rate)[0]


def _attend_in_order(
    qk: Tensor,
    v: Tensor,
    order: Tensor,
    settings: LSHSettings,
    lengths: Tensor | None,
    dropout_rate: float,
    known: tuple[Tensor, ...] = (),
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute `lsh_attention` in a known order; the second result is as in `chunked_attention`."""
    out, known = chunked_attention(qk, v, order, settings, lengths, dropout_rate, known)
    exact = min(settings.exact_len, qk.shape[2]) if settings.visible == "bucket" else 0
    if exact:
        out = torch.cat([_exact(qk, v, settings, lengths, dropout_rate, exact), out[:, :, exact:]], dim=2)
    return out, known


def _exact(
    qk: Tensor, v: Tensor, settings: LSHSettings, lengths: Tensor | None, dropout_rate: float, exact: int
) -> Tensor:
    """Exact attention of the first positions among themselves."""
    return shared_qk_attention(
        qk[:, :, :exact],
        v[:, :, :exact],
        causal=settings.causal,
        lengths=lengths,
        dropout_rate=dropout_rate,
        scale=settings.scale,
        eps=settings.key_eps,
    )


class LSHSelfAttention(nn.Module):
    """Multi-head self-attention among positions in the same buckets, with shared queries and keys.

        >>> settings = LSHSettings(num_hashes=2, chunk_len=8)
        >>> attention = LSHSelfAttention(16, 4, settings=settings, max_len=64)
        >>> attention(torch.randn(2, 64, 16), seed=0).shape
        torch.Size([2, 64, 16])
        >>> out, weights = attention(torch.randn(64, 16), seed=0, need_weights=True)  # one sequence, without a batch
        >>> out.shape, weights.shape
        (torch.Size([64, 16]), torch.Size([4, 64, 64]))

    Paper: Kitaev et al. 2020, sec. 2.
    Args:
        d_model: width of input and output.
        num_heads: number of heads.
        head_dim: width of a head; 0: d_model / num_heads.
        settings: see `LSHSettings`.
        max_len: maximum length of a sequence, which determines an automatic number of buckets.
        bias: whether the output projection has a bias; the others never have one.
        dropout: rate on the attention weights, in training.

    torch.compile supports hashing with `fullgraph=False` only, because the computation depends on values. Give it
    `rotations` (of `draw`), since a seed's generator cannot be compiled.
    Raises: ConfigError: num_heads is below 1, or head_dim is 0 and num_heads does not divide d_model.
    """

    inputs = ("QK", "V")
    sees_whole = False

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int = 0,
        *,
        settings: LSHSettings,
        max_len: int,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, width_of_heads(d_model, num_heads, head_dim)
        check_rates(dropout=dropout)
        self.settings, self.dropout_rate = settings, dropout
        self.factors = settings.factors(max_len)
        inner = self.num_heads * self.head_dim
        self.qk_proj = Linear(d_model, inner, bias=False)
        self.v_proj = Linear(d_model, inner, bias=False)
        self.out_proj = Linear(inner, d_model, bias=bias)
        self.weights_hook: Callable[[Tensor], None] | None = None
        self.buckets_hook: Callable[[Tensor], None] | None = None
        self.reset_parameters()

    @property
    def kind(self) -> str:
        """Its name in drawings."""
        return "LSH attention" if self.settings.num_hashes else "full attention, shared Q and K"

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        settings = self.settings
        if not settings.num_hashes:
            return self.kind, heads_fact(self)
        length = f"{settings.chunk_len:,}"
        seen = f"chunks of {length}" if settings.visible == "chunk" else f"{length} keys each"
        return self.kind, heads_fact(self), f"{settings.num_hashes:,} rounds, {self.num_buckets:,} buckets, {seen}"

    def tensors(self, output: Tensor, seen: Tensor | None, is_cross: bool = False) -> Iterator[TensorLine]:
        """See `MultiHeadAttention.tensors`. No matrix of all weights exists."""
        batch, length, _ = output.shape
        settings, heads = self.settings, (batch, self.num_heads)
        queries = (*heads, length, self.head_dim)
        yield "queries, shared", queries, "Q = x W_QK, in heads"
        yield "keys", queries, f"K = {'' if settings.scale == 1 else f'{settings.scale:g} '}Q / |Q|"
        yield "values", queries, "V = x W_V, in heads"
        if seen is not None:
            rounds, places = seen.shape[2], -(-length // settings.chunk_len) * settings.chunk_len
            drawn = (self.num_heads, self.head_dim, rounds, sum(self.factors) // 2)
            yield "rotations", drawn, "R ~ N(0, 1), from the hash seed"
            yield "buckets", tuple(seen.shape), f"{self._hash_formula()}, in each round"
            yield "order", (*heads, rounds, places), "positions sorted by (bucket, position), each round's"
        yield output_tensor(self, output, f"A = softmax(Q Kᵀ) over {self._keys_seen(seen is not None)}")

    def _hash_formula(self) -> str:
        if len(self.factors) == 1:
            return "h = argmax [Q R; -Q R]"
        terms, below = ["h₁"], self.factors[0]
        for number, factor in enumerate(self.factors[1:], start=2):
            terms.append(f"{below} h{'₀₁₂₃₄₅₆₇₈₉'[number]}")
            below *= factor
        return f"h = {' + '.join(terms)}, each argmax [Q Rᵢ; -Q Rᵢ]"

    def _keys_seen(self, is_hashed: bool) -> str:
        settings = self.settings
        if not is_hashed:
            return "all earlier positions, oneself if there are none" if settings.causal else "all other positions"
        exact = f"; below position {settings.exact_len}, over all earlier ones" if settings.exact_len else ""
        if settings.visible == "bucket":
            return f"the last {settings.chunk_len} earlier positions of Q's bucket, in all rounds{exact}"
        chunks = neighbours(settings.chunk_len, settings.chunks_before, settings.chunks_after)
        bucket = " in Q's bucket" if settings.within_bucket else ""
        later = ", nothing later" if settings.causal else ""
        return f"sorted {chunks}{bucket}, in all rounds{later}{exact}"

    def operations(self) -> Iterator[tuple[str, str]]:
        """See `MultiHeadAttention.operations`."""
        settings, itself = self.settings, "itself only if there is nothing else"
        yield "Normalise", "K = Q / |Q|"
        if settings.num_hashes:
            yield "Hash", self._hash_formula()
            yield "Sort", "by bucket, then position"
            chunks = neighbours(settings.chunk_len, settings.chunks_before, settings.chunks_after)
            yield "Cut", chunks if settings.visible == "chunk" else f"the last {settings.chunk_len} of Q's bucket"
        yield "MatMul", "Q Kᵀ"
        if settings.scale != 1:
            yield "Scale", f"· {settings.scale:g}"
        only = "its own bucket; " if settings.num_hashes and settings.within_bucket else ""
        yield "Mask", f"{only}{itself}"
        yield "Softmax", "over the keys" + (", in each round" if settings.num_hashes else "")
        yield "MatMul", "A V"
        if settings.num_hashes:
            yield "Undo the sort, add rounds", "weighted by each round's sum"

    def reset_parameters(self) -> None:
        """Xavier-uniform weights, zero biases."""
        initialise(self.qk_proj, self.v_proj, self.out_proj)

    @property
    def num_buckets(self) -> int:
        return math.prod(self.factors)

    def is_exact(self, length: int, num_hashes: int | None = None) -> bool:
        """Return whether sequences of this length use exact attention."""
        hashes = self.settings.num_hashes if num_hashes is None else num_hashes
        return hashes == 0 or length <= self.settings.exact_len

    def draw(self, seed: int | Tensor, num_hashes: int | None = None) -> Tensor:
        """Return rotations for the heads and buckets of this module: (heads, head_dim, rounds, directions)."""
        hashes = self.settings.num_hashes if num_hashes is None else num_hashes
        return rotations(seed, self.num_heads, self.head_dim, hashes, self.factors, self.qk_proj.weight.device)

    def buckets_of(
        self,
        x: Float[Tensor, "batch length d_model"],
        *,
        lengths: Int[Tensor, " batch"] | None = None,
        rotations: Tensor | None = None,
        seed: int | Tensor | None = None,
        num_hashes: int | None = None,
    ) -> Int[Tensor, "batch heads rounds length"] | None:
        """Return the buckets that `forward` computes and accepts; padding is in bucket `num_buckets`.

        Returns: None if `forward` does not hash, because the length or the settings ask for exact attention.
        Raises: RequestError: neither rotations nor a seed.
        """
        if self.is_exact(x.shape[1], num_hashes):
            return None
        with torch.no_grad():
            return self._hash(split_heads(self.qk_proj(x), self.num_heads), lengths, rotations, seed, num_hashes)

    def _hash(
        self,
        qk: Tensor,
        lengths: Tensor | None,
        rotations: Tensor | None,
        seed: int | Tensor | None,
        num_hashes: int | None,
    ) -> Tensor:
        rotations = self._rotations(rotations, seed, num_hashes)
        buckets = mark_padding(hash_vectors(qk, rotations, self.factors), lengths, self.num_buckets)
        if self.buckets_hook is not None:
            self.buckets_hook(buckets)
        return buckets

    def _rotations(self, given: Tensor | None, seed: int | Tensor | None, num_hashes: int | None) -> Tensor:
        if given is None and seed is None:
            raise RequestError("hashing needs buckets, rotations or a seed; none is given.")
        return self.draw(cast("int | Tensor", seed), num_hashes) if given is None else given

    @explained
    def forward(
        self,
        x: Float[Tensor, "*batch length d_model"],
        *,
        lengths: Int[Tensor, "*batch"] | None = None,
        buckets: Int[Tensor, "*batch heads rounds length"] | None = None,
        rotations: Tensor | None = None,
        seed: int | Tensor | None = None,
        num_hashes: int | None = None,
        need_weights: bool = False,
    ) -> Float[Tensor, "*batch length d_model"] | tuple[Tensor, Tensor]:
        """Attend among the positions of x.

        Args:
            x: (batch, length, d_model), or one sequence without a batch, (length, d_model).
            lengths: real positions of each row, padding on the right; None: all.
            buckets: from an earlier pass; None: they are computed with `rotations`, or with `draw(seed)`.
            num_hashes: hash rounds; None: those of the settings; 0: exact attention.
            need_weights: also return the attention weights before dropout; it costs as much as exact attention.

        Returns: (batch, length, d_model), and with `need_weights` (batch, heads, length, length), with one softmax over
            all rounds. Without a batch axis if x has none.
        Raises: RequestError: neither buckets, rotations nor a seed, and something must be hashed. ShapeError: x has
            neither two nor three axes.
        """
        if x.dim() not in (2, 3):
            raise ShapeError(f"x of shape {tuple(x.shape)} must be (batch, length, d_model), or (length, d_model).")
        alone = x.dim() == 2
        if lengths is not None and not alone:
            check_rows(lengths.shape[0], x.shape[0], "lengths")
        if alone:
            x = x[None]
            lengths, buckets = (None if given is None else given[None] for given in (lengths, buckets))
        order = None if buckets is None else sorting_order(buckets, self.settings, lengths)
        qk, v, order = self._prepare(x, lengths, order, rotations, seed, num_hashes)
        weights = None
        if need_weights:
            attended, weights = self._attend_openly(qk, v, order, lengths)
        else:
            attended, _ = self._attend(qk, v, order, lengths)
        out: Tensor = self.out_proj(merge_heads(attended))
        if weights is not None:
            return (out[0], weights[0]) if alone else (out, weights)
        return out[0] if alone else out

    def forward_keeping(
        self,
        x: Float[Tensor, "batch length d_model"],
        kept: tuple[Tensor, ...] | None = None,
        *,
        lengths: Int[Tensor, " batch"] | None = None,
        rotations: Tensor | None = None,
        seed: int | Tensor | None = None,
        num_hashes: int | None = None,
        keep_output: bool = False,
    ) -> tuple[Float[Tensor, "batch length d_model"], tuple[Tensor, ...]]:
        """Compute `forward`.

        Also return tensors that make another call with the same x cheaper (none if nothing is hashed).

        Args:
            kept: tensors of an earlier call; this call then neither hashes nor sorts.
            keep_output: keep the heads' outputs besides the order; the other call then computes only the backward pass.
        """
        order, *known = kept or (None,)
        qk, v, order = self._prepare(x, lengths, order, rotations, seed, num_hashes)
        attended, found = self._attend(qk, v, order, lengths, tuple(known))
        out: Tensor = self.out_proj(merge_heads(attended))
        return out, () if order is None else (order, *(found if keep_output else ()))

    def _prepare(
        self,
        x: Tensor,
        lengths: Tensor | None,
        order: Tensor | None,
        rotations: Tensor | None,
        seed: int | Tensor | None,
        num_hashes: int | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return queries and values by head, and the sorting order, given or new; None: nothing is hashed."""
        qk, v = split_heads(self.qk_proj(x), self.num_heads), split_heads(self.v_proj(x), self.num_heads)
        if order is None and not self.is_exact(x.shape[1], num_hashes):
            with torch.no_grad():
                if self.buckets_hook is None:
                    drawn = self._rotations(rotations, seed, num_hashes)
                    order = hashed_order(qk, drawn, self.factors, self.settings, lengths)
                else:
                    buckets = self._hash(qk, lengths, rotations, seed, num_hashes)
                    order = sorting_order(buckets, self.settings, lengths)
        return qk, v, order

    def _attend(
        self, qk: Tensor, v: Tensor, order: Tensor | None, lengths: Tensor | None, known: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the outputs of the heads, and the `known` of `chunked_attention` for another call."""
        if self.weights_hook is not None:
            return self._attend_openly(qk, v, order, lengths)[0], ()
        rate = self.dropout_rate if self.training else 0.0
        if order is None:
            return _exact(qk, v, self.settings, lengths, rate, qk.shape[2]), ()
        return _attend_in_order(qk, v, order, self.settings, lengths, rate, known)

    def _attend_openly(
        self, qk: Tensor, v: Tensor, order: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute `_attend` pair by pair. Returns: the heads' outputs, and the weights."""
        weights = self._weights(qk, None if order is None else bucket_ranks(order, qk.shape[2]), lengths)
        if self.weights_hook is not None:
            self.weights_hook(weights)
        return torch.matmul(dropout(weights, self.dropout_rate if self.training else 0.0), v), weights

    def _weights(self, qk: Tensor, buckets: Tensor | None, lengths: Tensor | None) -> Tensor:
        """Return the attention weights before dropout: (batch, heads, length, length)."""
        length, settings = qk.shape[2], self.settings
        positions = torch.arange(length, device=qk.device)
        everybody = positions[:, None] > positions if settings.causal else positions[:, None] != positions
        counts = everybody.long().expand(len(qk), 1, length, length)
        if lengths is not None:
            counts = counts * (positions < lengths[:, None, None, None])
        if buckets is not None:
            seen = visible_pairs(buckets, settings, lengths).sum(dim=2)
            seen = seen.clamp(max=1) if settings.correct_duplicates else seen
            exact = settings.exact_len if settings.visible == "bucket" else 0
            counts = torch.where(positions[:, None] < exact, counts, seen)
        return pair_weights(qk, counts, settings.scale, settings.key_eps)

    def start(
        self,
        rows: int,
        *,
        rotations: Tensor | None = None,
        seed: int | Tensor | None = None,
        num_hashes: int | None = None,
    ) -> LSHCache:
        """Return an empty cache for `step`.

        Raises: RequestError: neither rotations nor a seed; or settings under which earlier outputs depend on
            later tokens, so that nothing can be kept.
        """
        if self.settings.visible != "bucket" and not (self.settings.causal and num_hashes == 0):
            raise RequestError(
                f"this hashed attention has visible {self.settings.visible!r}"
                f"{'' if self.settings.causal else ' and is not causal'}, so its outputs depend on later tokens and"
                " cannot be cached for generation; use causal attention with visible 'bucket'."
            )
        weight = self.qk_proj.weight
        if (self.settings.num_hashes if num_hashes is None else num_hashes) or rotations is not None:
            rotations = self._rotations(rotations, seed, num_hashes)
        else:
            rotations = weight.new_empty(self.num_heads, self.head_dim, 0, sum(self.factors) // 2)
        return LSHCache.empty(rows, self.num_buckets, self.settings.chunk_len, rotations, weight)

    def step(
        self,
        x: Float[Tensor, "rows new_len d_model"],
        cache: LSHCache,
        lengths: Int[Tensor, " rows"] | None = None,
    ) -> tuple[Float[Tensor, "rows new_len d_model"], LSHCache]:
        """Attend from new positions to themselves and to earlier ones, as `forward` does on the whole sequence.

        The cache is consumed.
        Args: lengths: real new positions of each row, padding on the right; None: all.
        Cost: O(rounds x chunk_len) per token after the first call.
        """
        qk, v = split_heads(self.qk_proj(x), self.num_heads), split_heads(self.v_proj(x), self.num_heads)
        rounds = cache.rotations.shape[2]
        buckets = None
        if rounds:
            buckets = mark_padding(hash_vectors(qk, cache.rotations, self.factors), lengths, self.num_buckets)
        if cache.is_empty and x.shape[1] > 1:
            order = None if buckets is None else sorting_order(buckets, self.settings, lengths)
            attended, _ = self._attend(qk, v, order, lengths)
            cache = cache.filled(qk, v, buckets, lengths, self.settings)
        else:
            attended, cache = cache.extended(qk, v, buckets, lengths, self.settings)
        out: Tensor = self.out_proj(merge_heads(attended))
        return out, cache
