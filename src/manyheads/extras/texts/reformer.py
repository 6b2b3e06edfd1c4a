"""The names that texts on the Reformer use (reformer-pytorch's), over this package's functions.

Batches come first. Parameters have the original's names, so its checkpoints load with `load_state_dict`. Differs from
the original, whose numbers it otherwise has:

- reversible layers compute y1 = x1 + F(x2), y2 = x2 + G(y1), not G(x1), as an article prints;
- the rounds' weights are one softmax, so they sum to one also for a position that sees only itself;
- with `allow_duplicate_attention=False` a pair that meets in several rounds counts once, also across two rounds;
- any length works.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from manyheads.extras.texts.common import (
    TextValueError,
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
    chunked_sum,
    max_neg_value,
    refuse_options,
    sort_key_val,
)
from manyheads.extras.texts.reformer_layers import (
    AbsolutePositionalEmbedding,
    Always,
    AxialPositionalEmbedding,
    Chunk,
    FeedForward,
    FixedPositionalEmbedding,
    MatrixMultiply,
    PreNorm,
    ReversibleBlock,
    ReversibleSequence,
    ReZero,
    ScaleNorm,
)

__all__ = [
    "TOKEN_SELF_ATTN_VALUE",
    "AbsolutePositionalEmbedding",
    "Autopadder",
    "AxialPositionalEmbedding",
    "Chunk",
    "FeedForward",
    "FixedPositionalEmbedding",
    "FullQKAttention",
    "LSHAttention",
    "LSHSelfAttention",
    "PreNorm",
    "ReZero",
    "Recorder",
    "Reformer",
    "ReformerEncDec",
    "ReformerLM",
    "ReversibleBlock",
    "ReversibleSequence",
    "ScaleNorm",
    "TrainingWrapper",
    "apply_rotary_pos_emb",
    "batched_index_select",
    "chunked_sum",
    "max_neg_value",
    "sort_key_val",
    "top_k",
    "top_p",
]


class Reformer(nn.Module):
    """Layers of hashed attention and chunked feed-forward: (batch, length, dim) -> the same.

    Args: as in the original; options that have no counterpart here are refused by name. others: what its README gives
        and its code does not take: `max_seq_len`, which is not needed, and `twin_attention`, which must be off.
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
        **others: Any,
    ) -> None:
        super().__init__()
        check_at_least(1, dim=dim, depth=depth)
        refuse_options(pkm_layers=pkm_layers, twin_attention=others.pop("twin_attention", False))
        others.pop("max_seq_len", None)
        if others:
            known = ", ".join([*inspect.signature(Reformer).parameters][:-1])
            raise TextValueError(f"{', '.join(others)}: no option of Reformer, which has {known}.")
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

        norm = ScaleNorm if use_scale_norm else nn.LayerNorm
        made = [layer()] * depth if weight_tie else [layer() for _ in range(depth)]
        pairs = [tuple(ReZero(part) if use_rezero else PreNorm(norm, dim, part) for part in parts) for parts in made]
        self.layers = ReversibleSequence(pairs, layer_dropout, reverse_thres, send_signal=True)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Return the mean of both streams. kwargs: those of `LSHSelfAttention.forward`."""
        check_shape("x", x, ["batch", "length", self.dim])
        streams: Tensor = self.layers(torch.cat([x, x], dim=-1), **kwargs)
        return torch.stack(streams.chunk(2, dim=-1)).mean(dim=0)


class ReformerLM(nn.Module):
    """Token ids to logits: (batch, length) -> (batch, length, num_tokens).

        >>> model = ReformerLM(num_tokens=100, dim=16, depth=1, max_seq_len=32, heads=2, bucket_size=4, causal=True)
        >>> model(torch.randint(0, 100, (1, 32))).shape
        torch.Size([1, 32, 100])

    Args: as in the original, in its order; options that have no counterpart here are refused by name. others: of
        `Reformer`, which the original's language model does not take.
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
        causal: bool = False,
        weight_tie: bool = False,
        lsh_dropout: float = 0.0,
        ff_dropout: float = 0.0,
        ff_mult: int = 4,
        ff_activation: Callable[[], nn.Module] | None = None,
        ff_glu: bool = False,
        post_attn_dropout: float = 0.0,
        layer_dropout: float = 0.0,
        random_rotations_per_head: bool = False,
        use_scale_norm: bool = False,
        use_rezero: bool = False,
        use_full_attn: bool = False,
        full_attn_thres: int = 0,
        reverse_thres: int = 0,
        num_mem_kv: int = 0,
        one_value_head: bool = False,
        emb_dim: int | None = None,
        return_embeddings: bool = False,
        weight_tie_embedding: bool = False,
        fixed_position_emb: bool = False,
        absolute_position_emb: bool = False,
        axial_position_emb: bool = False,
        axial_position_shape: tuple[int, ...] | None = None,
        n_local_attn_heads: int = 0,
        pkm_layers: tuple[int, ...] = (),
        pkm_num_keys: int = 128,
        **others: Any,
    ) -> None:
        super().__init__()
        check_at_least(1, num_tokens=num_tokens, dim=dim, dim_head=dim_head, max_seq_len=max_seq_len)
        emb_dim = dim if emb_dim is None else emb_dim
        check_at_least(1, emb_dim=emb_dim)
        self.num_tokens, self.max_seq_len = num_tokens, max_seq_len
        self.token_emb = nn.Embedding(num_tokens, emb_dim)
        self.to_model_dim = nn.Identity() if emb_dim == dim else nn.Linear(emb_dim, dim)
        self.pos_emb: nn.Module = Always(0)
        self.layer_pos_emb: nn.Module = Always(None)
        if axial_position_emb:
            grid = axial_position_shape or (math.ceil(max_seq_len / bucket_size), bucket_size)
            self.pos_emb = AxialPositionalEmbedding(emb_dim, grid)
        elif absolute_position_emb:
            self.pos_emb = AbsolutePositionalEmbedding(emb_dim, max_seq_len)
        elif fixed_position_emb:
            self.pos_emb = FixedPositionalEmbedding(emb_dim)
        else:
            self.layer_pos_emb = FixedPositionalEmbedding(dim_head)
        self.reformer = Reformer(
            dim,
            depth,
            heads,
            dim_head,
            bucket_size,
            n_hashes,
            ff_chunks,
            attn_chunks,
            causal,
            weight_tie,
            lsh_dropout,
            ff_dropout,
            ff_activation,
            ff_mult,
            ff_glu,
            post_attn_dropout,
            layer_dropout,
            random_rotations_per_head=random_rotations_per_head,
            use_scale_norm=use_scale_norm,
            use_rezero=use_rezero,
            use_full_attn=use_full_attn,
            full_attn_thres=full_attn_thres,
            reverse_thres=reverse_thres,
            num_mem_kv=num_mem_kv,
            one_value_head=one_value_head,
            n_local_attn_heads=n_local_attn_heads,
            pkm_layers=pkm_layers,
            pkm_num_keys=pkm_num_keys,
            **others,
        )
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


