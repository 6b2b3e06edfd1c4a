"""Dive into Deep Learning: its attention and the modules of its Transformer chapter, by the text's names; see `d2l`.

Every class reads the arguments of both editions: the Chinese one names all sizes (`key_size`, `query_size`,
`value_size`, `norm_shape`, `ffn_num_input`); the present English one has layers that learn their input width at the
first call. Parameters, attributes and printed forms are those of the edition whose arguments are given.

The same numbers as the text's code, also for a length of 0: equal weights for all keys. Differs: no argument is
changed (the text's `masked_softmax` and `sequence_mask` write into theirs), and an odd width has positions.

Shapes: queries (batch, q_len, query_size), keys (batch, k_len, key_size), values (batch, k_len, value_size), valid_lens
(batch,) or (batch, q_len): the number of keys that may be attended to, from the first one on; None: all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from manyheads import nn as ours
from manyheads.errors import ShapeError
from manyheads.extras.texts.common import (
    KeepsWeights,
    TextNotImplementedError,
    also,
    check_at_least,
    check_axes,
    check_heads,
    check_ids,
    dropout_layer,
    explain,
    read_arguments,
    shape_of,
)
from manyheads.extras.texts.d2l_tools import Module

_VECTORS = "batch, length, width"
_SHAPE_ERRORS = (RuntimeError, IndexError)
"""What torch raises in the text's code for shapes that do not fit."""


def sequence_mask(X: Tensor, valid_len: Tensor, value: float = 0) -> Tensor:  # noqa: N803
    """Return X with `value` at the positions after each row's length.

        >>> sequence_mask(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([1, 2])).tolist()
        [[1, 0, 0], [4, 5, 0]]

    Args: X: (rows, length, ...). valid_len: (rows,).
    Differs: X itself is not changed.
    """
    if not isinstance(X, Tensor) or X.dim() < 2:
        check_axes("X", X, "rows, length", *_SHAPE_ERRORS)
    _check_kind("valid_len", valid_len)
    if valid_len.shape != X.shape[:1]:
        raise also(ShapeError, *_SHAPE_ERRORS)(
            f"valid_len has shape {tuple(valid_len.shape)}, but X {tuple(X.shape)} has {X.shape[0]} rows; give a length"
            " for each row."
        )
    masked = X.clone()
    masked[torch.arange(X.shape[1], device=X.device) >= valid_len[:, None]] = value
    return masked


def masked_softmax(X: Tensor, valid_lens: Tensor | None) -> Tensor:  # noqa: N803
    """Return the softmax over the valid keys; see the module for valid_lens.

        >>> weights = masked_softmax(torch.rand(2, 2, 4), torch.tensor([2, 3]))
        >>> (weights > 0).sum(dim=-1).tolist()
        [[2, 2], [3, 3]]

    Shape: X (batch, q_len, k_len), with any axes if valid_lens is None.
    """
    if valid_lens is None:
        shape_of("X", X, "..., k_len")
        if not X.is_floating_point():
            raise also(ShapeError, NotImplementedError)(f"X has the type {X.dtype}; call X.float() before a softmax.")
        return torch.softmax(X, dim=-1)
    check_axes("X", X, "batch, q_len, k_len", *_SHAPE_ERRORS)
    _check_lengths(valid_lens, X.shape[0], X.shape[1], f"scores of shape {tuple(X.shape)}")
    each = valid_lens[:, None, None] if valid_lens.dim() == 1 else valid_lens[:, :, None]
    return ours.masked_softmax(X, torch.arange(X.shape[2], device=X.device) < each, "uniform")


def transpose_qkv(X: Tensor, num_heads: int) -> Tensor:  # noqa: N803
    """Split into heads, which join the batch: (batch, length, width) -> (batch x heads, length, width / heads)."""
    check_axes("X", X, _VECTORS, *_SHAPE_ERRORS)
    check_heads(X.shape[2], num_heads, ("width", "num_heads"), RuntimeError)
    return ours.split_heads(X, num_heads).flatten(0, 1)


