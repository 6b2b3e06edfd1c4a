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

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.interop.names import Pair, Parts, export_weights, import_weights, pick, require
from manyheads.nn.attention.masks import Mask
from manyheads.nn.attention.multi_head import PROJECTIONS, MultiHeadAttention, split_heads
from manyheads.nn.attention.relative import LearnedRelativeAttention
from manyheads.nn.conventions import from_sequence_first

__all__ = ["ALL", "MULTI_HEAD", "RELATIVE", "AllOfLabml", "Labml", "Part"]

_THREE = ("query", "key", "value")
_FLIPPED = ("key_pos_embeddings", "key_pos_bias")


class Labml:
    """See `protocols.Wrapper`. part: the labml module that it reproduces."""

    def __init__(self, part: Part, module: nn.Module) -> None:
        self.part, self.module = part, module

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `protocols.Wrapper.run`; the docstring of this file has the names."""
        known = {f"in.{name}" for name in (*_THREE, "mask")}
        unknown = sorted(name for name in inputs if name.startswith(("in.", "rot.")) and name not in known)
        if unknown:
            raise RequestError(f"labml's {self.part.name} has no input {unknown[0]}; it has {sorted(known)}.")
        out, weights = self.part.answer(self.module, inputs, inputs.get("in.mask"))
        return {"out.output": out, "out.attn": weights}


class Part(ABC):
    """One of labml's modules; see `protocols.Exporter`."""

    name: str
    options: Mapping[str, Any]

    @abstractmethod
    def build(self, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
        """Return our module."""

    def pairs(self, module: Any) -> list[Pair]:
        """Return the names of its weights."""
        ours = dict(zip(("query.linear", "key.linear", "value.linear", "output"), PROJECTIONS, strict=True))
        kinds = {
            name: ("weight",) if getattr(module, name).bias is None else ("weight", "bias") for name in PROJECTIONS
        }
        return [Pair(f"{peer}.{kind}", (f"{name}.{kind}",)) for peer, name in ours.items() for kind in kinds[name]]

    def describe(self, module: Any) -> dict[str, Any]:
        """Return the peer's options. Raises: ConfigError: the peer does not support one of ours."""
        d_model = module.out_proj.out_features
        if module.head_dim * module.num_heads != d_model:
            raise ConfigError(f"labml's {self.name} cannot hold a module with head_dim {module.head_dim}.")
        if module.v_proj.bias is None or module.out_proj.bias is None:
            raise ConfigError(f"labml's {self.name} cannot hold a module without biases of v_proj and out_proj.")
        if (module.q_proj.bias is None) != (module.k_proj.bias is None):
            raise ConfigError(f"labml's {self.name} cannot hold a module with a bias in one of q_proj and k_proj.")
        return {"heads": module.num_heads, "d_model": d_model, "dropout_prob": module.dropout_rate}

    @abstractmethod
    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None
    ) -> tuple[Tensor, Tensor]:
        """Return output and weights, batch first."""

    def answer(self, module: Any, inputs: Mapping[str, Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return output (q_len, batch, d_model) and weights (q_len, k_len, batch, heads)."""
        query, key, value = (require(inputs, f"in.{name}").transpose(0, 1) for name in _THREE)
        allowed = None if mask is None else from_sequence_first(mask)
        out, weights = self.attend(module, query, key, value, allowed)
        return out.transpose(0, 1).contiguous(), weights.permute(2, 3, 0, 1).contiguous()

    def matches(self, meta: Mapping[str, Any]) -> bool:
        """See `protocols.Loader.matches`."""
        return bool(meta.get("kind", meta.get("peer")) == f"labml/{self.name}")

    def from_peer(self, config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> Labml:
        """See `protocols.Loader.from_peer`. config: `model` holds the constructor's arguments."""
        module = self.build(pick(config.get("model", {}), self.options, f"labml's {self.name}"), state_dict)
        weights = {name: x.flip(0) if name in _FLIPPED else x for name, x in state_dict.items()}
        import_weights(module, weights, self.pairs(module))
        return Labml(self, module.eval())

    def to_peer(self, module: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `protocols.Exporter.to_peer`: the constructor's arguments under `model`, and the weights."""
        options = self.describe(module)
        weights = export_weights(module.state_dict(), self.pairs(module))
        return {"model": options}, {name: x.flip(0) if name in _FLIPPED else x for name, x in weights.items()}


class _MultiHead(Part):
    name = "MultiHeadAttention"
    options: Mapping[str, Any] = {"heads": ..., "d_model": ..., "dropout_prob": 0.1, "bias": True}

    def build(self, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> MultiHeadAttention:
        bias: Any = True if options["bias"] else ("v_proj", "out_proj")
        return MultiHeadAttention(
            options["d_model"], options["heads"], dropout=float(options["dropout_prob"]), bias=bias
        )

    def describe(self, module: MultiHeadAttention) -> dict[str, Any]:
        if module.score is not None:
            raise ConfigError("labml's MultiHeadAttention cannot hold a module with scores of its own.")
        widths = {getattr(module, name).in_features for name in PROJECTIONS[:3]}
        if widths != {module.out_proj.out_features}:
            raise ConfigError(f"labml's MultiHeadAttention cannot hold inputs of widths {sorted(widths)}.")
        return {**super().describe(module), "bias": module.q_proj.bias is not None}

    def attend(
        self, module: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None
    ) -> tuple[Tensor, Tensor]:
        out, _, weights = module(query, key, value, mask=mask, need_weights=True)
        return out, weights


class _Relative(Part):
    name = "RelativeMultiHeadAttention"
    options: Mapping[str, Any] = {"heads": ..., "d_model": ..., "dropout_prob": 0.1}

    def build(self, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> LearnedRelativeAttention:
        table = weights.get("key_pos_embeddings")
        if table is None or table.dim() != 3 or table.shape[0] < 4 or table.shape[0] % 2:
            raise ModelFileError("these weights have no key_pos_embeddings of an even number of rows, 4 at least.")
        half = table.shape[0] // 2
        return LearnedRelativeAttention(
            options["d_model"],
            options["heads"],
            max_len=half + 1,
            num_future=half - 1,
            dropout=float(options["dropout_prob"]),
            bias=("v_proj", "out_proj"),
        )

    def pairs(self, module: LearnedRelativeAttention) -> list[Pair]:
        names = {"key_pos_embeddings": "distance_embedding", "key_pos_bias": "distance_bias"}
        names |= {"query_pos_bias": "content_bias"}
        return super().pairs(module) + [Pair(peer, (ours,)) for peer, ours in names.items()]

    def describe(self, module: LearnedRelativeAttention) -> dict[str, Any]:
        if any(map(_has_bias, (module.q_proj, module.k_proj))) or module.num_future != module.max_len - 2:
            raise ConfigError(
                "labml's RelativeMultiHeadAttention cannot hold a module with biases of q_proj and k_proj, or with"
                f" num_future {module.num_future} and max_len {module.max_len}: num_future must be max_len - 2."
            )
        return super().describe(module)

    def attend(
        self, module: LearnedRelativeAttention, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None
    ) -> tuple[Tensor, Tensor]:
        q, k = module.project_query(query), split_heads(module.k_proj(key), module.num_heads)
        v = split_heads(module.v_proj(value), module.num_heads)
        places = module.places(q.shape[2], k.shape[2], query)
        return module.attend_openly(q, k, v, *module.project_positions(places), mask)


def _has_bias(projection: nn.Linear) -> bool:
    bias: Tensor | None = projection.bias
    return bias is not None


MULTI_HEAD, RELATIVE = _MultiHead(), _Relative()


class _All:
    """Both modules on the same inputs, as in a fixture. See `protocols.Exporter`."""

    parts: Mapping[str, Part] = {"mha": MULTI_HEAD, "rel": RELATIVE}

    def matches(self, meta: Mapping[str, Any]) -> bool:
        """See `protocols.Loader.matches`."""
        if "kind" in meta:
            return bool(meta["kind"] == "labml_mha")
        return str(meta.get("peer", "")).startswith(
            "labmlai/annotated_deep_learning_paper_implementations transformers/mha"
        )

    def from_peer(self, config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> AllOfLabml:
        """See `protocols.Loader.from_peer`. config: d, heads, bias; names begin with the part: mha, rel."""
        sizes = {name: config.get(name, ...) for name in ("d", "heads", "bias")}
        sizes = pick(sizes, dict.fromkeys(sizes, ...), "labml")
        stray = sorted(name for name in state_dict if name.partition(".")[0] not in self.parts)
        if stray:
            raise ModelFileError(f"the weight {stray[0]} is unknown; names begin with one of {sorted(self.parts)}.")
        options: dict[str, Any] = {"heads": sizes["heads"], "d_model": sizes["d"]}
        built = {}
        for name, part in self.parts.items():
            own = {key.partition(".")[2]: x for key, x in state_dict.items() if key.partition(".")[0] == name}
            more = {"bias": sizes["bias"]} if part is MULTI_HEAD else {}
            built[name] = part.from_peer({"model": {**options, **more}}, own).module
        return AllOfLabml(Parts(built).eval())

    def to_peer(self, module: Parts) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `protocols.Exporter.to_peer`."""
        described = {name: part.to_peer(module[name]) for name, part in self.parts.items()}
        options = described["mha"][0]["model"]
        rows = described["rel"][1]["key_pos_embeddings"].shape[0]
        config = {"d": options["d_model"], "heads": options["heads"], "bias": options["bias"], "P": rows // 2}
        return config, {f"{name}.{key}": x for name, (_, weights) in described.items() for key, x in weights.items()}


class AllOfLabml:
    """See `protocols.Wrapper`."""

    def __init__(self, module: Parts) -> None:
        self.module = module

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `protocols.Wrapper.run`: both parts without a mask, and with each in.mask_*."""
        masks: dict[str, Tensor | None] = {"none": None}
        masks |= {name.removeprefix("in."): x for name, x in inputs.items() if name.startswith("in.mask_")}
        answer = {}
        for kind, mask in masks.items():
            for name, attn, out in (("mha", "attn", "mha"), ("rel", "rel_attn", "rel")):
                part = _All.parts[name]
                answer[f"out.{out}_{kind}"], answer[f"out.{attn}_{kind}"] = part.answer(self.module[name], inputs, mask)
        return answer


ALL = _All()