class Recorder(nn.Module):
    """A model that keeps the weights and buckets of each call: `recordings[call]` has `attn` and `buckets` of a layer.

    attn: (batch, heads, length, length); buckets: (batch, heads, rounds x length), empty where attention was exact.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.on, self.ejected = net, True, False
        self.clear()

    def clear(self) -> None:
        """Forget all calls."""
        self.iter, self.recordings = 0, defaultdict[int, list[dict[str, Tensor]]](list)

    def eject(self) -> nn.Module:
        """Return the model; this object cannot be called again."""
        self.clear()
        self.unwire()
        self.ejected = True
        return self.net

    def turn_on(self) -> None:
        """Record from now on."""
        self.on = True

    def turn_off(self) -> None:
        """Record nothing from now on."""
        self.on = False

    def wire(self) -> None:
        """Let the layers report to `record`."""
        self._set(self.record)

    def unwire(self) -> None:
        """Let the layers report to nobody."""
        self._set(None)

    def _set(self, callback: Callable[[Tensor, Tensor], Any] | None) -> None:
        for module in self.net.modules():
            if isinstance(module, LSHSelfAttention):
                module.callback, module.lsh_attn._return_attn = callback, callback is not None

    def record(self, attn: Tensor, buckets: Tensor) -> None:
        """Keep what a layer reports."""
        if self.on:
            self.recordings[self.iter].append({"attn": attn.detach().cpu(), "buckets": buckets.detach().cpu()})

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Call the model. Raises: TextValueError: it was ejected."""
        if self.ejected:
            raise TextValueError("this Recorder was ejected; make a new one: Recorder(net).")
        if self.on:
            self.wire()
        try:
            out: Tensor = self.net(x, **kwargs)
        finally:
            self.unwire()
        self.iter += 1
        return out


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


