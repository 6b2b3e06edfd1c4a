"""The names that texts on the Reformer use (reformer-pytorch's), over this package's functions.

Batches come first. Parameters have the original's names, so its checkpoints load with `load_state_dict`. Differs from
the original, whose numbers it otherwise has:

- reversible layers compute y1 = x1 + F(x2), y2 = x2 + G(y1), not G(x1), as an article prints;
- the rounds' weights are one softmax, so they sum to one also for a position that sees only itself;
- with `allow_duplicate_attention=False` a pair that meets in several rounds counts once, also across two rounds;
- any length works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.extras.texts.common import (
    TextIndexError,
    TextShapeError,
    TextValueError,
    check_at_least,
    check_ids,
    check_rates,
    check_shape,
)
from manyheads.extras.texts.reformer_attention import (
    TOKEN_SELF_ATTN_VALUE,
    FullQKAttention,
    LSHAttention,
    LSHSelfAttention,
    apply_rotary_pos_emb,
    batched_index_select,
    max_neg_value,
    refuse_options,
    sort_key_val,
)
from manyheads.nn.kernels.reversible import through_sublayers
from manyheads.nn.shapes import check_tensors

__all__ = [
    "TOKEN_SELF_ATTN_VALUE",
    "AbsolutePositionalEmbedding",
    "Chunk",
    "FeedForward",
    "FixedPositionalEmbedding",
    "FullQKAttention",
    "LSHAttention",
    "LSHSelfAttention",
    "PreNorm",
    "Reformer",
    "ReformerLM",
    "ReversibleBlock",
    "ReversibleSequence",
    "apply_rotary_pos_emb",
    "batched_index_select",
    "max_neg_value",
    "sort_key_val",
]


class FeedForward(nn.Module):
    """w2 act(w1 x), or w2 (act(a) x b) with a, b = w1 x for `glu`: (..., dim) -> (..., dim)."""

    def __init__(
        self,
        dim: int,
        mult: int = 4,
        dropout: float = 0.0,
        activation: Callable[[], nn.Module] | None = None,
        glu: bool = False,
    ) -> None:
        super().__init__()
        check_at_least(1, dim=dim, mult=mult)
        check_rates(dropout=dropout)
        self.glu = glu
        self.w1 = nn.Linear(dim, dim * mult * (2 if glu else 1))
        self.act = nn.GELU() if activation is None else activation()
        self.dropout = nn.Dropout(dropout)
        self.w2 = nn.Linear(dim * mult, dim)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        check_shape("x", x, ["...", self.w1.in_features])
        inner, gate = self.w1(x).chunk(2, dim=-1) if self.glu else (self.w1(x), 1.0)
        return cast(Tensor, self.w2(self.dropout(self.act(inner) * gate)))


class Chunk(nn.Module):
    """A function of each position, computed for some positions at a time, which needs less memory."""

    def __init__(self, chunks: int, fn: nn.Module, along_dim: int = -1) -> None:
        super().__init__()
        check_at_least(1, chunks=chunks)
        self.dim, self.chunks, self.fn = along_dim, chunks, fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        check_tensors(x=x)
        if self.chunks == 1:
            return cast(Tensor, self.fn(x, **kwargs))
        return torch.cat([self.fn(part, **kwargs) for part in x.chunk(self.chunks, dim=self.dim)], dim=self.dim)


class PreNorm(nn.Module):
    """fn(norm(x))."""

    def __init__(self, norm_class: Callable[[int], nn.Module], dim: int, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = norm_class(dim), fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return cast(Tensor, self.fn(self.norm(x), **kwargs))


class Deterministic(nn.Module):
    """A part of a reversible layer, for the original's parameter names; the backward pass replays random numbers."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return cast(Tensor, self.net(*args, **kwargs))


