"""The attention modules of Dive into Deep Learning: valid lengths as masks, and uniform weights for a length of 0.

Differs from ours: keys after a row's valid length get the score -1e6, so that a length of 0 gives every key the same
weight; no biases by default; input widths are determined at the first call. The wrappers reproduce this from outside;
our modules are not changed.

    d2l/AdditiveAttention, d2l/DotProductAttention, d2l/MultiHeadAttention, d2l/masked_softmax: in.queries, in.keys,
        in.values (in.scores for the last), in.valid_lens -> out.output, out.attention_weights
    d2l/TransformerEncoderBlock: in.X, in.valid_lens -> out.output
    d2l/attention: all of them and the positions together, as in a fixture
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manyheads.errors import ModelFileError, RequestError
from manyheads.extras.peers.one_head import AdditiveAttention, DotProductAttention
from manyheads.extras.peers.peer import (
    Layout,
    Options,
    Parts,
    Peer,
    nested,
    own_heads,
    require,
    uniform_when_empty,
    weights_by_part,
)
from manyheads.nn.attention.masks import Dense, Lengths
from manyheads.nn.attention.multi_head import PROJECTIONS, MultiHeadAttention
from manyheads.nn.kernels.attention import masked_softmax
from manyheads.nn.layers import FeedForward, Residual
from manyheads.nn.positions import sinusoidal_table

_POSITIONS = 40


class MaskedSoftmax(nn.Module):
    """`masked_softmax` with d2l's arguments. scores (batch, q_len, k_len), valid_lens (batch,) or (batch, q_len)."""

    def forward(self, scores: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        return masked_softmax(scores, _allowed(valid_lens, scores.shape[-2], scores.shape[-1]), "uniform")


class EncoderBlock(nn.Module):
    """Our modules in the structure of d2l's block: post-norm, feed-forward always with biases.

    Shape: (batch, length, d_model) in and out.
    """

    def __init__(self, d_model: int, d_ff: int, num_heads: int, *, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout=dropout, bias=bias)
        self.feed_forward = FeedForward(d_model, d_ff)
        self.self_attn_residual = Residual(nn.LayerNorm(d_model), position="post", dropout=dropout)
        self.feed_forward_residual = Residual(nn.LayerNorm(d_model), position="post", dropout=dropout)

    def forward(self, x: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        allowed = _allowed(valid_lens, x.shape[1], x.shape[1])
        with uniform_when_empty(self, "self_attn", None if allowed is None else allowed[:, None]) as mask:
            x = self.self_attn_residual(x, lambda h: self.self_attn(h, mask=mask)[0])
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


def _allowed(valid_lens: Tensor | None, q_len: int, k_len: int) -> Tensor | None:
    """(batch, 1 or q_len, k_len), True = valid."""
    if valid_lens is None:
        return None
    if valid_lens.dim() not in (1, 2) or valid_lens.is_floating_point():
        raise RequestError(
            f"valid_lens of shape {tuple(valid_lens.shape)} and type {valid_lens.dtype} must be whole numbers, (batch,)"
            " or (batch, q_len)."
        )
    device = valid_lens.device
    queries, keys = torch.arange(q_len, device=device), torch.arange(k_len, device=device)
    return Lengths(valid_lens).allowed(queries, keys)[:, 0]


def _one_head(module: AdditiveAttention | DotProductAttention, *given: Tensor, lens: Tensor | None) -> list[Tensor]:
    """Return output and weights of an attention with one head, by d2l's conventions."""
    allowed = _allowed(lens, given[0].shape[1], given[1].shape[1])
    if allowed is None:
        return list(module(*given, need_weights=True))
    empty = ~allowed.any(dim=-1, keepdim=True)
    _, weights = module(*given, mask=Dense(allowed), need_weights=True)
    weights = weights.masked_fill(empty, 1.0 / weights.shape[-1])
    return [torch.matmul(weights, given[2]), weights]


class SoftmaxPeer(Peer):
    """masked_softmax."""

    name = "d2l/masked_softmax"
    inputs = ("scores", "valid_lens")

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> MaskedSoftmax:
        return MaskedSoftmax()

    @classmethod
    def describe(cls, module: MaskedSoftmax) -> dict[str, Any]:
        return {}

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"out.output": self.module(*require(inputs, "scores"), inputs.get("in.valid_lens"))}


class _AttentionPeer(Peer):
    """The common part of the kinds of attention."""

    inputs = ("queries", "keys", "values", "valid_lens")

    @classmethod
    def attend(cls, module: Any, *given: Tensor, lens: Tensor | None) -> list[Tensor]:
        """Return output and weights for queries, keys and values."""
        return _one_head(module, *given, lens=lens)

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given = require(inputs, "queries", "keys", "values")
        out, weights = self.attend(self.module, *given, lens=inputs.get("in.valid_lens"))
        return {"out.output": out, "out.attention_weights": weights}


class DotProductPeer(_AttentionPeer):
    """DotProductAttention."""

    name = "d2l/DotProductAttention"
    options: ClassVar[Options] = {"dropout": 0.0}

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DotProductAttention:
        return DotProductAttention(dropout=options["dropout"])

    @classmethod
    def describe(cls, module: DotProductAttention) -> dict[str, Any]:
        cls.refuse({f"scale {module.scale}": module.scale is not None})
        return {"dropout": module.dropout_rate}


class AdditivePeer(_AttentionPeer):
    """AdditiveAttention."""

    name = "d2l/AdditiveAttention"
    options: ClassVar[Options] = {"num_hiddens": int, "dropout": 0.0}
    layout: ClassVar[Layout] = {"W_{q,k}.weight": "{q,k}_proj.weight", "w_v.weight": "score_proj.weight"}

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> AdditiveAttention:
        query_dim, key_dim = _widths(weights, "W_q.weight", "W_k.weight")
        return AdditiveAttention(query_dim, key_dim, options["num_hiddens"], dropout=options["dropout"])

    @classmethod
    def describe(cls, module: AdditiveAttention) -> dict[str, Any]:
        return {"num_hiddens": module.q_proj.out_features, "dropout": module.dropout_rate}


class MultiHeadPeer(_AttentionPeer):
    """MultiHeadAttention."""

    name = "d2l/MultiHeadAttention"
    options: ClassVar[Options] = {"num_hiddens": int, "num_heads": int, "dropout": 0.0, "bias": False}
    layout: ClassVar[Layout] = {"W_{q,k,v,o}.*": "{q,k,v,out}_proj.*"}

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> MultiHeadAttention:
        query_dim, key_dim, value_dim = _widths(weights, "W_q.weight", "W_k.weight", "W_v.weight")
        return MultiHeadAttention(
            options["num_hiddens"],
            options["num_heads"],
            query_dim=query_dim,
            key_dim=key_dim,
            value_dim=value_dim,
            dropout=options["dropout"],
            bias=options["bias"],
        )

    @classmethod
    def describe(cls, module: MultiHeadAttention) -> dict[str, Any]:
        d_model = module.out_proj.out_features
        biases = {getattr(module, name).bias is not None for name in PROJECTIONS}
        cls.refuse({**own_heads(module), "biases in some projections only": len(biases) > 1})
        options = {"num_hiddens": d_model, "num_heads": module.num_heads, "dropout": module.dropout_rate}
        return {**options, "bias": biases == {True}}

    @classmethod
    def attend(cls, module: MultiHeadAttention, *given: Tensor, lens: Tensor | None) -> list[Tensor]:
        holder, allowed = nn.ModuleDict({"attention": module}), _allowed(lens, given[0].shape[1], given[1].shape[1])
        with uniform_when_empty(holder, "attention", None if allowed is None else allowed[:, None]) as mask:
            out, _, weights = module(*given, mask=mask, need_weights=True)
        return [out, weights.flatten(0, 1)]  # d2l merges heads into the batch axis


class BlockPeer(Peer):
    """TransformerEncoderBlock."""

    name = "d2l/TransformerEncoderBlock"
    options: ClassVar[Options] = {
        "num_hiddens": int,
        "ffn_num_hiddens": int,
        "num_heads": int,
        "dropout": 0.0,
        "use_bias": False,
    }
    inputs = ("X", "valid_lens")
    layout: ClassVar[Layout] = {
        "attention.W_{q,k,v,o}.*": "self_attn.{q,k,v,out}_proj.*",
        "ffn.dense{1,2}.*": "feed_forward.{in,out}_proj.*",
        "addnorm{1,2}.ln.*": "{self_attn,feed_forward}_residual.norm.*",
    }

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> EncoderBlock:
        return EncoderBlock(
            options["num_hiddens"],
            options["ffn_num_hiddens"],
            options["num_heads"],
            dropout=options["dropout"],
            bias=options["use_bias"],
        )

    @classmethod
    def describe(cls, module: EncoderBlock) -> dict[str, Any]:
        attention, residual = MultiHeadPeer.describe(module.self_attn), module.self_attn_residual
        norms = (residual.norm, module.feed_forward_residual.norm)
        other_norm = any(not isinstance(norm, nn.LayerNorm) or norm.eps != 1e-5 for norm in norms)
        activation = module.feed_forward.activation
        cls.refuse(
            {
                f"norm_position {residual.position!r}": residual.position != "post",
                f"activation {activation!r}": activation != "relu",
                "another norm than nn.LayerNorm with eps 1e-5": other_norm,
            }
        )
        width, bias = module.feed_forward.in_proj.out_features, attention.pop("bias")
        return {**attention, "ffn_num_hiddens": width, "use_bias": bias}

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        [x] = require(inputs, "X")
        return {"out.output": self.module(x, inputs.get("in.valid_lens"))}


class AllOfD2l(Peer):
    """All of the above and the positions on the same inputs, as in a fixture: without valid lengths, and with each kind
    that is given. A config holds h, heads, bias, add_h and ffn; the names of weights begin with add, mha or blk.
    """

    name = "d2l"
    kinds = ("d2l",)
    origin = "d2l-ai/d2l-en"
    section = None
    ignores_others = True
    options: ClassVar[Options] = {"h": int, "heads": int, "bias": bool, "add_h": int, "ffn": int}
    layout = nested({"add": AdditivePeer.layout, "mha": MultiHeadPeer.layout, "blk": BlockPeer.layout})

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Parts:
        own = weights_by_part(weights, ("add", "mha", "blk"))
        sizes = {"num_hiddens": options["h"], "num_heads": options["heads"], "dropout": 0.0, "bias": options["bias"]}
        # Published blocks have biases in attention if use_bias is true, but the fixtures' never have.
        block = {**sizes, "ffn_num_hiddens": options["ffn"], "use_bias": "attention.W_q.bias" in own["blk"]}
        return Parts(
            {
                "add": AdditivePeer.build({**sizes, "num_hiddens": options["add_h"]}, own["add"]),
                "mha": MultiHeadPeer.build(sizes, own["mha"]),
                "blk": BlockPeer.build(block, own["blk"]),
                "dot": DotProductAttention(),
                "softmax": MaskedSoftmax(),
            }
        )

    @classmethod
    def describe(cls, module: Any) -> dict[str, Any]:
        attention, block = MultiHeadPeer.describe(module["mha"]), BlockPeer.describe(module["blk"])
        sizes = {"h": attention["num_hiddens"], "heads": attention["num_heads"], "bias": attention["bias"]}
        return {**sizes, "add_h": module["add"].q_proj.out_features, "ffn": block["ffn_num_hiddens"]}

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        queries, keys, values = require(inputs, "queries", "keys", "values")
        scores, dot_keys, x = require(inputs, "scores", "dot_keys", "block_x")
        answer: dict[str, Tensor] = {}
        for kind in ("none", "1d", "2d"):
            lens = inputs.get(f"in.valid_lens_{kind}")
            if kind != "none" and lens is None:
                continue
            answer[f"masked_softmax_{kind}"] = self.module["softmax"](scores, lens)
            answer[f"dot_{kind}"] = _one_head(self.module["dot"], queries, dot_keys, values, lens=lens)[0]
            for name, attend in (("additive", AdditivePeer.attend), ("mha", MultiHeadPeer.attend)):
                out, weights = attend(self.module[name[:3]], queries, keys, values, lens=lens)
                answer |= {f"{name}_{kind}": out, f"{name}_weights_{kind}": weights}
            if kind != "2d":  # its lengths are those of other queries
                answer[f"block_{kind}"] = self.module["blk"](x, lens)
        answer["positions"] = sinusoidal_table(torch.arange(float(_POSITIONS)), self.chosen["h"])
        return {f"out.{name}": tensor for name, tensor in answer.items()}


def _widths(weights: Mapping[str, Tensor], *names: str) -> list[int]:
    """Return the numbers of columns of matrices."""
    for name in names:
        if name not in weights or weights[name].dim() != 2:
            raise ModelFileError(f"these weights have no matrix {name}, which determines an input width.")
    return [weights[name].shape[1] for name in names]
