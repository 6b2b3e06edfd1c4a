"""The model of the Annotated Transformer by the text's names: see `annotated_transformer`, which has the rest."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError, RequestError, ShapeError
from manyheads.extras.texts.common import (
    also,
    can_be_read,
    check_at_least,
    check_axes,
    check_rates,
    dropout_layer,
    explain,
    shape_of,
    table_of_positions,
)
from manyheads.nn import masked_softmax, merge_heads, split_heads


class HeadsError(ConfigError, AssertionError, ZeroDivisionError, TypeError):
    """A number of heads that does not divide the width; the text has an assertion, or divides by zero."""


class MaskError(ShapeError, RuntimeError, TypeError, AttributeError):
    """A mask that is none of the text's; torch has an error of one of these types, or reads something else."""


class InputError(ShapeError, RuntimeError, AssertionError):
    """Vectors that do not fit a module; torch has a RuntimeError, the text an assertion."""


class IdError(RequestError, IndexError, RuntimeError, AttributeError):
    """Ids outside a vocabulary, or not whole numbers; torch has an IndexError or a RuntimeError."""


class EncoderDecoder(nn.Module):
    """The whole model of any parts. Its output is the decoder's; `generator` turns that into log-probabilities.

    Shape: src (batch, source_len) and tgt (batch, target_len) ids, src_mask (batch or 1, 1, source_len), tgt_mask
    (batch or 1, target_len, target_len), 0 = blocked -> (batch, target_len, d_model).
    """

    def __init__(
        self, encoder: nn.Module, decoder: nn.Module, src_embed: nn.Module, tgt_embed: nn.Module, generator: nn.Module
    ) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.src_embed, self.tgt_embed = src_embed, tgt_embed
        self.generator = generator

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor | None, tgt_mask: Tensor | None) -> Tensor:
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)

    def encode(self, src: Tensor, src_mask: Tensor | None) -> Tensor:
        """Return the memory, (batch, source_len, d_model)."""
        memory: Tensor = self.encoder(self.src_embed(src), src_mask)
        return memory

    def decode(self, memory: Tensor, src_mask: Tensor | None, tgt: Tensor, tgt_mask: Tensor | None) -> Tensor:
        """Return the decoder's output, (batch, target_len, d_model)."""
        decoded: Tensor = self.decoder(self.tgt_embed(tgt), memory, src_mask, tgt_mask)
        return decoded


class Generator(nn.Module):
    """log softmax(W x + b) over the vocabulary. Shape: (..., d_model) -> (..., vocab)."""

    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        check_at_least(1, d_model=d_model, vocab=vocab)
        self.proj = nn.Linear(d_model, vocab)

    def forward(self, x: Tensor) -> Tensor:
        _check_width(x, self.proj.in_features, "the input of the generator")
        return torch.log_softmax(self.proj(x), dim=-1)


def clones(module: nn.Module, N: int) -> nn.ModuleList:  # noqa: N803 (the text's name)
    """Return N copies of a module, each with parameters of its own and the same values."""
    check_at_least(0, N=N)
    return nn.ModuleList(copy.deepcopy(module) for _ in range(N))


class Encoder(nn.Module):
    """N copies of a layer, and a norm. Shape: (batch, length, d_model) in and out."""

    def __init__(self, layer: nn.Module, N: int) -> None:  # noqa: N803
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = LayerNorm(_size(layer))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        normed: Tensor = self.norm(x)
        return normed


class LayerNorm(nn.Module):
    """a_2 (x - mean) / (std + eps) + b_2, with std over n - 1: `nn.layers.UnbiasedLayerNorm` by the text's names.

    Shape: (..., features) in and out.
    """

    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        check_at_least(2, features=features)  # the deviation is divided by features - 1
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        _check_width(x, self.a_2.shape[-1], "the input of the norm")
        centred = x - x.mean(-1, keepdim=True)
        return self.a_2 * centred / (x.std(-1, keepdim=True) + self.eps) + self.b_2


