"""The names that texts on the Reformer use (reformer-pytorch's), over this package's functions.

Batches come first. Parameters have the original's names, so its checkpoints load with `load_state_dict`. Differs from
the original, whose numbers it otherwise has:

- reversible layers compute y1 = x1 + F(x2), y2 = x2 + G(y1), not G(x1), as an article prints;
- the rounds' weights are one softmax, so they sum to one also for a position that sees only itself;
- with `allow_duplicate_attention=False` a pair that meets in several rounds counts once, also across two rounds;
- any length works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import get_device_states, set_device_states

from manyheads.extras.texts.common import (
    TextIndexError,
    TextShapeError,
    TextValueError,
    also,
    check_at_least,
    check_ids,
    check_rates,
    check_shape,
    explain,
    shape_of,
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

__all__ = [
    "TOKEN_SELF_ATTN_VALUE",
    "AbsolutePositionalEmbedding",
    "Autopadder",
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
    "TrainingWrapper",
    "apply_rotary_pos_emb",
    "batched_index_select",
    "max_neg_value",
    "sort_key_val",
    "top_k",
    "top_p",
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
        axes = len(shape_of("x", x, "..., length, width"))
        if not -axes <= self.dim < axes:
            raise also(TextShapeError, IndexError)(
                f"x has the shape {tuple(x.shape)}, which has no axis {self.dim} to cut; give along_dim."
            )
        if self.chunks == 1:
            return cast(Tensor, self.fn(x, **kwargs))
        return torch.cat([self.fn(part, **kwargs) for part in x.chunk(self.chunks, dim=self.dim)], dim=self.dim)


class PreNorm(nn.Module):
    """fn(norm(x))."""

    def __init__(self, norm_class: Callable[[int], nn.Module], dim: int, fn: nn.Module) -> None:
        super().__init__()
        check_at_least(1, dim=dim)
        self.norm, self.fn, self.dim = norm_class(dim), fn, dim

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        check_shape("x", x, ["...", self.dim])
        return cast(Tensor, self.fn(self.norm(x), **kwargs))


class Deterministic(nn.Module):
    """A part of a reversible layer that can repeat a call with the same random numbers."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.recorded: tuple[Tensor, list[int], list[Tensor]] | None = None

    def record_rng(self, *args: Any) -> None:
        """Keep the state of the random generators, of the CPU and of the arguments' devices."""
        self.recorded = (torch.get_rng_state(), *get_device_states(*args))

    def forward(self, *args: Any, record_rng: bool = False, set_rng: bool = False, **kwargs: Any) -> Tensor:
        """Call the part. record_rng: as the call to repeat; set_rng: repeat it."""
        if record_rng:
            self.record_rng(*args)
        if not set_rng or self.recorded is None:
            return cast(Tensor, self.net(*args, **kwargs))
        state, devices, states = self.recorded
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(state)
            set_device_states(devices, states)
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
        y1 = x1 + self.f(x2, record_rng=self.training, **f_args or {})
        return torch.cat([y1, x2 + self.g(y1, record_rng=self.training, **g_args or {})], dim=2)

    def backward_pass(
        self, y: Tensor, dy: Tensor, f_args: Mapping[str, Any] | None = None, g_args: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs of the last forward pass and their gradient, from its outputs and theirs.

        The gradients of parameters are added to their `grad`. Paper: sec. 3, eq. 8: x2 = y2 - g(y1), x1 = y1 - f(x2).
        """
        check_shape("dy", dy, tuple(y.shape) if isinstance(y, Tensor) else [], "the gradient of y")
        (y1, y2), (dy1, dy2) = _streams(y), _streams(dy)
        gy1, dy1 = _repeated(self.g, y1, dy2, dy1, g_args)
        x2 = y2 - gy1
        fx2, dy2 = _repeated(self.f, x2, dy1, dy2, f_args)
        return torch.cat([y1 - fx2, x2], dim=2).detach(), torch.cat([dy1, dy2], dim=2)


def _repeated(
    part: nn.Module, x: Tensor, grad_out: Tensor, grad_in: Tensor, arguments: Mapping[str, Any] | None
) -> tuple[Tensor, Tensor]:
    """Return a part's output, and grad_in plus the gradient of its input."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        out: Tensor = part(leaf, set_rng=True, **arguments or {})
        torch.autograd.backward(out, grad_out)
    assert leaf.grad is not None
    return out.detach(), grad_in + leaf.grad


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
    if len(shape_of("x", x, "batch, length, 2 dim")) != 3 or x.shape[2] % 2:
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
        streams, blocks = _streams(x), cast(list[ReversibleBlock], list(self.blocks))
        if self.training and self.layer_dropout > 0:
            stays = torch.rand(len(blocks)) >= self.layer_dropout
            blocks = [block for block, keep in zip(blocks, stays, strict=True) if keep] or blocks[:1]
        f_args, g_args = (kwargs if goes else {} for goes in arg_route)
        parts = [
            part for block in blocks for part in (_WithArguments(block.f, f_args), _WithArguments(block.g, g_args))
        ]
        reversible = x.shape[1] > self.reverse_thres
        return torch.cat(through_sublayers(parts, *streams, reversible=reversible), dim=2)


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


def _check_length(x: Tensor, axis: int) -> None:
    if len(shape_of("x", x, "batch, length, ...")) <= axis:
        raise also(TextShapeError, IndexError)(
            f"x has the shape {tuple(x.shape)}; its axis {axis} must be the length, as in (batch, length, dim)."
        )


class AbsolutePositionalEmbedding(nn.Module):
    """A trained vector for each position: (batch, length, ...) -> (length, dim)."""

    def __init__(self, dim: int, max_seq_len: int) -> None:
        super().__init__()
        check_at_least(1, dim=dim, max_seq_len=max_seq_len)
        self.emb = nn.Embedding(max_seq_len, dim)

    def forward(self, x: Tensor) -> Tensor:
        _check_length(x, 1)
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
        _check_length(x, seq_dim)
        angles = torch.arange(x.shape[seq_dim], device=x.device).type_as(self.inv_freq)[:, None] * self.inv_freq
        return torch.cat([angles.sin(), angles.cos()], dim=-1)[None].type_as(x)


class Always(nn.Module):
    """Returns one value, for the original's module names."""

    def __init__(self, val: Any) -> None:
        super().__init__()
        self.val = val

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.val


class MatrixMultiply(nn.Module):
    """x times a matrix, transposed and with rows of unit length on request: logits by the embedding's vectors."""

    def __init__(self, tensor: Tensor, transpose: bool = False, normalize: bool = False) -> None:
        super().__init__()
        self.tensor, self.transpose, self.normalize = tensor, transpose, normalize

    def forward(self, x: Tensor) -> Tensor:
        matrix = F.normalize(self.tensor, dim=-1) if self.normalize else self.tensor
        return x @ (matrix.t() if self.transpose else matrix)


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
        check_at_least(1, num_tokens=num_tokens, dim=dim, dim_head=dim_head, max_seq_len=max_seq_len)
        refuse_options(axial_position_emb=axial_position_emb, axial_position_shape=axial_position_shape)
        emb_dim = dim if emb_dim is None else emb_dim
        check_at_least(1, emb_dim=emb_dim)
        self.num_tokens, self.max_seq_len = num_tokens, max_seq_len
        self.token_emb = nn.Embedding(num_tokens, emb_dim)
        self.to_model_dim = nn.Identity() if emb_dim == dim else nn.Linear(emb_dim, dim)
        self.pos_emb: nn.Module = Always(0)
        self.layer_pos_emb: nn.Module = Always(None)
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
        last = MatrixMultiply(table, True, True) if weight_tie_embedding else nn.Linear(emb_dim, num_tokens)
        self.out = nn.Sequential(nn.Identity() if emb_dim == dim else nn.Linear(dim, emb_dim), last)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        check_shape("x", x, ["batch", "length"])
        check_ids(x, "x", self.num_tokens, "make the model with num_tokens={} or more")
        embedded = self.token_emb(x)
        embedded = embedded + self.pos_emb(embedded)
        rotary = self.layer_pos_emb(embedded)
        hidden = self.reformer(self.to_model_dim(embedded), pos_emb=rotary, **kwargs)
        return cast(Tensor, self.out(self.norm(hidden)))


def top_k(logits: Tensor, thres: float = 0.9) -> Tensor:
    """Return the logits with -inf for all but the highest ones: the share 1 - thres of the ids, at least one."""
    check_rates(thres=thres)
    fewest = torch.topk(logits, max(1, int((1 - thres) * logits.shape[-1]))).values[..., -1:]
    return logits.masked_fill(logits < fewest, -torch.inf)


def top_p(logits: Tensor, thres: float = 0.9) -> Tensor:
    """Return the logits with -inf after the highest ones whose probabilities sum to 1 - thres; one of them stays."""
    check_rates(thres=thres)
    ordered, ids = logits.sort(descending=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    return logits.masked_fill((before > 1 - thres).scatter(-1, ids, before > 1 - thres), -torch.inf)


class Autopadder(nn.Module):
    """A model as it is: here any length works, so nothing is padded."""

    def __init__(self, net: nn.Module, pad_left: bool = False) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return cast(Tensor, self.net(x, **kwargs))


class TrainingWrapper(nn.Module):
    """The loss and the samples of a language model.

    Args: net: `ReformerLM`. ignore_index: an id without a loss. pad_value: id of padding.
    """

    def __init__(self, net: ReformerLM, ignore_index: int = -100, pad_value: int = 0) -> None:
        super().__init__()
        self.pad_value, self.ignore_index, self.max_seq_len = pad_value, ignore_index, net.max_seq_len
        self.net = Autopadder(net)

    def _padded(self, rows: Iterable[Tensor]) -> Tensor:
        return pad_sequence(list(rows), batch_first=True, padding_value=self.pad_value)

    def forward(self, x: Tensor | Sequence[Tensor], return_loss: bool = False, **kwargs: Any) -> Tensor:
        """Return logits, or the mean loss of each next id. x: (batch, length) ids, or sequences of several lengths."""
        rows = x if isinstance(x, Tensor) else self._padded(x)
        check_shape("x", rows, ["batch", "length"])
        if not return_loss:
            return cast(Tensor, self.net(rows, **kwargs))
        if isinstance(x, Tensor):
            given, targets = x[:, :-1], x[:, 1:]
        else:
            given, targets = self._padded(row[:-1] for row in x), self._padded(row[1:] for row in x)
        logits: Tensor = self.net(given, **kwargs)
        return F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=self.ignore_index)

    @torch.no_grad()
    def generate(
        self,
        start_tokens: Tensor,
        seq_len: int,
        eos_token: int | None = None,
        temperature: float = 1.0,
        filter_logits_fn: Callable[..., Tensor] = top_k,
        filter_thres: float = 0.9,
        **kwargs: Any,
    ) -> Tensor:
        """Return at most seq_len ids after start_tokens, (length,) or (batch, length), without these.

        Every id is read again for each new one, as in the original; `Generator` keeps what it has computed.
        """
        check_at_least(1, seq_len=seq_len)
        if not temperature > 0:
            raise TextValueError(f"temperature is {temperature}; it must be above 0.", fields=["temperature"])
        ids = start_tokens[None] if len(shape_of("start_tokens", start_tokens, "batch, length")) == 1 else start_tokens
        was_training, begin = self.net.training, ids.shape[1]
        self.net.eval()
        mask = kwargs.pop("input_mask", None)
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        for _ in range(seq_len):
            seen = slice(-self.max_seq_len, None)
            logits = self.net(ids[:, seen], input_mask=mask[:, seen], **kwargs)[:, -1]
            probabilities = torch.softmax(filter_logits_fn(logits, thres=filter_thres) / temperature, dim=-1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1).to(ids)], dim=1)
            mask = F.pad(mask, (0, 1), value=True)
            if eos_token is not None and bool((ids[:, -1] == eos_token).all()):
                break
        self.net.train(was_training)
        return ids[0, begin:] if start_tokens.dim() == 1 else ids[:, begin:]


explain(globals())
