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

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.interop.names import Pair, Parts, export_weights, import_weights, pick, require
from manyheads.interop.scores import PeerMask, scored_as, uniform_when_empty
from manyheads.nn.attention.additive import AdditiveAttention
from manyheads.nn.attention.dot_product import DotProductAttention
from manyheads.nn.attention.masks import Dense, Lengths
from manyheads.nn.attention.multi_head import PROJECTIONS, MultiHeadAttention
from manyheads.nn.feed_forward import FeedForward
from manyheads.nn.kernels.softmax import masked_softmax
from manyheads.nn.positions import sinusoidal_table
from manyheads.nn.residual import Residual

__all__ = ["ADDITIVE", "ALL", "BLOCK", "DOT_PRODUCT", "MULTI_HEAD", "SOFTMAX", "EncoderBlock", "MaskedSoftmax"]

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

    def forward(self, x: Tensor, mask: PeerMask = PeerMask()) -> Tensor:  # noqa: B008 - frozen
        with scored_as(self, "self_attn", mask) as allowed:
            x = self.self_attn_residual(x, lambda h: self.self_attn(h, mask=allowed)[0])
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


def _mask(valid_lens: Tensor | None, q_len: int, k_len: int) -> PeerMask:
    allowed = _allowed(valid_lens, q_len, k_len)
    return PeerMask() if allowed is None else uniform_when_empty(allowed[:, None])


def _one_head(module: AdditiveAttention | DotProductAttention, *given: Tensor, lens: Tensor | None) -> list[Tensor]:
    """Return output and weights of an attention with one head, by d2l's conventions."""
    allowed = _allowed(lens, given[0].shape[1], given[1].shape[1])
    if allowed is None:
        return list(module(*given, need_weights=True))
    empty = ~allowed.any(dim=-1, keepdim=True)
    _, weights = module(*given, mask=Dense(allowed), need_weights=True)
    weights = weights.masked_fill(empty, 1.0 / weights.shape[-1])
    return [torch.matmul(weights, given[2]), weights]


