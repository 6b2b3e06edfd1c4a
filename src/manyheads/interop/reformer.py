"""ReformerModelWithLMHead and ReformerForMaskedLM of transformers.

Differs from ours: sequences are padded to whole chunks of all kinds of layers, from outside, and the padding takes part
in sorting; an unset number of buckets follows from the first sequence; the float32 weights of hash rounds do not always
sum to one. We do not reproduce the last difference, which is a fault of the peer: the fixtures contain the correct
values under `exact.`, and we compute these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.reformer.config import ReformerConfig
from manyheads.architectures.reformer.layers import Call, ReformerLayer
from manyheads.architectures.reformer.model import Reformer
from manyheads.architectures.table import build_model
from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.interop.marian_weights import check_size
from manyheads.interop.names import Pair, export_weights, import_weights, pick, require
from manyheads.nn.attention.observing import observe

__all__ = ["HFReformer", "from_peer", "matches", "read_config", "to_peer"]

_OPTIONS: dict[str, Any] = {
    "attention_head_size": 64,
    "attn_layers": ["local", "lsh", "local", "lsh", "local", "lsh"],
    "axial_pos_embds": True,
    "axial_pos_shape": [64, 64],
    "axial_pos_embds_dim": [64, 192],
    "chunk_size_feed_forward": 0,
    "feed_forward_size": 512,
    "hash_seed": None,
    "hidden_act": "relu",
    "hidden_dropout_prob": 0.05,
    "hidden_size": 256,
    "is_decoder": False,
    "layer_norm_eps": 1e-12,
    "local_num_chunks_before": 1,
    "local_num_chunks_after": 0,
    "local_attention_probs_dropout_prob": 0.05,
    "local_attn_chunk_length": 64,
    "lsh_attn_chunk_length": 64,
    "lsh_attention_probs_dropout_prob": 0.0,
    "lsh_num_chunks_before": 1,
    "lsh_num_chunks_after": 0,
    "max_position_embeddings": 4096,
    "num_attention_heads": 12,
    "num_buckets": None,
    "num_hashes": 1,
    "pad_token_id": 0,
    "vocab_size": 320,
    "tie_word_embeddings": False,
}
"""ReformerConfig's defaults: what a config.json leaves out."""
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "swish", "swish": "swish"}
# Older files keep constants of the attention layers as buffers.
_CONSTANTS = ("mask_value_float16", "mask_value_float32", "self_mask_value_float16", "self_mask_value_float32")
_BIAS = ("lm_head.decoder.bias", "lm_head.bias")
"""One parameter under two names."""