class ReversibleBlock(nn.Module):
    """y1 = x1 + f(x2), y2 = x2 + g(y1), both streams in one tensor: (batch, length, 2 dim) -> the same."""

    def __init__(self, f: nn.Module, g: nn.Module, depth: int | None = None, send_signal: bool = False) -> None:
        super().__init__()
        self.f, self.g, self.depth, self.send_signal = Deterministic(f), Deterministic(g), depth, send_signal

    def forward(
        self, x: Tensor, f_args: Mapping[str, Any] | None = None, g_args: Mapping[str, Any] | None = None
    ) -> Tensor:
        x1, x2 = _streams(x)
        y1 = x1 + self.f(x2, **f_args or {})
        return torch.cat([y1, x2 + self.g(y1, **g_args or {})], dim=2)


class IrreversibleBlock(nn.Module):
    """The same parts under the original's second names."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g


class _WithArguments(nn.Module):
    """A part of a layer as `kernels.reversible.Sublayer`."""

    chunk_len = 0

    def __init__(self, part: nn.Module, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.part, self.arguments = part, arguments

    def forward(
        self, x: Tensor, context: Any, shared: tuple[Tensor, ...], kept: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Sublayer`. The backward pass uses the buckets of the forward pass, because its inputs are rounded."""
        hashing = [module for module in self.part.modules() if isinstance(module, LSHAttention)]
        noted: list[Tensor] = []
        replayed = None if kept is None else list(kept)
        for module in hashing:
            module.noted, module.replayed = noted, replayed
        try:
            return self.part(x, **self.arguments), tuple(noted)
        finally:
            for module in hashing:
                module.noted = module.replayed = None


