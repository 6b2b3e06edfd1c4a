"""The attention modules of labml.ai's annotated implementations: length first, masks (query, key, batch).

Differs from ours: the value projection always has a bias, those of queries and keys optionally. In the relative kind,
key_pos_embeddings and key_pos_bias have 2 P rows, of which row P - d belongs to distance d. Ours are the same rows in
reverse order: P + 1 for distances from 0 up and P - 1 for keys after the query. A query that may attend to nothing is
NaN there and zeros here.

    labml/MultiHeadAttention, labml/RelativeMultiHeadAttention: in.query, in.key, in.value, in.mask -> out.output,
        out.attn
    labml/attention: both with every in.mask_* and without, as in a fixture
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from manyheads.errors import ModelFileError
from manyheads.extras.peers.conventions import from_sequence_first
from manyheads.extras.peers.peer import (
    Layout,
    Options,
    Parts,
    Peer,
    flipped,
    nested,
    own_heads,
    require,
    weights_by_part,
)
from manyheads.nn.attention.multi_head import PROJECTIONS, MultiHeadAttention, split_heads
from manyheads.nn.attention.relative import LearnedRelativeAttention

if TYPE_CHECKING:
    from manyheads.nn.attention.masks import Mask


class _Labml(Peer):
    """The common part of both modules."""

    inputs = ("query", "key", "value", "mask")
    layout: ClassVar[Layout] = {
        "{query,key,value}.linear.*": "{q,k,v}_proj.*",
        "output.*": "out_proj.*",
        "key_pos_embeddings": flipped("distance_embedding"),
        "key_pos_bias": flipped("distance_bias"),
        "query_pos_bias": "content_bias",
    }

    @classmethod
    def describe(cls, module: Any) -> dict[str, Any]:
        d_model = module.out_proj.out_features
        has_bias = [getattr(module, name).bias is not None for name in PROJECTIONS]
        cls.refuse(
            {
                **own_heads(module),
                "v_proj or out_proj without biases": not all(has_bias[2:]),
                "a bias in only one of q_proj and k_proj": has_bias[0] != has_bias[1],
            }
        )
        return {"heads": module.num_heads, "d_model": d_model, "dropout_prob": module.dropout_rate}

    @classmethod
    def attend(cls, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
        """Return output and weights, batch first."""
        raise NotImplementedError

    @classmethod
    def attend_length_first(
        cls, module: Any, inputs: Mapping[str, Tensor], mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return output (q_len, batch, d_model) and weights (q_len, k_len, batch, heads)."""
        q, k, v = (x.transpose(0, 1) for x in require(inputs, "query", "key", "value"))
        out, weights = cls.attend(module, q, k, v, None if mask is None else from_sequence_first(mask))
        return out.transpose(0, 1).contiguous(), weights.permute(2, 3, 0, 1).contiguous()

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        out, weights = self.attend_length_first(self.module, inputs, inputs.get("in.mask"))
        return {"out.output": out, "out.attn": weights}


class MultiHeadPeer(_Labml):
    """MultiHeadAttention."""

    name = "labml/MultiHeadAttention"
    options: ClassVar[Options] = {"heads": int, "d_model": int, "dropout_prob": 0.1, "bias": True}

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> MultiHeadAttention:
        bias: Any = True if options["bias"] else ("v_proj", "out_proj")
        return MultiHeadAttention(options["d_model"], options["heads"], dropout=options["dropout_prob"], bias=bias)

    @classmethod
    def describe(cls, module: MultiHeadAttention) -> dict[str, Any]:
        widths = {getattr(module, name).in_features for name in PROJECTIONS[:3]}
        cls.refuse({f"inputs of widths {sorted(widths)}": widths != {module.out_proj.out_features}})
        return {**super().describe(module), "bias": module.q_proj.bias is not None}

    @classmethod
    def attend(cls, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
        out, _, weights = module(q, k, v, mask=mask, need_weights=True)
        return out, weights


class RelativePeer(_Labml):
    """RelativeMultiHeadAttention."""

    name = "labml/RelativeMultiHeadAttention"
    options: ClassVar[Options] = {"heads": int, "d_model": int, "dropout_prob": 0.1}

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> LearnedRelativeAttention:
        table = weights.get("key_pos_embeddings")
        if table is None or table.dim() != 3 or table.shape[0] < 4 or table.shape[0] % 2:
            raise ModelFileError("these weights have no key_pos_embeddings of an even number of rows, 4 at least.")
        half = table.shape[0] // 2
        return LearnedRelativeAttention(
            options["d_model"],
            options["heads"],
            max_len=half + 1,
            num_future=half - 1,
            dropout=options["dropout_prob"],
            bias=("v_proj", "out_proj"),
        )

    @classmethod
    def describe(cls, module: LearnedRelativeAttention) -> dict[str, Any]:
        future = f"num_future {module.num_future} and max_len {module.max_len} (num_future must be max_len - 2)"
        has_bias = [getattr(module, name).bias is not None for name in ("q_proj", "k_proj")]
        cls.refuse({"biases of q_proj or k_proj": any(has_bias), future: module.num_future != module.max_len - 2})
        return super().describe(module)

    @classmethod
    def attend(cls, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
        query = module.project_query(q)
        key, value = split_heads(module.k_proj(k), module.num_heads), split_heads(module.v_proj(v), module.num_heads)
        places = module.encoded_distances(query.shape[2], key.shape[2], query)
        weighted: tuple[Tensor, Tensor] = module.attend_openly(
            query, key, value, *module.project_positions(places), mask
        )
        return weighted


class AllOfLabml(Peer):
    """Both modules on the same inputs, as in a fixture: without a mask, and with each in.mask_*."""

    name = "labml"
    kinds = ("labml_mha",)
    origin = "labmlai/annotated_deep_learning_paper_implementations transformers/mha"
    section = None
    ignores_others = True
    options: ClassVar[Options] = {"d": int, "heads": int, "bias": bool}
    parts: ClassVar[Mapping[str, type[_Labml]]] = {"mha": MultiHeadPeer, "rel": RelativePeer}
    layout = nested({"mha": _Labml.layout, "rel": _Labml.layout})

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Parts:
        own = weights_by_part(weights, cls.parts)
        sizes = {"heads": options["heads"], "d_model": options["d"], "dropout_prob": 0.1, "bias": options["bias"]}
        return Parts({name: part.build(sizes, own[name]) for name, part in cls.parts.items()})

    @classmethod
    def describe(cls, module: Any) -> dict[str, Any]:
        options, _ = (part.describe(module[name]) for name, part in cls.parts.items())
        names = {"d": "d_model", "heads": "heads", "bias": "bias"}
        return {name: options[peer] for name, peer in names.items()} | {"P": module["rel"].max_len - 1}

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        masks: dict[str, Tensor | None] = {"none": None}
        masks |= {name.removeprefix("in."): x for name, x in inputs.items() if name.startswith("in.mask_")}
        answer = {}
        for kind, mask in masks.items():
            for name, attn in (("mha", "attn"), ("rel", "rel_attn")):
                found = self.parts[name].attend_length_first(self.module[name], inputs, mask)
                answer[f"out.{name}_{kind}"], answer[f"out.{attn}_{kind}"] = found
        return answer