class HFReformer:
    """The model with its head; see `protocols.Wrapper`. config: the fixture's."""

    def __init__(self, module: LanguageModel, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.module = module
        self.config = config
        self.options = options

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `protocols.Wrapper.run`: in.ids and, with padding on the right, in.attention_mask; rot.0, ... are the
        rotations of
        the layers that hash, rot.override0, ... those of a second run with `num_hashes_override`.
        """
        ids = require(inputs, "in.ids")
        mask = inputs.get("in.attention_mask", torch.ones_like(ids)).bool()
        lengths = mask.sum(dim=1)
        if mask.shape != ids.shape or not torch.equal(mask, torch.arange(ids.shape[1]) < lengths[:, None]):
            raise RequestError("in.attention_mask must have the shape of in.ids, and zeros on the right alone.")
        padded = F.pad(ids, (0, self._padding(ids.shape[1])), value=self.options["pad_token_id"])
        whole = bool((lengths == padded.shape[1]).all())
        call = Call(None if whole else lengths, 0, None, self._rotations(inputs, "rot."))
        answer = self._outputs(padded, call, ids.shape[1])
        if self.config.get("grads"):
            answer |= self._gradients(padded, call, ids)
        rounds = self.config.get("num_hashes_override")
        if rounds:
            call = replace(call, num_hashes=rounds, rotations=self._rotations(inputs, "rot.override"))
            answer["out.logits_num_hashes_override"] = self._outputs(padded, call, ids.shape[1])["out.logits"]
        if not self._has_fault(padded.shape[1]):
            return answer
        return {name if "buckets" in name else f"exact.{name.removeprefix('out.')}": x for name, x in answer.items()}

    def _padding(self, length: int) -> int:
        """Return the number of positions that the peer adds: to whole chunks of every kind of layer, unless all fit
        into one.
        """
        kinds = {
            "lsh": self.options["lsh_attn_chunk_length"],
            "local": self.options["local_attn_chunk_length"],
        }
        used = [size for kind, size in kinds.items() if kind in self.options["attn_layers"]]
        return -length % math.lcm(*used) if length > min(used) else 0

    def _rotations(self, inputs: Mapping[str, Tensor], prefix: str) -> dict[int, Tensor]:
        hashing = [index for index, kind in enumerate(self.module.config.kinds) if kind == "lsh"]
        names = {index: f"{prefix}{number}" for number, index in enumerate(hashing)}
        return {index: inputs[name] for index, name in names.items() if name in inputs}

    def _has_fault(self, padded_len: int) -> bool:
        """Return whether the peer's float32 fault shows: some position is alone in its bucket in several rounds."""
        config = self.module.config
        rounds = max(config.num_hashes, self.config.get("num_hashes_override") or 0)
        hashes = "lsh" in config.kinds and padded_len > config.chunk_len
        return bool(hashes and config.causal and rounds > 1)

    def _outputs(self, ids: Tensor, call: Call, length: int) -> dict[str, Tensor]:
        """Return the peer's outputs, cut to `length`."""
        body, config = cast(Reformer, self.module.body), self.module.config
        answer = {}
        with torch.no_grad():
            x1 = x2 = body.positions(body.embedding(ids))
            answer["out.hidden.0"] = x2[:, :length]
            for index, layer in enumerate(cast(list[ReformerLayer], list(body.layers))):
                with observe(layer.attention, "buckets") as seen:
                    added, _ = layer.attention(x2, call)
                for [buckets] in seen.values():
                    answer[f"out.buckets.{config.kinds[:index].count('lsh')}"] = self._numbered(buckets, call.lengths)
                x1 = x1 + added
                x2 = x2 + layer.feed_forward(x1)[0]
                answer[f"out.hidden.{index + 1}"] = x2[:, :length]
            hidden = body.norm(torch.cat([x1, x2], dim=-1))
            answer["out.logits"] = self.module.head.logits(hidden)[:, :length]  # type: ignore[operator]
        return answer

    def _numbered(self, buckets: Tensor, lengths: Tensor | None) -> Tensor:
        """Return buckets with the peer's numbers: (batch, heads, rounds x length), one round after the other."""
        total = math.prod(self.module.config.lsh.factors(self.module.config.max_len)) + (lengths is not None)
        numbered: Tensor = buckets + total * torch.arange(buckets.shape[2])[:, None]
        return numbered.flatten(2)

    def _gradients(self, padded: Tensor, call: Call, ids: Tensor) -> dict[str, Tensor]:
        """Return loss and gradients through the reversible layers."""
        hidden, _ = self.module.body(padded, call.lengths, rotations=call.rotations)  # type: ignore[call-arg]
        logits = self.module.head.logits(hidden)[:, : ids.shape[1]]  # type: ignore[operator]
        if self.module.config.causal:
            logits, ids = logits[:, :-1], ids[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        own = dict(self.module.named_parameters())
        found = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
        grads = {
            name: torch.zeros_like(tensor) if grad is None else grad
            for (name, tensor), grad in zip(own.items(), found, strict=True)
        }
        named = export_weights(grads, _pairs(self.module.config))
        named[_BIAS[1]] = named.pop(_BIAS[0])
        return {"out.loss": loss.detach(), **{f"grad.{name}": grad for name, grad in named.items()}}


def matches(meta: Mapping[str, Any]) -> bool:
    """See `protocols.Loader.matches`."""
    if "kind" in meta:
        return bool(meta["kind"] == "hf_reformer")
    return str(meta.get("peer", "")).startswith("transformers Reformer")


def from_peer(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> HFReformer:
    """See `protocols.Loader.from_peer`.

    Args: config: ReformerConfig's options under `model`; `seq_len`: the first sequence's length, which determines an
        unset
        number of buckets (default: the maximum).
    """
    options = config.get("model")
    if not isinstance(options, Mapping):
        raise ConfigError("the config must hold ReformerConfig's options under 'model'.")
    ours, peer = read_config(options, config.get("seq_len"))
    check_size(state_dict, *ours.lower_bounds())
    module = build_model(ours)
    weights = {name: tensor for name, tensor in state_dict.items() if name.rpartition(".")[2] not in _CONSTANTS}
    biases = [weights.pop(name) for name in _BIAS if name in weights]
    if len(biases) == 2 and not torch.equal(*biases):
        raise ModelFileError(f"{_BIAS[0]} and {_BIAS[1]} differ, but they are one parameter.")
    if biases:
        weights[_BIAS[0]] = biases[0]
    for axis, size in enumerate(ours.axes[0] if ours.positions == "axial" else ()):
        name = f"reformer.embeddings.position_embeddings.weights.{axis}"
        if name in weights and weights[name].shape[axis : axis + 1] != (size,):
            raise ModelFileError(
                f"{name} has shape {tuple(weights[name].shape)}, but axial_pos_shape is {list(ours.axes[0])}."
            )
    import_weights(module, weights, _pairs(ours))
    return HFReformer(module.eval(), config, peer)


def read_config(options: Mapping[str, Any], seq_len: int | None = None) -> tuple[ReformerConfig, dict[str, Any]]:
    """Return our config from ReformerConfig's options; options without effect in the peer's forward pass are ignored.

    Returns: ours, and the peer's with its defaults filled in.
    Raises: ConfigError: an option of the wrong type or out of range, or an unsupported one.
    """
    peer = pick({name: value for name, value in options.items() if name in _OPTIONS}, _OPTIONS, "Reformer")
    _check_types(peer)
    if options.get("model_type", "reformer") != "reformer":
        raise ConfigError(f"this is a config of model_type {options['model_type']!r}, not of a Reformer model.")
    if peer["tie_word_embeddings"]:
        raise ConfigError("tie_word_embeddings is true, but the output is twice as wide as the embedding.")
    if peer["hidden_act"] not in _ACTIVATIONS:
        raise ConfigError(f"hidden_act is {peer['hidden_act']!r}; those of {sorted(_ACTIVATIONS)} are known.")
    unknown = [kind for kind in peer["attn_layers"] if kind not in ("lsh", "local")]
    if unknown or not peer["attn_layers"]:
        raise ConfigError(f"attn_layers is {peer['attn_layers']}; it must name 'lsh' or 'local' for each layer.")
    axial = peer["axial_pos_embds"]
    max_len = math.prod(peer["axial_pos_shape"]) if axial else peer["max_position_embeddings"]
    causal, has_lsh = peer["is_decoder"], "lsh" in peer["attn_layers"]
    ours = ReformerConfig(
        vocab_size=peer["vocab_size"],
        d_model=peer["hidden_size"],
        num_heads=peer["num_attention_heads"],
        head_dim=peer["attention_head_size"],
        d_ff=peer["feed_forward_size"],
        num_layers=len(peer["attn_layers"]),
        layers=tuple(peer["attn_layers"]),
        positions="axial" if axial else "learned",
        axial_shape=tuple(peer["axial_pos_shape"]) if axial else (),
        axial_dims=tuple(peer["axial_pos_embds_dim"]) if axial else (),
        max_len=max_len,
        num_hashes=peer["num_hashes"],
        num_buckets=_buckets(peer, seq_len or max_len) if has_lsh else (2,),
        chunk_len=peer["lsh_attn_chunk_length"],
        exact_len=peer["lsh_attn_chunk_length"],
        causal=causal,
        visible="chunk",
        chunks_before=peer["lsh_num_chunks_before"],
        chunks_after=peer["lsh_num_chunks_after"],
        look_across_rounds=True,
        wrap=True,
        local_chunk_len=peer["local_attn_chunk_length"],
        local_chunks_before=peer["local_num_chunks_before"],
        local_chunks_after=0 if causal else peer["local_num_chunks_after"],  # the causal mask hides them in a decoder
        local_wrap=True,
        dropout=float(peer["hidden_dropout_prob"]),
        attention_dropout=float(peer[f"{'lsh' if has_lsh else 'local'}_attention_probs_dropout_prob"]),
        ff_chunk_len=peer["chunk_size_feed_forward"],
        activation=_ACTIVATIONS[peer["hidden_act"]],  # type: ignore[arg-type]
        norm_eps=float(peer["layer_norm_eps"]),
        hash_seed=peer["hash_seed"] or 0,
    )
    return ours, peer


def to_peer(module: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The inverse of `from_peer`: ReformerConfig's options (under `model`) and the state dict.

    Raises: ConfigError: the peer does not support one of the options.
    """
    config = module.config
    fixed = {
        **{"visible": "chunk", "within_bucket": False, "correct_duplicates": False},
        **{"look_across_rounds": True, "wrap": True, "exact_len": config.chunk_len},
    }
    fixed = fixed if "lsh" in config.kinds else {}
    if "local" in config.kinds and not config.causal:
        fixed["local_wrap"] = True
    for name, value in fixed.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"transformers' Reformer cannot hold a model with {name} {getattr(config, name)!r}; it has {value!r}."
            )
    if "full" in config.kinds or config.num_hashes < 1:
        raise ConfigError("transformers' Reformer cannot hold layers that attend exactly; it has 'lsh' and 'local'.")
    activations = {ours: peer for peer, ours in reversed(_ACTIVATIONS.items())}
    options = {
        "attention_head_size": config.width_of_heads,
        "attn_layers": list(config.kinds),
        "axial_pos_embds": config.positions == "axial",
        "chunk_size_feed_forward": config.ff_chunk_len,
        "feed_forward_size": config.d_ff,
        "hash_seed": config.hash_seed or None,
        "hidden_act": activations[config.activation],
        "hidden_dropout_prob": config.dropout,
        "hidden_size": config.d_model,
        "is_decoder": config.causal,
        "layer_norm_eps": config.norm_eps,
        "local_num_chunks_before": config.local_chunks_before,
        "local_num_chunks_after": config.local_chunks_after,
        "local_attention_probs_dropout_prob": config.attention_dropout,
        "local_attn_chunk_length": config.local_chunk_len,
        "lsh_attn_chunk_length": config.chunk_len,
        "lsh_attention_probs_dropout_prob": config.attention_dropout,
        "lsh_num_chunks_before": config.chunks_before,
        "lsh_num_chunks_after": config.chunks_after,
        "max_position_embeddings": config.max_len,
        "num_attention_heads": config.num_heads,
        "num_buckets": _as_peer(config.lsh.factors(config.max_len)),
        "num_hashes": config.num_hashes,
        "vocab_size": config.vocab_size,
    }
    if config.positions == "axial":
        shape, dims = config.axes
        options |= {"axial_pos_shape": list(shape), "axial_pos_embds_dim": list(dims)}
    elif config.positions != "learned":
        raise ConfigError(
            f"transformers' Reformer cannot hold {config.positions} positions; it has 'axial' and 'learned' ones."
        )
    weights = export_weights(module.state_dict(), _pairs(config))
    weights[_BIAS[1]] = weights[_BIAS[0]].clone()
    return {"model": options}, weights


def _buckets(peer: Mapping[str, Any], length: int) -> tuple[int, ...]:
    """Return the number of buckets, or its factors; if unset, by the peer's rule for a sequence's length."""
    given = peer["num_buckets"]
    if given is not None:
        return (given,) if isinstance(given, int) else tuple(given)
    chunk_len = peer["lsh_attn_chunk_length"]
    exponent = max(1, (2 * (length // chunk_len)).bit_length() - 1)
    limit = 2 * max(int((peer["max_position_embeddings"] // chunk_len) ** 0.5), chunk_len)
    if 2**exponent > limit:
        return (2 ** (exponent // 2), 2 ** (exponent - exponent // 2))
    return (2**exponent,)


def _as_peer(factors: tuple[int, ...]) -> int | list[int]:
    return factors[0] if len(factors) == 1 else list(factors)


def _check_types(peer: Mapping[str, Any]) -> None:
    for name, default in _OPTIONS.items():
        value = peer[name]
        if name == "num_buckets":
            numbers = value if isinstance(value, list | tuple) else [value]
            fits = value is None or (len(numbers) > 0 and all(type(one) is int for one in numbers))
            kind = "int or list"
        elif name == "hash_seed":
            fits, kind = value is None or (type(value) is int and value >= 0), "int, at least 0"
        elif isinstance(default, list):
            fits = isinstance(value, list | tuple) and all(type(one) is type(default[0]) for one in value)
            fits, kind = fits and len(value) > 0, f"list of {type(default[0]).__name__}"
        else:
            fits = type(value) is type(default) or (type(default) is float and type(value) is int)
            kind = type(default).__name__
        if not fits:
            raise ConfigError(f"{name} is {value!r} in Reformer's config; it must be of type {kind}.")


def _pairs(config: ReformerConfig) -> list[Pair]:
    """Return each parameter of the peer with ours."""
    embeddings = "reformer.embeddings"
    pairs = [Pair(f"{embeddings}.word_embeddings.weight", ("body.embedding.weight",))]
    if config.positions == "axial":
        pairs += [
            Pair(f"{embeddings}.position_embeddings.weights.{i}", (f"body.positions.weights.{i}",))
            for i in range(len(config.axes[0]))
        ]
    else:
        pairs.append(Pair(f"{embeddings}.position_embeddings.embedding.weight", ("body.positions.weight",)))
    both = ("weight", "bias")
    for index, kind in enumerate(config.kinds):
        peer, ours = f"reformer.encoder.layers.{index}", f"body.layers.{index}"
        projections = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
        if kind == "lsh":
            projections = {"query_key": "qk_proj", "value": "v_proj"}
        pairs += [
            Pair(f"{peer}.attention.self_attention.{theirs}.weight", (f"{ours}.attention.self_attn.{own}.weight",))
            for theirs, own in projections.items()
        ]
        pairs.append(Pair(f"{peer}.attention.output.dense.weight", (f"{ours}.attention.self_attn.out_proj.weight",)))
        modules = {
            "attention.layer_norm": "attention.norm",
            "feed_forward.layer_norm": "feed_forward.norm",
            "feed_forward.dense.dense": "feed_forward.net.in_proj",
            "feed_forward.output.dense": "feed_forward.net.out_proj",
        }
        pairs += [Pair(f"{peer}.{name}.{k}", (f"{ours}.{own}.{k}",)) for name, own in modules.items() for k in both]
    pairs += [Pair(f"reformer.encoder.layer_norm.{k}", (f"body.norm.{k}",)) for k in both]
    return [*pairs, Pair("lm_head.decoder.weight", ("head.weight",)), Pair(_BIAS[0], ("head.bias",))]