def _streams(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.dim() != 3 or x.shape[2] % 2:
        raise TextShapeError(
            f"x has the shape {tuple(x.shape)}; it must be (batch, length, 2 dim), two streams side by side, for"
            " example torch.cat([x, x], dim=-1)."
        )
    first, second = x.chunk(2, dim=2)
    return first, second


class ReversibleSequence(nn.Module):
    """Reversible layers: the backward pass stores two streams, whatever the number of layers.

    Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 3.
    Args:
        blocks: pairs of modules f and g.
        layer_dropout: probability that training leaves out a layer.
        reverse_thres: sequences up to this length use ordinary backpropagation.
    """

    def __init__(
        self,
        blocks: Iterable[Iterable[nn.Module]],
        layer_dropout: float = 0.0,
        reverse_thres: int = 0,
        send_signal: bool = False,
    ) -> None:
        super().__init__()
        check_rates(layer_dropout=layer_dropout)
        self.layer_dropout, self.reverse_thres = layer_dropout, reverse_thres
        pairs = [tuple(pair) for pair in blocks]
        if any(len(pair) != 2 for pair in pairs):
            raise TextValueError(
                f"blocks have {', '.join(str(len(pair)) for pair in pairs)} modules; give a pair (f, g) for each layer."
            )
        self.blocks = nn.ModuleList(ReversibleBlock(f, g, depth, send_signal) for depth, (f, g) in enumerate(pairs))
        self.irrev_blocks = nn.ModuleList(IrreversibleBlock(f, g) for f, g in pairs)

    def forward(self, x: Tensor, arg_route: tuple[bool, bool] = (True, False), **kwargs: Any) -> Tensor:
        """(batch, length, 2 dim) -> the same. arg_route: whether f and g are given the keyword arguments."""
        blocks = cast(list[ReversibleBlock], list(self.blocks))
        if self.training and self.layer_dropout > 0:
            stays = torch.rand(len(blocks)) >= self.layer_dropout
            blocks = [block for block, keep in zip(blocks, stays, strict=True) if keep] or blocks[:1]
        f_args, g_args = (kwargs if goes else {} for goes in arg_route)
        parts = [
            part for block in blocks for part in (_WithArguments(block.f, f_args), _WithArguments(block.g, g_args))
        ]
        reversible = x.shape[1] > self.reverse_thres
        return torch.cat(through_sublayers(parts, *_streams(x), reversible=reversible), dim=2)


class Reformer(nn.Module):
    """Layers of hashed attention and chunked feed-forward: (batch, length, dim) -> the same.

    Args: as in the original; options that have no counterpart here are refused by name.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int = 8,
        dim_head: int | None = None,
        bucket_size: int = 64,
        n_hashes: int = 8,
        ff_chunks: int = 100,
        attn_chunks: int | None = None,
        causal: bool = False,
        weight_tie: bool = False,
        lsh_dropout: float = 0.0,
        ff_dropout: float = 0.0,
        ff_activation: Callable[[], nn.Module] | None = None,
        ff_mult: int = 4,
        ff_glu: bool = False,
        post_attn_dropout: float = 0.0,
        layer_dropout: float = 0.0,
        lsh_attend_across_buckets: bool = True,
        lsh_allow_duplicate_attention: bool = True,
        random_rotations_per_head: bool = False,
        use_scale_norm: bool = False,
        use_rezero: bool = False,
        use_full_attn: bool = False,
        full_attn_thres: int = 0,
        reverse_thres: int = 0,
        num_mem_kv: int = 0,
        one_value_head: bool = False,
        n_local_attn_heads: int = 0,
        pkm_layers: tuple[int, ...] = (),
        pkm_num_keys: int = 128,
    ) -> None:
        super().__init__()
        check_at_least(1, dim=dim, depth=depth)
        refuse_options(use_scale_norm=use_scale_norm, use_rezero=use_rezero, pkm_layers=pkm_layers)
        self.dim, self.depth, self.bucket_size, self.num_mem_kv = dim, depth, bucket_size, num_mem_kv
        self.full_attn_thres = full_attn_thres

        def layer() -> tuple[nn.Module, nn.Module]:
            attention = LSHSelfAttention(
                dim,
                heads,
                bucket_size,
                n_hashes,
                causal=causal,
                dim_head=dim_head,
                attn_chunks=attn_chunks,
                random_rotations_per_head=random_rotations_per_head,
                attend_across_buckets=lsh_attend_across_buckets,
                allow_duplicate_attention=lsh_allow_duplicate_attention,
                num_mem_kv=num_mem_kv,
                one_value_head=one_value_head,
                use_full_attn=use_full_attn,
                full_attn_thres=full_attn_thres,
                post_attn_dropout=post_attn_dropout,
                dropout=lsh_dropout,
                n_local_attn_heads=n_local_attn_heads,
            )
            feed_forward = FeedForward(dim, ff_mult, ff_dropout, ff_activation, ff_glu)
            return attention, Chunk(ff_chunks, feed_forward, along_dim=-2)

        self.dim = dim
        made = [layer()] * depth if weight_tie else [layer() for _ in range(depth)]
        pairs = [tuple(PreNorm(nn.LayerNorm, dim, part) for part in parts) for parts in made]
        self.layers = ReversibleSequence(pairs, layer_dropout, reverse_thres, send_signal=True)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Return the mean of both streams. kwargs: those of `LSHSelfAttention.forward`."""
        check_shape("x", x, ["batch", "length", self.dim])
        streams: Tensor = self.layers(torch.cat([x, x], dim=-1), **kwargs)
        return torch.stack(streams.chunk(2, dim=-1)).mean(dim=0)


class AbsolutePositionalEmbedding(nn.Module):
    """A trained vector for each position: (batch, length, ...) -> (length, dim)."""

    def __init__(self, dim: int, max_seq_len: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(max_seq_len, dim)

    def forward(self, x: Tensor) -> Tensor:
        check_tensors(x=x)
        if x.shape[1] > self.emb.num_embeddings:
            raise TextIndexError(
                f"the length is {x.shape[1]}, but max_seq_len is {self.emb.num_embeddings}; cut the sequence, or make"
                " the model with a larger max_seq_len."
            )
        return cast(Tensor, self.emb(torch.arange(x.shape[1], device=x.device)))


class FixedPositionalEmbedding(nn.Module):
    """Sines, then cosines, of positions: (batch, length, ...) -> (1, length, dim)."""

    inv_freq: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim)))

    def forward(self, x: Tensor, seq_dim: int = 1) -> Tensor:
        check_tensors(x=x)
        angles = torch.arange(x.shape[seq_dim], device=x.device).type_as(self.inv_freq)[:, None] * self.inv_freq
        return torch.cat([angles.sin(), angles.cos()], dim=-1)[None].type_as(x)