class D2l:
    """See `protocols.Wrapper`. part: the d2l module that it reproduces."""

    def __init__(self, part: Part, module: nn.Module) -> None:
        self.part, self.module = part, module

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `protocols.Wrapper.run`; the docstring of this file has the names."""
        known = {f"in.{name}" for name in self.part.inputs}
        unknown = sorted(name for name in inputs if name.startswith(("in.", "rot.")) and name not in known)
        if unknown:
            raise RequestError(f"d2l's {self.part.name} has no input {unknown[0]}; it has {sorted(known)}.")
        return {f"out.{name}": tensor for name, tensor in self.part.answer(self.module, inputs).items()}


class Part(ABC):
    """One of d2l's modules; see `protocols.Exporter`."""

    name: str
    options: Mapping[str, Any]
    inputs: tuple[str, ...] = ("queries", "keys", "values", "valid_lens")

    @abstractmethod
    def build(self, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
        """Return our module. weights: the peer's, which determine the input widths."""

    def pairs(self, module: Any) -> list[Pair]:
        """Return the names of its weights."""
        return []

    @abstractmethod
    def describe(self, module: Any) -> dict[str, Any]:
        """Return the peer's options. Raises: ConfigError: the peer does not support one of ours."""

    def answer(self, module: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs, named without `out.`."""
        given = [require(inputs, f"in.{name}") for name in self.inputs[:3]]
        found = self.attend(module, *given, lens=inputs.get("in.valid_lens"))
        return dict(zip(("output", "attention_weights"), found, strict=True))

    def attend(self, module: Any, *given: Tensor, lens: Tensor | None) -> list[Tensor]:
        """Return output and weights for queries, keys and values."""
        return _one_head(module, *given, lens=lens)

    def matches(self, meta: Mapping[str, Any]) -> bool:
        """See `protocols.Loader.matches`."""
        return bool(meta.get("kind", meta.get("peer")) == f"d2l/{self.name}")

    def from_peer(self, config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> D2l:
        """See `protocols.Loader.from_peer`. config: `model` holds the constructor's arguments."""
        module = self.build(pick(config.get("model", {}), self.options, f"d2l's {self.name}"), state_dict)
        import_weights(module, state_dict, self.pairs(module))
        return D2l(self, module.eval())

    def to_peer(self, module: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `protocols.Exporter.to_peer`: the constructor's arguments under `model`, and the weights."""
        options = self.describe(module)
        return {"model": options}, export_weights(module.state_dict(), self.pairs(module))

    def refuse(self, reasons: Mapping[str, bool]) -> None:
        """Raises: ConfigError: one of the reasons is true."""
        for reason, holds in reasons.items():
            if holds:
                raise ConfigError(f"d2l's {self.name} cannot hold a module with {reason}.")


class _Softmax(Part):
    name = "masked_softmax"
    options: Mapping[str, Any] = {}
    inputs = ("scores", "valid_lens")

    def build(self, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> MaskedSoftmax:
        return MaskedSoftmax()

    def describe(self, module: MaskedSoftmax) -> dict[str, Any]:
        return {}

    def answer(self, module: MaskedSoftmax, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"output": module(require(inputs, "in.scores"), inputs.get("in.valid_lens"))}


class _DotProduct(Part):
    name = "DotProductAttention"
    options: Mapping[str, Any] = {"dropout": 0.0}

    def build(self, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DotProductAttention:
        return DotProductAttention(dropout=float(options["dropout"]))

    def describe(self, module: DotProductAttention) -> dict[str, Any]:
        self.refuse({f"scale {module.scale}": module.scale is not None})
        return {"dropout": module.dropout_rate}


class _Additive(Part):
    name = "AdditiveAttention"
    options: Mapping[str, Any] = {"num_hiddens": ..., "dropout": 0.0}

    def build(self, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> AdditiveAttention:
        widths = _width(weights, "W_q.weight"), _width(weights, "W_k.weight")
        return AdditiveAttention(*widths, options["num_hiddens"], dropout=float(options["dropout"]))

    def pairs(self, module: AdditiveAttention) -> list[Pair]:
        names = {"W_q": "q_proj", "W_k": "k_proj", "w_v": "score_proj"}
        return [Pair(f"{peer}.weight", (f"{ours}.weight",)) for peer, ours in names.items()]

    def describe(self, module: AdditiveAttention) -> dict[str, Any]:
        return {"num_hiddens": module.q_proj.out_features, "dropout": module.dropout_rate}


class _MultiHead(Part):
    name = "MultiHeadAttention"
    options: Mapping[str, Any] = {"num_hiddens": ..., "num_heads": ..., "dropout": 0.0, "bias": False}

    def build(self, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> MultiHeadAttention:
        return MultiHeadAttention(
            options["num_hiddens"],
            options["num_heads"],
            query_dim=_width(weights, "W_q.weight"),
            key_dim=_width(weights, "W_k.weight"),
            value_dim=_width(weights, "W_v.weight"),
            dropout=float(options["dropout"]),
            bias=bool(options["bias"]),
        )

    def pairs(self, module: MultiHeadAttention) -> list[Pair]:
        return _attention_pairs(module, "", "")

    def describe(self, module: MultiHeadAttention) -> dict[str, Any]:
        d_model = module.out_proj.out_features
        biases = {getattr(module, name).bias is not None for name in PROJECTIONS}
        self.refuse(
            {
                f"head_dim {module.head_dim}": module.head_dim * module.num_heads != d_model,
                "scores of its own": module.score is not None,
                "biases in some projections alone": len(biases) > 1,
            }
        )
        options = {"num_hiddens": d_model, "num_heads": module.num_heads, "dropout": module.dropout_rate}
        return {**options, "bias": biases == {True}}

    def attend(self, module: MultiHeadAttention, *given: Tensor, lens: Tensor | None) -> list[Tensor]:
        holder = nn.ModuleDict({"attention": module})
        with scored_as(holder, "attention", _mask(lens, given[0].shape[1], given[1].shape[1])) as mask:
            out, _, weights = module(*given, mask=mask, need_weights=True)
        return [out, weights.flatten(0, 1)]  # d2l merges heads into the batch axis


class _Block(Part):
    name = "TransformerEncoderBlock"
    options: Mapping[str, Any] = {
        "num_hiddens": ...,
        "ffn_num_hiddens": ...,
        "num_heads": ...,
        "dropout": 0.0,
        "use_bias": False,
    }
    inputs = ("X", "valid_lens")

    def build(self, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> EncoderBlock:
        return EncoderBlock(
            options["num_hiddens"],
            options["ffn_num_hiddens"],
            options["num_heads"],
            dropout=float(options["dropout"]),
            bias=bool(options["use_bias"]),
        )

    def pairs(self, module: EncoderBlock) -> list[Pair]:
        pairs = _attention_pairs(module.self_attn, "attention.", "self_attn.")
        names = {"addnorm1.ln": "self_attn_residual.norm", "addnorm2.ln": "feed_forward_residual.norm"}
        names |= {"ffn.dense1": "feed_forward.in_proj", "ffn.dense2": "feed_forward.out_proj"}
        both = ((peer, ours, kind) for peer, ours in names.items() for kind in ("weight", "bias"))
        return pairs + [Pair(f"{peer}.{kind}", (f"{ours}.{kind}",)) for peer, ours, kind in both]

    def describe(self, module: EncoderBlock) -> dict[str, Any]:
        attention, residual = MULTI_HEAD.describe(module.self_attn), module.self_attn_residual
        norms = (residual.norm, module.feed_forward_residual.norm)
        self.refuse(
            {
                f"norm_position {residual.position!r}": residual.position != "post",
                f"activation {module.feed_forward.activation!r}": module.feed_forward.activation != "relu",
                "another norm than nn.LayerNorm with eps 1e-5": any(
                    not isinstance(norm, nn.LayerNorm) or norm.eps != 1e-5 for norm in norms
                ),
            }
        )
        return {
            "num_hiddens": attention["num_hiddens"],
            "ffn_num_hiddens": module.feed_forward.in_proj.out_features,
            "num_heads": attention["num_heads"],
            "dropout": attention["dropout"],
            "use_bias": attention["bias"],
        }

    def answer(self, module: EncoderBlock, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x = require(inputs, "in.X")
        return {"output": module(x, _mask(inputs.get("in.valid_lens"), x.shape[1], x.shape[1]))}


def _attention_pairs(module: MultiHeadAttention, peer: str, ours: str) -> list[Pair]:
    kinds = ("weight",) if module.q_proj.bias is None else ("weight", "bias")
    names = zip(("W_q", "W_k", "W_v", "W_o"), PROJECTIONS, strict=True)
    return [Pair(f"{peer}{theirs}.{kind}", (f"{ours}{mine}.{kind}",)) for theirs, mine in names for kind in kinds]


def _width(weights: Mapping[str, Tensor], name: str) -> int:
    if name not in weights or weights[name].dim() != 2:
        raise ModelFileError(f"these weights have no matrix {name}, which determines the input widths.")
    return weights[name].shape[1]


SOFTMAX, DOT_PRODUCT, ADDITIVE, MULTI_HEAD, BLOCK = _Softmax(), _DotProduct(), _Additive(), _MultiHead(), _Block()


class _All:
    """All of the modules above on the same inputs, as in a fixture. See `protocols.Exporter`."""

    parts: Mapping[str, Part] = {"add": ADDITIVE, "mha": MULTI_HEAD, "blk": BLOCK}

    def matches(self, meta: Mapping[str, Any]) -> bool:
        """See `protocols.Loader.matches`."""
        if "kind" in meta:
            return bool(meta["kind"] == "d2l")
        return str(meta.get("peer", "")).startswith("d2l-ai/d2l-en")

    def from_peer(self, config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> AllOfD2l:
        """See `protocols.Loader.from_peer`. config: h, heads, bias, add_h, ffn; the weights' names begin with the
        part's: add, mha, blk.
        """
        sizes = {name: config.get(name, ...) for name in ("h", "heads", "bias", "add_h", "ffn")}
        sizes = pick(sizes, dict.fromkeys(sizes, ...), "d2l")
        attention = {"num_hiddens": sizes["h"], "num_heads": sizes["heads"]}
        options = {
            "add": {"num_hiddens": sizes["add_h"]},
            "mha": {**attention, "bias": sizes["bias"]},
            "blk": {**attention, "ffn_num_hiddens": sizes["ffn"], "use_bias": sizes["bias"]},
        }
        stray = sorted(name for name in state_dict if name.partition(".")[0] not in self.parts)
        if stray:
            raise ModelFileError(f"the weight {stray[0]} is unknown; names begin with one of {sorted(self.parts)}.")
        built: dict[str, nn.Module] = {"dot": DotProductAttention(), "softmax": MaskedSoftmax()}
        for name, part in self.parts.items():
            own = {key.partition(".")[2]: x for key, x in state_dict.items() if key.partition(".")[0] == name}
            # d2l's blocks in the wild have attention biases by use_bias; the fixtures' have none
            if name == "blk":
                options[name]["use_bias"] = "attention.W_q.bias" in own
            built[name] = part.from_peer({"model": options[name]}, own).module
        return AllOfD2l(Parts(built).eval(), sizes)

    def to_peer(self, module: Parts) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `protocols.Exporter.to_peer`."""
        described = {name: part.to_peer(module[name]) for name, part in self.parts.items()}
        options = {name: config["model"] for name, (config, _) in described.items()}
        config = {"h": options["mha"]["num_hiddens"], "heads": options["mha"]["num_heads"]}
        config |= {"bias": options["mha"]["bias"], "add_h": options["add"]["num_hiddens"]}
        config |= {"ffn": options["blk"]["ffn_num_hiddens"]}
        return config, {f"{name}.{key}": x for name, (_, weights) in described.items() for key, x in weights.items()}


class AllOfD2l:
    """See `protocols.Wrapper`. sizes: h, heads, bias, add_h, ffn."""

    def __init__(self, module: Parts, sizes: Mapping[str, Any]) -> None:
        self.module, self.sizes = module, sizes

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `protocols.Wrapper.run`: every part without valid lengths, and with each kind that is given."""
        queries, keys, values = (require(inputs, f"in.{name}") for name in ("queries", "keys", "values"))
        scores, dot_keys = require(inputs, "in.scores"), require(inputs, "in.dot_keys")
        x = require(inputs, "in.block_x")
        answer: dict[str, Tensor] = {}
        for kind in ("none", "1d", "2d"):
            if kind != "none" and f"in.valid_lens_{kind}" not in inputs:
                continue
            lens = inputs.get(f"in.valid_lens_{kind}")
            answer[f"masked_softmax_{kind}"] = self.module["softmax"](scores, lens)
            answer[f"dot_{kind}"] = DOT_PRODUCT.attend(self.module["dot"], queries, dot_keys, values, lens=lens)[0]
            for name, short in (("add", "additive"), ("mha", "mha")):
                out, weights = _All.parts[name].attend(self.module[name], queries, keys, values, lens=lens)
                answer |= {f"{short}_{kind}": out, f"{short}_weights_{kind}": weights}
            if kind != "2d":  # its lengths are those of other queries
                answer[f"block_{kind}"] = self.module["blk"](x, _mask(lens, x.shape[1], x.shape[1]))
        answer["positions"] = sinusoidal_table(torch.arange(float(_POSITIONS)), int(self.sizes["h"]))
        return {f"out.{name}": tensor for name, tensor in answer.items()}


ALL = _All()