def transpose_output(X: Tensor, num_heads: int) -> Tensor:  # noqa: N803
    """The inverse of `transpose_qkv`: (batch x heads, length, width / heads) -> (batch, length, width)."""
    check_axes("X", X, "batch x heads, length, width / heads", *_SHAPE_ERRORS)
    check_heads(X.shape[0], num_heads, ("batch x heads", "num_heads"), RuntimeError)
    return ours.merge_heads(X.reshape(X.shape[0] // num_heads, num_heads, *X.shape[1:]))


class DotProductAttention(KeepsWeights):
    """Scaled dot-product attention; `attention_weights` (batch, q_len, k_len) are those of the last call.

    Editions: DotProductAttention(dropout).
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout_layer(dropout)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        """Return (batch, q_len, value_size)."""
        _check_call(queries, keys, values, valid_lens)
        if queries.shape[2] != keys.shape[2]:
            raise also(ShapeError, *_SHAPE_ERRORS)(
                f"queries of shape {tuple(queries.shape)} and keys of shape {tuple(keys.shape)} differ in width; a dot"
                " product needs equal widths, AdditiveAttention does not."
            )
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[2])
        self.attention_weights = masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)


class AdditiveAttention(KeepsWeights):
    """Attention by w_v . tanh(W_q q + W_k k); `attention_weights` as in `DotProductAttention`.

    Editions: AdditiveAttention(key_size, query_size, num_hiddens, dropout); AdditiveAttention(num_hiddens, dropout).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        editions = ("key_size, query_size, num_hiddens, dropout", "num_hiddens, dropout")
        _, sizes = read_arguments("AdditiveAttention", editions, args, kwargs)
        check_at_least(1, **{name: size for name, size in sizes.items() if name != "dropout"})
        self.W_k = _linear(sizes.get("key_size"), sizes["num_hiddens"], bias=False)
        self.W_q = _linear(sizes.get("query_size"), sizes["num_hiddens"], bias=False)
        self.w_v = _linear(sizes["num_hiddens"] if "key_size" in sizes else None, 1, bias=False)
        self.dropout = dropout_layer(sizes["dropout"])

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        """Return (batch, q_len, value_size)."""
        _check_call(queries, keys, values, valid_lens)
        _check_width("queries", queries, self.W_q, "query_size")
        _check_width("keys", keys, self.W_k, "key_size")
        hidden = torch.tanh(self.W_q(queries)[:, :, None] + self.W_k(keys)[:, None])  # (batch, q_len, k_len, hiddens)
        self.attention_weights = masked_softmax(self.w_v(hidden).squeeze(-1), valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)


class MultiHeadAttention(nn.Module):
    """Multi-head attention. The weights of the last call are `attention.attention_weights`, (batch x heads, q_len,
    k_len).

    Editions: MultiHeadAttention(key_size, query_size, value_size, num_hiddens, num_heads, dropout, bias=False);
        MultiHeadAttention(num_hiddens, num_heads, dropout, bias=False).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        editions = (
            "key_size, query_size, value_size, num_hiddens, num_heads, dropout, bias=False",
            "num_hiddens, num_heads, dropout, bias=False",
        )
        _, sizes = read_arguments("MultiHeadAttention", editions, args, kwargs)
        width, bias = sizes["num_hiddens"], sizes["bias"]
        check_at_least(1, **{name: size for name, size in sizes.items() if name.endswith("_size")})
        check_heads(width, sizes["num_heads"], ("num_hiddens", "num_heads"), RuntimeError, ValueError, TypeError)
        self.num_heads = sizes["num_heads"]
        self.attention = DotProductAttention(sizes["dropout"])
        self.W_q = _linear(sizes.get("query_size"), width, bias)
        self.W_k = _linear(sizes.get("key_size"), width, bias)
        self.W_v = _linear(sizes.get("value_size"), width, bias)
        self.W_o = _linear(width if "key_size" in sizes else None, width, bias)

    @property
    def attention_weights(self) -> Tensor | None:
        """The weights of the last call, (batch x heads, q_len, k_len); None before it."""
        return self.attention.attention_weights

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        """Return (batch, q_len, num_hiddens)."""
        _check_call(queries, keys, values, valid_lens)
        _check_width("queries", queries, self.W_q, "query_size")
        _check_width("keys", keys, self.W_k, "key_size")
        _check_width("values", values, self.W_v, "value_size")
        heads = (
            self.transpose_qkv(self.W_q(queries)),
            self.transpose_qkv(self.W_k(keys)),
            self.transpose_qkv(self.W_v(values)),
        )
        if valid_lens is not None:
            valid_lens = valid_lens.repeat_interleave(self.num_heads, dim=0)
        return self.W_o(self.transpose_output(self.attention(*heads, valid_lens)))  # type: ignore[no-any-return]

    def transpose_qkv(self, X: Tensor) -> Tensor:  # noqa: N803
        """See the function of this name."""
        return transpose_qkv(X, self.num_heads)

    def transpose_output(self, X: Tensor) -> Tensor:  # noqa: N803
        """See the function of this name."""
        return transpose_output(X, self.num_heads)


class PositionalEncoding(nn.Module):
    """X + P[:, :length], with dropout. P (1, max_len, num_hiddens): sines in even columns, cosines in odd ones.

    P is computed in float32 as in the text, and is not in the state dict. `nn.sinusoidal_table` computes in float64 and
    has no limit of length.
    """

    P: Tensor

    def __init__(self, num_hiddens: int, dropout: float, max_len: int = 1000) -> None:
        super().__init__()
        check_at_least(1, num_hiddens=num_hiddens, max_len=max_len)
        self.dropout = dropout_layer(dropout)
        even = torch.arange(0, num_hiddens, 2, dtype=torch.float32)
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] / torch.pow(10000, even / num_hiddens)
        table = torch.zeros(1, max_len, num_hiddens)
        table[0, :, 0::2] = angles.sin()
        table[0, :, 1::2] = angles.cos()[:, : num_hiddens // 2]
        self.register_buffer("P", table, persistent=False)

    def forward(self, X: Tensor) -> Tensor:  # noqa: N803
        """Shape: (batch, length, num_hiddens), in and out."""
        check_axes("X", X, _VECTORS, *_SHAPE_ERRORS)
        if X.shape[1] > self.P.shape[1] or X.shape[2] != self.P.shape[2]:
            raise also(ShapeError, *_SHAPE_ERRORS)(
                f"X has shape {tuple(X.shape)}, but there are {self.P.shape[1]} positions of width {self.P.shape[2]};"
                " shorten X, or give max_len."
            )
        return self.dropout(X + self.P[:, : X.shape[1]])  # type: ignore[no-any-return]


class PositionWiseFFN(nn.Module):
    """Two linear layers with a ReLU between them.

    Editions: PositionWiseFFN(ffn_num_input, ffn_num_hiddens, ffn_num_outputs); PositionWiseFFN(ffn_num_hiddens,
        ffn_num_outputs).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        editions = ("ffn_num_input, ffn_num_hiddens, ffn_num_outputs", "ffn_num_hiddens, ffn_num_outputs")
        edition, sizes = read_arguments("PositionWiseFFN", editions, args, kwargs)
        check_at_least(1, **sizes)
        hidden = sizes["ffn_num_hiddens"]
        self.dense1 = _linear(sizes.get("ffn_num_input"), hidden)
        self.relu = nn.ReLU()
        self.dense2 = _linear(hidden if edition == 0 else None, sizes["ffn_num_outputs"])

    def forward(self, X: Tensor) -> Tensor:  # noqa: N803
        """Shape: (..., input) -> (..., outputs)."""
        _check_width("X", X, self.dense1, "ffn_num_input")
        return self.dense2(self.relu(self.dense1(X)))  # type: ignore[no-any-return]


class AddNorm(nn.Module):
    """LN(dropout(Y) + X).

    Editions: AddNorm(normalized_shape, dropout); AddNorm(norm_shape, dropout).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        editions = ("norm_shape, dropout", "normalized_shape, dropout")
        _, sizes = read_arguments("AddNorm", editions, args, kwargs)
        self.dropout = dropout_layer(sizes.pop("dropout"))
        [shape] = sizes.values()
        self.ln = nn.LayerNorm(shape)

    def forward(self, X: Tensor, Y: Tensor) -> Tensor:  # noqa: N803
        """Shape: X and Y are alike."""
        if shape_of("X", X, "..., width") != shape_of("Y", Y, "..., width"):
            raise also(ShapeError, RuntimeError)(
                f"X has shape {tuple(X.shape)} and Y {tuple(Y.shape)}; a residual connection needs equal shapes."
            )
        normed = self.ln.normalized_shape
        if tuple(X.shape[-len(normed) :]) != normed:
            raise also(ShapeError, RuntimeError)(
                f"X has shape {tuple(X.shape)}, but AddNorm was made for the last axes {normed}; change one of them."
            )
        return self.ln(self.dropout(Y) + X)  # type: ignore[no-any-return]


def _not_made(module: nn.Module, name: str) -> TextNotImplementedError:
    return TextNotImplementedError(f"{type(module).__name__} has no {name} of its own; write it in a subclass.")


class Encoder(nn.Module):
    """Base class of encoders: `forward(X, *args)`."""

    def forward(self, X: Tensor, *args: Any) -> Any:  # noqa: N803
        raise _not_made(self, "forward")


class Decoder(nn.Module):
    """Base class of decoders: `init_state(enc_outputs, *args)` and `forward(X, state)`."""

    def init_state(self, enc_outputs: Any, *args: Any) -> Any:
        raise _not_made(self, "init_state")

    def forward(self, X: Tensor, state: Any) -> Any:  # noqa: N803
        raise _not_made(self, "forward")


class AttentionDecoder(Decoder):
    """Base class of decoders with `attention_weights`."""

    @property
    def attention_weights(self) -> Any:
        raise _not_made(self, "attention_weights")


class EncoderDecoder(Module):
    """An encoder and a decoder.

    Editions: EncoderDecoder(encoder, decoder), which returns what the decoder returns; EncoderDecoder(encoder, decoder,
        tgt_pad, lr), which returns the first part of it; see also `d2l.Seq2Seq`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        editions = ("encoder, decoder", "encoder, decoder, tgt_pad, lr")
        edition, parts = read_arguments("EncoderDecoder", editions, args, kwargs)
        self.encoder, self.decoder = parts["encoder"], parts["decoder"]
        self.returns_state = edition == 0
        if edition == 1:
            self.tgt_pad, self.lr = parts["tgt_pad"], parts["lr"]

    def forward(self, enc_X: Tensor, dec_X: Tensor, *args: Any) -> Any:  # noqa: N803
        state = self.decoder.init_state(self.encoder(enc_X, *args), *args)
        answer = self.decoder(dec_X, state)
        return answer if self.returns_state else answer[0]


_CHINESE_BLOCK = (
    "key_size, query_size, value_size, num_hiddens, norm_shape, ffn_num_input, ffn_num_hiddens, num_heads, dropout"
)
_CHINESE_STACK = _CHINESE_BLOCK.replace("num_heads", "num_heads, num_layers")
_ENGLISH_BLOCK = "num_hiddens, ffn_num_hiddens, num_heads, dropout"
_ENGLISH_STACK = "num_hiddens, ffn_num_hiddens, num_heads, num_blks, dropout"


class TransformerEncoderBlock(nn.Module):
    """Self-attention and a feed-forward network, each followed by `AddNorm`; in the Chinese edition `EncoderBlock`.

    Editions: EncoderBlock(key_size, query_size, value_size, num_hiddens, norm_shape, ffn_num_input, ffn_num_hiddens,
        num_heads, dropout, use_bias=False); TransformerEncoderBlock(num_hiddens, ffn_num_hiddens, num_heads, dropout,
        use_bias=False).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        editions = (f"{_CHINESE_BLOCK}, use_bias=False", f"{_ENGLISH_BLOCK}, use_bias=False")
        _, sizes = read_arguments(type(self).__name__, editions, args, kwargs)
        self.attention = MultiHeadAttention(*_of_attention(sizes), sizes["use_bias"])
        self.addnorm1 = _add_norm(sizes)
        self.ffn = _feed_forward(sizes)
        self.addnorm2 = _add_norm(sizes)

    def forward(self, X: Tensor, valid_lens: Tensor | None = None) -> Tensor:  # noqa: N803
        """Shape: (batch, length, num_hiddens), in and out."""
        seen = self.addnorm1(X, self.attention(X, X, X, valid_lens))
        return self.addnorm2(seen, self.ffn(seen))  # type: ignore[no-any-return]


class EncoderBlock(TransformerEncoderBlock):
    """`TransformerEncoderBlock` under the name of the Chinese edition."""


class TransformerEncoder(KeepsWeights, Encoder):
    """Embeddings times sqrt(num_hiddens), positions, and a stack of blocks; `attention_weights` of each block, (batch x
    heads, length, length).

    Editions: TransformerEncoder(vocab_size, key_size, query_size, value_size, num_hiddens, norm_shape, ffn_num_input,
        ffn_num_hiddens, num_heads, num_layers, dropout, use_bias=False); TransformerEncoder(vocab_size, num_hiddens,
        ffn_num_hiddens, num_heads, num_blks, dropout, use_bias=False).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        editions = (f"vocab_size, {_CHINESE_STACK}, use_bias=False", f"vocab_size, {_ENGLISH_STACK}, use_bias=False")
        edition, sizes = read_arguments("TransformerEncoder", editions, args, kwargs)
        vocab_size, depth = sizes.pop("vocab_size"), sizes.pop("num_blks" if edition else "num_layers")
        check_at_least(1, vocab_size=vocab_size, **{"num_blks" if edition else "num_layers": depth})
        self.num_hiddens = sizes["num_hiddens"]
        self.embedding = nn.Embedding(vocab_size, self.num_hiddens)
        self.pos_encoding = PositionalEncoding(self.num_hiddens, sizes["dropout"])
        block = TransformerEncoderBlock if edition else EncoderBlock
        self.blks: Any = _stack(block(**sizes) for _ in range(depth))

    def forward(self, X: Tensor, valid_lens: Tensor | None = None, *args: Any) -> Tensor:  # noqa: N803
        """Shape: X (batch, length) ids -> (batch, length, num_hiddens)."""
        check_axes("X", X, "batch, length", RuntimeError)
        check_ids(X, "X", self.embedding.num_embeddings, "make the module with vocab_size={} or more")
        x: Tensor = self.pos_encoding(self.embedding(X) * math.sqrt(self.num_hiddens))
        self.attention_weights = []
        for block in self.blks:
            x = block(x, valid_lens)
            self.attention_weights.append(block.attention.attention_weights)
        return x


class TransformerDecoderBlock(nn.Module):
    """Masked self-attention, attention to the encoder, and a feed-forward network; block i of the stack.

    `forward` takes and returns the state [enc_outputs, enc_valid_lens, inputs of each block so far] and appends to the
    third. As in the text, later positions are hidden in training only: in evaluation give one position at a time.

    Editions: DecoderBlock(key_size, query_size, value_size, num_hiddens, norm_shape, ffn_num_input, ffn_num_hiddens,
        num_heads, dropout, i); TransformerDecoderBlock(num_hiddens, ffn_num_hiddens, num_heads, dropout, i).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        editions = (f"{_CHINESE_BLOCK}, i", f"{_ENGLISH_BLOCK}, i")
        _, sizes = read_arguments(type(self).__name__, editions, args, kwargs)
        self.i = sizes["i"]
        self.attention1 = MultiHeadAttention(*_of_attention(sizes))
        self.addnorm1 = _add_norm(sizes)
        self.attention2 = MultiHeadAttention(*_of_attention(sizes))
        self.addnorm2 = _add_norm(sizes)
        self.ffn = _feed_forward(sizes)
        self.addnorm3 = _add_norm(sizes)

    def forward(self, X: Tensor, state: list[Any]) -> tuple[Tensor, list[Any]]:  # noqa: N803
        """Shape: X (batch, new_len, num_hiddens), in and out."""
        check_axes("X", X, _VECTORS, *_SHAPE_ERRORS)
        _check_state(state, self.i)
        memory, memory_lens, earlier = state
        seen = X if earlier[self.i] is None else torch.cat([earlier[self.i], X], dim=1)
        earlier[self.i] = seen
        each = torch.arange(1, X.shape[1] + 1, device=X.device).expand(len(X), -1) if self.training else None
        x = self.addnorm1(X, self.attention1(X, seen, seen, each))
        x = self.addnorm2(x, self.attention2(x, memory, memory, memory_lens))
        return self.addnorm3(x, self.ffn(x)), state


class DecoderBlock(TransformerDecoderBlock):
    """`TransformerDecoderBlock` under the name of the Chinese edition."""


class TransformerDecoder(KeepsWeights, AttentionDecoder):
    """Embeddings, positions, a stack of blocks, and a linear layer to the vocabulary.

    `attention_weights`: two lists over the blocks: of self-attention, and of attention to the encoder.

    Editions: TransformerDecoder(vocab_size, key_size, query_size, value_size, num_hiddens, norm_shape, ffn_num_input,
        ffn_num_hiddens, num_heads, num_layers, dropout); TransformerDecoder(vocab_size, num_hiddens, ffn_num_hiddens,
        num_heads, num_blks, dropout).
    """

    kept = "_attention_weights"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        editions = (f"vocab_size, {_CHINESE_STACK}", f"vocab_size, {_ENGLISH_STACK}")
        edition, sizes = read_arguments("TransformerDecoder", editions, args, kwargs)
        name = "num_blks" if edition else "num_layers"
        vocab_size, depth = sizes.pop("vocab_size"), sizes.pop(name)
        check_at_least(1, vocab_size=vocab_size, **{name: depth})
        setattr(self, name, depth)
        self.num_hiddens = sizes["num_hiddens"]
        self.embedding = nn.Embedding(vocab_size, self.num_hiddens)
        self.pos_encoding = PositionalEncoding(self.num_hiddens, sizes["dropout"])
        block = TransformerDecoderBlock if edition else DecoderBlock
        self.blks: Any = _stack(block(**sizes, i=place) for place in range(depth))
        self.dense = _linear(None if edition else self.num_hiddens, vocab_size)

    def init_state(self, enc_outputs: Tensor, enc_valid_lens: Tensor | None = None, *args: Any) -> list[Any]:
        """Return the state before the first position."""
        return [enc_outputs, enc_valid_lens, [None] * len(self.blks)]

    def forward(self, X: Tensor, state: list[Any]) -> tuple[Tensor, list[Any]]:  # noqa: N803
        """Shape: X (batch, new_len) ids -> (batch, new_len, vocab_size), and the state."""
        check_axes("X", X, "batch, length", RuntimeError)
        check_ids(X, "X", self.embedding.num_embeddings, "make the module with vocab_size={} or more")
        x: Tensor = self.pos_encoding(self.embedding(X) * math.sqrt(self.num_hiddens))
        _check_state(state, len(self.blks) - 1)
        self._attention_weights: list[list[Any]] = [[], []]
        for block in self.blks:
            x, state = block(x, state)
            self._attention_weights[0].append(block.attention1.attention_weights)
            self._attention_weights[1].append(block.attention2.attention_weights)
        return self.dense(x), state

    @property
    def attention_weights(self) -> list[list[Tensor]]:
        return self._attention_weights


def _linear(in_features: int | None, out_features: int, bias: bool = True) -> nn.Linear:
    """Return torch's own layer, of exactly this type, because the text's code asks `type(layer) == nn.Linear`; without
    an input width, one that learns it at the first call.
    """
    if in_features is None:
        return nn.LazyLinear(out_features, bias=bias)
    return nn.Linear(in_features, out_features, bias=bias)


def _of_attention(sizes: dict[str, Any]) -> list[Any]:
    names = ("key_size", "query_size", "value_size", "num_hiddens", "num_heads", "dropout")
    return [sizes[name] for name in names if name in sizes]


def _add_norm(sizes: dict[str, Any]) -> AddNorm:
    return AddNorm(sizes.get("norm_shape", sizes["num_hiddens"]), sizes["dropout"])


def _feed_forward(sizes: dict[str, Any]) -> PositionWiseFFN:
    given = (sizes[name] for name in ("ffn_num_input", "ffn_num_hiddens") if name in sizes)
    return PositionWiseFFN(*given, sizes["num_hiddens"])


def _stack(blocks: Any) -> nn.Sequential:
    stack = nn.Sequential()
    for place, block in enumerate(blocks):
        stack.add_module(f"block{place}", block)
    return stack


def _check_state(state: Any, last: int) -> None:
    """Check the state of a decoder. last: the largest number of a block."""
    is_state = isinstance(state, list | tuple) and len(state) == 3 and isinstance(state[2], list)
    if not is_state or len(state[2]) <= last:
        of = f" with {len(state[2])} blocks" if is_state else ""
        raise also(ShapeError, ValueError, TypeError, IndexError)(
            f"the state is {type(state).__name__}{of}; give what init_state(enc_outputs, enc_valid_lens) or the last"
            " call returned: [enc_outputs, enc_valid_lens, inputs of each block], a list with None for each block."
        )


def _check_kind(name: str, lengths: object) -> None:
    shape_of(name, lengths, "batch")
    assert isinstance(lengths, Tensor)
    if lengths.dtype == torch.bool:
        raise also(ShapeError, *_SHAPE_ERRORS)(
            f"{name} of shape {tuple(lengths.shape)} is a mask of True and False; give the number of valid keys,"
            " such as mask.sum(dim=-1) where the valid ones come first."
        )


def _check_lengths(valid_lens: object, batch: int, q_len: int, what: str) -> None:
    """Check valid_lens for `what`, which has this batch size and number of queries."""
    _check_kind("valid_lens", valid_lens)
    assert isinstance(valid_lens, Tensor)
    given = tuple(valid_lens.shape)
    if given in ((batch,), (batch, q_len)):
        return
    is_length_first = given in ((q_len,), (q_len, batch)) and batch != q_len
    turn = (
        "; these tensors seem to be (length, batch, width): give x.transpose(0, 1)"
        if is_length_first
        else "; repeat or cut valid_lens to that"
    )
    raise also(ShapeError, *_SHAPE_ERRORS)(
        f"valid_lens has shape {given}, but there are {what}: it must be (batch,), here {(batch,)}, or (batch, q_len),"
        f" here {(batch, q_len)}{turn}."
    )


def _check_call(queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None) -> None:
    """Check the arguments of attention against each other."""
    given = {"queries": queries, "keys": keys, "values": values}
    for name, x in given.items():
        check_axes(name, x, _VECTORS, *_SHAPE_ERRORS)
    shapes = ", ".join(f"{name} of shape {tuple(x.shape)}" for name, x in given.items())
    if valid_lens is not None:
        _check_lengths(valid_lens, queries.shape[0], queries.shape[1], shapes)
    if not queries.shape[0] == keys.shape[0] == values.shape[0]:
        raise also(ShapeError, *_SHAPE_ERRORS)(
            f"{shapes} must have one batch size, which is the first axis; where the length comes first, give"
            " x.transpose(0, 1)."
        )
    if keys.shape[1] != values.shape[1]:
        raise also(ShapeError, *_SHAPE_ERRORS)(
            f"there are {keys.shape[1]} keys and {values.shape[1]} values ({shapes}); each key needs one value."
        )


def _check_width(name: str, x: Tensor, layer: nn.Linear, argument: str) -> None:
    shape = shape_of(name, x, "..., width")
    if not isinstance(layer, nn.LazyLinear) and shape[-1:] != (layer.in_features,):
        raise also(ShapeError, RuntimeError)(
            f"{name} has shape {shape}, a width of {shape[-1] if shape else 0}, but this module was made for"
            f" {layer.in_features}; change the input, or {argument}."
        )


explain(globals())