class _Always(nn.Module):
    """Returns one value, for the original's module names."""

    def __init__(self, val: Any) -> None:
        super().__init__()
        self.val = val

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.val


class _TiedOutput(nn.Module):
    """Logits by the embedding's vectors at unit length."""

    def __init__(self, tensor: nn.Parameter) -> None:
        super().__init__()
        self.tensor = tensor

    def forward(self, x: Tensor) -> Tensor:
        return x @ F.normalize(self.tensor, dim=-1).t()


class ReformerLM(nn.Module):
    """Token ids to logits: (batch, length) -> (batch, length, num_tokens).

        >>> model = ReformerLM(num_tokens=100, dim=16, depth=1, max_seq_len=32, heads=2, bucket_size=4, causal=True)
        >>> model(torch.randint(0, 100, (1, 32))).shape
        torch.Size([1, 32, 100])

    Args: as in the original; options that have no counterpart here are refused by name. others: of `Reformer`.
    """

    def __init__(
        self,
        num_tokens: int,
        dim: int,
        depth: int,
        max_seq_len: int,
        heads: int = 8,
        dim_head: int = 64,
        bucket_size: int = 64,
        n_hashes: int = 4,
        ff_chunks: int = 100,
        attn_chunks: int = 1,
        *,
        emb_dim: int | None = None,
        return_embeddings: bool = False,
        weight_tie_embedding: bool = False,
        fixed_position_emb: bool = False,
        absolute_position_emb: bool = False,
        axial_position_emb: bool = False,
        axial_position_shape: tuple[int, ...] | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        refuse_options(axial_position_emb=axial_position_emb, axial_position_shape=axial_position_shape)
        emb_dim = emb_dim or dim
        self.num_tokens, self.max_seq_len = num_tokens, max_seq_len
        self.token_emb = nn.Embedding(num_tokens, emb_dim)
        self.to_model_dim = nn.Identity() if emb_dim == dim else nn.Linear(emb_dim, dim)
        self.pos_emb: nn.Module = _Always(0)
        self.layer_pos_emb: nn.Module = _Always(None)
        if absolute_position_emb:
            self.pos_emb = AbsolutePositionalEmbedding(emb_dim, max_seq_len)
        elif fixed_position_emb:
            self.pos_emb = FixedPositionalEmbedding(emb_dim)
        else:
            self.layer_pos_emb = FixedPositionalEmbedding(dim_head)
        self.reformer = Reformer(dim, depth, heads, dim_head, bucket_size, n_hashes, ff_chunks, attn_chunks, **others)
        self.norm = nn.LayerNorm(dim)
        if return_embeddings:
            self.out: nn.Module = nn.Identity()
            return
        table = self.token_emb.weight
        last = _TiedOutput(cast(nn.Parameter, table)) if weight_tie_embedding else nn.Linear(emb_dim, num_tokens)
        self.out = nn.Sequential(nn.Identity() if emb_dim == dim else nn.Linear(dim, emb_dim), last)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        check_ids(x, "x", self.num_tokens, "make the model with num_tokens={} or more")
        embedded = self.token_emb(x)
        embedded = embedded + self.pos_emb(embedded)
        rotary = self.layer_pos_emb(embedded)
        hidden = self.reformer(self.to_model_dim(embedded), pos_emb=rotary, **kwargs)
        return cast(Tensor, self.out(self.norm(hidden)))