class SublayerConnection(nn.Module):
    """x + dropout(sublayer(norm(x))), like `nn.Residual` with the position `pre`."""

    def __init__(self, size: int, dropout: float) -> None:
        super().__init__()
        self.norm = LayerNorm(size)
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        added: Tensor = x + self.dropout(sublayer(self.norm(x)))
        return added


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network. Shape: (batch, length, size) in and out."""

    def __init__(self, size: int, self_attn: nn.Module, feed_forward: nn.Module, dropout: float) -> None:
        super().__init__()
        self.self_attn, self.feed_forward = self_attn, feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 2)
        self.size = size

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        out: Tensor = self.sublayer[1](x, self.feed_forward)
        return out


class Decoder(nn.Module):
    """N copies of a layer, and a norm. Shape: x (batch, target_len, d_model), memory (batch, source_len, d_model)."""

    def __init__(self, layer: nn.Module, N: int) -> None:  # noqa: N803
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = LayerNorm(_size(layer))

    def forward(self, x: Tensor, memory: Tensor, src_mask: Tensor | None, tgt_mask: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory, src_mask, tgt_mask)
        normed: Tensor = self.norm(x)
        return normed


class DecoderLayer(nn.Module):
    """Self-attention, attention to the memory, and a feed-forward network."""

    def __init__(
        self, size: int, self_attn: nn.Module, src_attn: nn.Module, feed_forward: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        self.size = size
        self.self_attn, self.src_attn, self.feed_forward = self_attn, src_attn, feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 3)

    def forward(self, x: Tensor, memory: Tensor, src_mask: Tensor | None, tgt_mask: Tensor | None) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, src_mask))
        out: Tensor = self.sublayer[2](x, self.feed_forward)
        return out


def subsequent_mask(size: int) -> Tensor:
    """Return which positions each position may attend to: (1, size, size) bool, `nn.Causal` as a tensor."""
    check_at_least(0, size=size)
    return torch.ones(1, size, size, dtype=torch.bool).tril()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: Callable[[Tensor], Tensor] | float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax(Q K^T / sqrt(d_k)) V, and the weights after dropout.

    A query that may attend to no key attends to all of them equally, as in the text.

    Args:
        query, key, value: (..., q_len, d_k), (..., k_len, d_k), (..., k_len, value_dim).
        mask: 0 = blocked, broadcast with the scores (..., q_len, k_len).
        dropout: a function or a module, applied to the weights; or a rate, as in some copies of the text.

    Raises: MaskError: another kind of mask. InputError: query and key differ in width, or key and value in number.
    """
    for name, x in {"query": query, "key": key, "value": value}.items():
        if len(shape_of(name, x, "..., length, width")) < 2:
            raise InputError(f"{name} has shape {tuple(x.shape)}; it must have two axes or more, (..., length, width).")
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise InputError(
            f"query, key and value of shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)} do not"
            " fit; query and key need one width (the last axis), key and value one length (the axis before it)."
        )
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.shape[-1])
    weights = masked_softmax(scores, None if mask is None else _allowed(mask, scores), "uniform")
    if dropout is not None and not callable(dropout):
        dropout = dropout_layer(dropout)
    if dropout is not None:
        weights = dropout(weights)
    return torch.matmul(weights, value), weights