def _by_prefix(options: Mapping[str, Any], *prefixes: str) -> list[dict[str, Any]]:
    """Return the options that begin with each prefix, without it, and last those that begin with none."""
    groups: list[dict[str, Any]] = [{} for _ in [*prefixes, ""]]
    for name, value in options.items():
        for group, prefix in zip(groups, [*prefixes, ""], strict=True):
            if name.startswith(prefix):
                group[name.removeprefix(prefix)] = value
                break
    return groups


class ReformerEncDec(nn.Module):
    """Two language models as encoder and decoder: the decoder also attends to the encoder's outputs.

    Args: ignore_index: an id without a loss. pad_value: id of padding. kwargs: of both, with enc_ and dec_ before.
    """

    def __init__(self, dim: int, ignore_index: int = 0, pad_value: int = 0, **kwargs: Any) -> None:
        super().__init__()
        encoder, decoder, others = _by_prefix(kwargs, "enc_", "dec_")
        fixed = [f"enc_{name}" for name in ("dim", "return_embeddings") if name in encoder]
        fixed += [f"dec_{name}" for name in ("dim", "causal") if name in decoder] + list(others)
        if fixed:
            raise TextValueError(
                f"{', '.join(fixed)} cannot be set here: both models have the width dim, the decoder is causal, and all"
                " other options begin with enc_ or dec_.",
                fields=fixed,
            )
        encoder.setdefault("bucket_size", 64)
        decoder.setdefault("bucket_size", encoder["bucket_size"] * 2)
        read, write = (
            ReformerLM(dim=dim, return_embeddings=True, **encoder),
            ReformerLM(dim=dim, causal=True, **decoder),
        )
        self.enc = TrainingWrapper(read, ignore_index, pad_value)
        self.dec = TrainingWrapper(write, ignore_index, pad_value)

    def _read(self, seq_in: Tensor, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Read the source. Returns: the arguments of the decoder."""
        encoder, decoder, others = _by_prefix(kwargs, "enc_", "dec_")
        if "input_mask" in encoder:
            decoder.setdefault("context_mask", encoder["input_mask"])
        return {"keys": self.enc(seq_in, **encoder), **decoder, **others}

    def forward(self, seq_in: Tensor, seq_out: Tensor, return_loss: bool = False, **kwargs: Any) -> Tensor:
        """Return logits of the decoder, or its mean loss of each next id. kwargs: with enc_ or dec_ before."""
        return cast(Tensor, self.dec(seq_out, return_loss=return_loss, **self._read(seq_in, kwargs)))

    def generate(self, seq_in: Tensor, seq_out_start: Tensor, seq_len: int, **kwargs: Any) -> Tensor:
        """Return at most seq_len ids after seq_out_start; see `TrainingWrapper.generate`."""
        return self.dec.generate(seq_out_start, seq_len, **self._read(seq_in, kwargs))


explain(globals())