class MultiHeadedAttention(nn.Module):
    """Attention in h heads, like `nn.MultiHeadAttention`.

    Attributes: attn: the weights of the last call, after dropout, (batch, h, q_len, k_len). linears: the projections of
        query, key, value and output.
    Raises: HeadsError: h does not divide d_model.
    """

    def __init__(self, h: int, d_model: int, dropout: float = 0.1) -> None:
        super().__init__()
        check_at_least(1, d_model=d_model)
        if type(h) is not int or h < 1 or d_model % h:
            raise HeadsError(
                f"d_model {d_model} is not divisible by h, {h!r} heads; choose a whole number of heads that divides"
                f" it{_divisors(d_model)}, or another width."
            )
        self.d_k = d_model // h
        self.h = h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        self.attn: Tensor | None = None
        self.dropout = dropout_layer(dropout)

    def __getstate__(self) -> dict[str, Any]:
        """Copies of the module get the weights without their graph, which cannot be copied."""
        return {**self.__dict__, "attn": None if self.attn is None else self.attn.detach()}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend.

        Shape: query (batch, q_len, d_model), key and value (batch, k_len, d_model), mask (batch or 1, q_len or 1,
        k_len), 0 = blocked -> (batch, q_len, d_model).
        Raises: MaskError, InputError: see `attention`; also masks and keys that the text would misread.
        """
        for name, x in (("query", query), ("key", key), ("value", value)):
            _check_width(x, self.h * self.d_k, f"the {name} of attention")
            if x.shape[0] != query.shape[0]:
                raise InputError(
                    f"query and {name} have shapes {tuple(query.shape)} and {tuple(x.shape)}; their first axis, the"
                    " batch, must be the same."
                )
        if mask is not None:
            mask = _mask_of_heads(mask, query.shape[0], query.shape[-2], key.shape[-2])
        given = zip(self.linears, (query, key, value), strict=False)  # the fourth is that of the output
        q, k, v = (split_heads(linear(x), self.h) for linear, x in given)
        x, self.attn = attention(q, k, v, mask=mask, dropout=self.dropout)
        out: Tensor = self.linears[-1](merge_heads(x))
        return out


class PositionwiseFeedForward(nn.Module):
    """w_2 dropout(relu(w_1 x)), like `nn.FeedForward`. Shape: (..., d_model) in and out."""

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.1) -> None:
        super().__init__()
        check_at_least(1, d_model=d_model, d_ff=d_ff)
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        _check_width(x, self.w_1.in_features, "the input of the feed-forward network")
        out: Tensor = self.w_2(self.dropout(self.w_1(x).relu()))
        return out


class Embeddings(nn.Module):
    """A table of vectors times sqrt(d_model), like `nn.positions.TokenEmbedding`. Shape: (...) ids -> (..., d_model).

    Raises: IdError: an id is not in the vocabulary.
    """

    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        check_at_least(1, d_model=d_model, vocab=vocab)
        self.lut = nn.Embedding(vocab, d_model)
        self.d_model = d_model

    def forward(self, x: Tensor) -> Tensor:
        shape_of("x", x, "ids")
        if x.is_floating_point() or x.dtype == torch.bool:
            raise IdError(f"ids are of type {x.dtype}; they must be whole numbers: call .long() on them.")
        try:
            vectors: Tensor = self.lut(x)
        except IndexError as error:
            size = self.lut.num_embeddings
            raise IdError(
                f"the ids go from {int(x.min())} to {int(x.max())}, but the vocabulary has {size}, from 0 to"
                f" {size - 1}; give the model a larger vocabulary, or other ids."
            ) from error
        return vectors * math.sqrt(self.d_model)


class PositionalEncoding(nn.Module):
    """Adds sines and cosines of the position, then dropout. Shape: (batch, length, d_model) in and out.

    The table `pe` (1, max_len, d_model) is part of the text's checkpoints. It is computed in torch's default type, as
    there: in float32 it differs from `nn.sinusoidal_table`, which is exact, by up to 3e-4 near position 5,000. Longer
    inputs get more rows.
    """

    pe: Tensor

    def __init__(self, d_model: int, dropout: float, max_len: int = 5000) -> None:
        super().__init__()
        check_at_least(1, d_model=d_model, max_len=max_len)
        self.dropout = dropout_layer(dropout)
        self.register_buffer("pe", table_of_positions(max_len, d_model))

    def forward(self, x: Tensor) -> Tensor:
        _check_width(x, self.pe.shape[-1], "the input of the table of positions")
        check_axes("the input", x, "batch, length, d_model", RuntimeError, IndexError)
        length = x.shape[1]
        table = self.pe if length <= self.pe.shape[1] else table_of_positions(length, self.pe.shape[-1]).to(self.pe)
        out: Tensor = self.dropout(x + table[:, :length])
        return out


def make_model(
    src_vocab: int,
    tgt_vocab: int,
    N: int = 6,  # noqa: N803
    d_model: int = 512,
    d_ff: int = 2048,
    h: int = 8,
    dropout: float = 0.1,
) -> EncoderDecoder:
    """Return a model of these sizes with the text's initial values: Glorot's in all matrices.

    Raises: HeadsError: h does not divide d_model.
    """
    check_at_least(1, src_vocab=src_vocab, tgt_vocab=tgt_vocab, d_model=d_model, d_ff=d_ff)
    check_rates(dropout=dropout)
    attn = MultiHeadedAttention(h, d_model, dropout)
    ff = PositionwiseFeedForward(d_model, d_ff, dropout)
    position = PositionalEncoding(d_model, dropout)
    c = copy.deepcopy
    model = EncoderDecoder(
        Encoder(EncoderLayer(d_model, c(attn), c(ff), dropout), N),
        Decoder(DecoderLayer(d_model, c(attn), c(attn), c(ff), dropout), N),
        nn.Sequential(Embeddings(d_model, src_vocab), c(position)),
        nn.Sequential(Embeddings(d_model, tgt_vocab), c(position)),
        Generator(d_model, tgt_vocab),
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return model


def _size(layer: nn.Module) -> int:
    size: object = getattr(layer, "size", None)
    if not isinstance(size, int):
        raise also(ConfigError, AttributeError)(
            f"{type(layer).__name__} has no size; set self.size to the width of its output, as EncoderLayer does."
        )
    return size


def _divisors(d_model: int) -> str:
    near = [str(h) for h in (1, 2, 4, 5, 6, 8, 10, 12, 16) if isinstance(d_model, int) and d_model % h == 0]
    return f", such as {', '.join(near)}" if near else ""


def _check_width(x: Tensor, width: int, what: str) -> None:
    shape_of(what, x, f"..., {width}")
    if not x.dim() or x.shape[-1] != width:
        raise InputError(f"{what} has the shape {tuple(x.shape)}, but must have {width} numbers in the last axis.")


def _allowed(mask: Tensor, scores: Tensor) -> Tensor:
    """Return a mask of the text as bool. Raises: MaskError: it is of another kind, or does not fit the scores."""
    _check_kind(mask)
    try:
        torch.broadcast_shapes(mask.shape, scores.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise MaskError(
            f"a mask of shape {tuple(mask.shape)} does not fit scores of shape {tuple(scores.shape)}; its last two axes"
            " must be the number of queries (or 1) and the number of keys. Batch and subsequent_mask make such masks."
        ) from None
    return mask if mask.dtype == torch.bool else mask != 0


def _check_kind(mask: Any) -> None:
    if not isinstance(mask, Tensor):
        raise MaskError(
            f"the mask is {type(mask).__name__}; it must be a tensor in which 0 is blocked, such as"
            " (src != pad).unsqueeze(-2) or subsequent_mask(size); torch.as_tensor converts an array."
        )
    if mask.is_floating_point() and can_be_read(mask) and not bool(((mask == 0) | (mask == 1)).all()):
        raise MaskError(
            f"a mask of {mask.dtype} contains other numbers than 0 (blocked) and 1, as masks that are added to scores"
            " do; convert those with mask > -1e9."
        )


def _mask_of_heads(mask: Tensor, batch: int, q_len: int, k_len: int) -> Tensor:
    """Return (batch or 1, 1, q_len or 1, k_len or 1). Raises: MaskError: the mask has other axes."""
    _check_kind(mask)
    shape = tuple(mask.shape)
    if len(shape) == 3 or (len(shape) == 2 and shape[0] == 1):
        axes = (1, *shape)[-3:]
        if all(size in (1, wanted) for size, wanted in zip(axes, (batch, q_len, k_len), strict=True)):
            return mask.unsqueeze(1)
    remedy = {
        1: "lengths go into torch.arange(k_len) < lengths[:, None, None]",
        2: "add the axis of the batch with .unsqueeze(0), or that of the queries with .unsqueeze(-2)",
        4: "leave out the axis of the heads: mask[:, 0]",
    }.get(len(shape), "Batch and subsequent_mask make such masks")
    raise MaskError(
        f"a mask of shape {shape} does not fit {q_len} queries and {k_len} keys in a batch of {batch}; it must be"
        f" (batch or 1, queries or 1, keys), 0 = blocked: {remedy}."
    )


explain(globals())
