"""ReformerModelWithLMHead and ReformerForMaskedLM of transformers.

A converted model draws the peer's rotations (`shared_rotations`) and pads as the peer does (`pad_to_chunks`), so it
gives the peer's logits. Two differences remain: an unset number of buckets follows there from the first sequence; and
the peer's float32 weights of a token that sees only itself do not always sum to one if it sees itself several times.
The first token of a decoder does so in each hash round; see `_is_rounded` for the other cases. Logits then differ by
about a thousandth of the largest. We do not reproduce this fault: the fixtures contain the correct values under
`exact.`, and we compute these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.extras.peers.peer import REFORMER, Holds, Options, Peer, require
from manyheads.models.reformer.config import ReformerConfig
from manyheads.models.reformer.model import Call, Reformer, ReformerLayer
from manyheads.nn.attention.lsh_hash import near_pairs
from manyheads.nn.attention.observing import observe

if TYPE_CHECKING:
    from manyheads.extras.peers.peer import Layout
    from manyheads.models.composites import LanguageModel

_ACTIVATIONS = {
    **{"relu": "relu", "gelu": "gelu", "silu": "swish", "swish": "swish"},
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
}


class HFReformer(Peer):
    """The model with its head. in.ids and, with padding on the right, in.attention_mask; rot.0, ... are the rotations
    of the layers that hash, rot.override0, ... those of a second run with `num_hashes_override`.

    `seq_len` in a config is the first sequence's length, which determines an unset number of buckets (default: the
    maximum).
    """

    name = "transformers' Reformer"
    kinds = ("hf_reformer",)
    origin = "transformers Reformer"
    options: ClassVar[Options] = {
        "model_type": "reformer",
        "attention_head_size": 64,
        "attn_layers": ["local", "lsh", "local", "lsh", "local", "lsh"],
        "axial_pos_embds": True,
        "axial_pos_shape": [64, 64],
        "axial_pos_embds_dim": [64, 192],
        "chunk_size_feed_forward": 0,
        "feed_forward_size": 512,
        "hash_seed": int | None,
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
        "num_buckets": int | list[int] | None,
        "num_hashes": 1,
        "pad_token_id": 0,
        "vocab_size": 320,
        "tie_word_embeddings": False,
    }
    ignores_others = True
    same: ClassVar[Mapping[str, str]] = {
        "chunk_size_feed_forward": "ff_chunk_len",
        "feed_forward_size": "d_ff",
        "hidden_dropout_prob": "dropout",
        "hidden_size": "d_model",
        "is_decoder": "causal",
        "layer_norm_eps": "norm_eps",
        "local_num_chunks_before": "local_chunks_before",
        "local_attn_chunk_length": "local_chunk_len",
        "lsh_attn_chunk_length": "chunk_len",
        "lsh_num_chunks_before": "chunks_before",
        "lsh_num_chunks_after": "chunks_after",
        "num_attention_heads": "num_heads",
        "num_hashes": "num_hashes",
        "vocab_size": "vocab_size",
    }
    holds: ClassVar[Holds] = {
        **REFORMER,
        "activation": tuple(_ACTIVATIONS.values()),
        "positions": ("axial", "learned"),
    }
    head = r"lm_head\."
    layout: ClassVar[Layout] = {
        "reformer.embeddings.word_embeddings.weight": "body.embedding.weight",
        "reformer.embeddings.position_embeddings.weights.*": "body.positions.weights.*",
        "reformer.embeddings.position_embeddings.embedding.weight": "body.positions.weight",
        "reformer.encoder.layers.*.attention.layer_norm.*": "body.layers.*.attention.norm.*",
        "reformer.encoder.layers.*.attention.self_attention.{query,key,query_key,value}.*": (
            "body.layers.*.attention.self_attn.{q,k,qk,v}_proj.*"
        ),
        "reformer.encoder.layers.*.attention.output.dense.*": "body.layers.*.attention.self_attn.out_proj.*",
        "reformer.encoder.layers.*.feed_forward.layer_norm.*": "body.layers.*.feed_forward.norm.*",
        "reformer.encoder.layers.*.feed_forward.dense.dense.*": "body.layers.*.feed_forward.net.in_proj.*",
        "reformer.encoder.layers.*.feed_forward.output.dense.*": "body.layers.*.feed_forward.net.out_proj.*",
        "reformer.encoder.layer_norm.*": "body.norm.*",
        "lm_head.bias": "head.bias",
        "lm_head.decoder.{weight,bias}": "head.{weight,bias}",
    }
    unused = r".*\.(self_)?mask_value_float(16|32)"  # buffers of the attention layers in older files

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        options = super().read(config)
        if options["num_buckets"] is None:
            options["num_buckets"] = _buckets(options, config.get("seq_len") or _max_len(options))
        return options

    @classmethod
    def config_of(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ReformerConfig:
        if options["tie_word_embeddings"]:
            raise ConfigError("tie_word_embeddings is true, but the output is twice as wide as the embedding.")
        if options["hidden_act"] not in _ACTIVATIONS:
            raise ConfigError(f"hidden_act is {options['hidden_act']!r}; those of {sorted(_ACTIVATIONS)} are known.")
        unknown = [kind for kind in options["attn_layers"] if kind not in ("lsh", "local")]
        if unknown or not options["attn_layers"]:
            raise ConfigError(f"attn_layers is {options['attn_layers']}; it must name 'lsh' or 'local' for each layer.")
        axial, given = options["axial_pos_embds"], options["num_buckets"]
        has_lsh = "lsh" in options["attn_layers"]
        config = ReformerConfig(
            **cls.fields_of(options),
            head_dim=options["attention_head_size"],
            num_layers=len(options["attn_layers"]),
            layers=tuple(options["attn_layers"]),
            positions="axial" if axial else "learned",
            axial_shape=tuple(options["axial_pos_shape"]) if axial else (),
            axial_dims=tuple(options["axial_pos_embds_dim"]) if axial else (),
            max_len=_max_len(options),
            num_buckets=tuple(given if isinstance(given, list | tuple) else [given]) if has_lsh else (2,),
            exact_len=options["lsh_attn_chunk_length"],
            visible="chunk",
            look_across_rounds=True,
            wrap=True,
            # The causal mask hides later chunks in a decoder.
            local_chunks_after=0 if options["is_decoder"] else options["local_num_chunks_after"],
            local_wrap=True,
            attention_dropout=options[f"{'lsh' if has_lsh else 'local'}_attention_probs_dropout_prob"],
            activation=_ACTIVATIONS[options["hidden_act"]],  # type: ignore[arg-type]
            hash_seed=options["hash_seed"] or 0,
            shared_rotations=options["hash_seed"] is not None,
            pad_to_chunks=True,
        )
        for axis, size in enumerate(config.axes[0] if axial else ()):
            name = f"reformer.embeddings.position_embeddings.weights.{axis}"
            if name in weights and weights[name].shape[axis : axis + 1] != (size,):
                raise ModelFileError(
                    f"{name} has shape {tuple(weights[name].shape)}, but axial_pos_shape is {list(config.axes[0])}."
                )
        return config

    @classmethod
    def describe(cls, module: LanguageModel) -> dict[str, Any]:
        config = module.config
        cls.check(config)
        fixed = {
            **{"visible": "chunk", "within_bucket": False, "correct_duplicates": False},
            **{"look_across_rounds": True, "wrap": True, "exact_len": config.chunk_len},
        }
        fixed = fixed if "lsh" in config.kinds else {}
        if "local" in config.kinds and not config.causal:
            fixed["local_wrap"] = True
        cls.demand(config, fixed)
        exact = "full" in config.kinds or config.num_hashes < 1
        cls.refuse(
            {
                "local layers with slopes": config.local_slopes and "local" in config.kinds,
                "layers that attend exactly; it has 'lsh' and 'local'": exact,
            }
        )
        factors = list(config.lsh.factors(config.max_len))
        activations = {ours: peer for peer, ours in reversed(_ACTIVATIONS.items())}
        options = {
            **cls.options_of(config),
            "attention_head_size": config.width_of_heads,
            "attn_layers": list(config.kinds),
            "axial_pos_embds": config.positions == "axial",
            "hash_seed": config.hash_seed,
            "hidden_act": activations[config.activation],
            "local_num_chunks_after": config.local_chunks_after,
            "local_attention_probs_dropout_prob": config.attention_dropout,
            "lsh_attention_probs_dropout_prob": config.attention_dropout,
            "max_position_embeddings": config.max_len,
            "num_buckets": factors[0] if len(factors) == 1 else factors,
        }
        if config.positions == "axial":
            shape, dims = config.axes
            options |= {"axial_pos_shape": list(shape), "axial_pos_embds_dim": list(dims)}
        return options

    @classmethod
    def notes_of_import(cls, options: Mapping[str, Any], config: Any) -> list[str]:
        chosen = cls.read({"model": options})
        if "lsh" not in chosen["attn_layers"]:
            return []
        notes = []
        if chosen["hash_seed"] is None:
            notes.append(
                "hash_seed is null: the peer draws new rotations in every call, manyheads always those of seed 0, so"
                " logits differ from draw to draw."
            )
        if options.get("num_buckets") is None:
            notes.append(
                "num_buckets is null: the peer computes it from its first sequence; the converted model has"
                f" {chosen['num_buckets']}, that of a sequence of the maximum length."
            )
        fault = "has a rounding fault in the peer: its weights do not always sum to one; the converted model's do."
        rounds, chunks = chosen["num_hashes"], max(chosen["lsh_num_chunks_before"], chosen["lsh_num_chunks_after"])
        if chosen["is_decoder"] and rounds > 1:
            notes.append(f"A decoder with {rounds} hash rounds {fault}")
        elif rounds > 1:
            notes.append(f"With {rounds} hash rounds, a token that sees only padding beside itself {fault}")
        elif chunks > 1:
            length = chunks * chosen["lsh_attn_chunk_length"]
            notes.append(f"In a sequence of up to {length} tokens, a token that sees no other {fault}")
        return notes

    @classmethod
    def notes_of_export(cls, config: ReformerConfig) -> list[str]:
        settings = {"shared_rotations": config.shared_rotations, "pad_to_chunks": config.pad_to_chunks}
        off = [f"model.{name}" for name, value in settings.items() if not value]
        notes = []
        if off and "lsh" in config.kinds:
            notes.append(
                f"transformers computes as with {' and '.join(off)}, which {'is' if len(off) == 1 else 'are'} off in"
                " this model, so the buckets of texts longer than a chunk differ."
            )
        if config.ff_chunk_len:
            notes.append(
                f"transformers refuses texts whose length is no multiple of chunk_size_feed_forward"
                f" ({config.ff_chunk_len}); from_pretrained(FOLDER, chunk_size_feed_forward=0) takes all, with the same"
                " numbers."
            )
        return notes

    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        [ids] = require(inputs, "ids")
        mask = inputs.get("in.attention_mask", torch.ones_like(ids)).bool()
        lengths = mask.sum(dim=1)
        if mask.shape != ids.shape or not torch.equal(mask, torch.arange(ids.shape[1]) < lengths[:, None]):
            raise RequestError("in.attention_mask must have the shape of in.ids, and zeros on the right alone.")
        padded = F.pad(ids, (0, self.module.config.padding(ids.shape[1])), value=self.chosen["pad_token_id"])
        whole = bool((lengths == padded.shape[1]).all())
        shared = self.module.config.shared_rotations
        seed = self.module.config.hash_seed
        call = Call(None if whole else lengths, seed, None, self._rotations(inputs, "rot."), shared)
        answer, is_rounded = self._outputs(padded, call, ids.shape[1])
        if self.config.get("grads"):
            answer |= self._gradients(padded, call, ids)
        rounds = self.config.get("num_hashes_override")
        if rounds:
            call = replace(call, num_hashes=rounds, rotations=self._rotations(inputs, "rot.override"))
            others, is_rounded_too = self._outputs(padded, call, ids.shape[1])
            answer["out.logits_num_hashes_override"] = others["out.logits"]
            is_rounded = is_rounded or is_rounded_too
        if not is_rounded:
            return answer
        return {name if "buckets" in name else f"exact.{name.removeprefix('out.')}": x for name, x in answer.items()}

    def _rotations(self, inputs: Mapping[str, Tensor], prefix: str) -> dict[int, Tensor]:
        hashing = [index for index, kind in enumerate(self.module.config.kinds) if kind == "lsh"]
        names = {index: f"{prefix}{number}" for number, index in enumerate(hashing)}
        return {index: inputs[name] for index, name in names.items() if name in inputs}

    def _is_rounded(self, buckets: Tensor, lengths: Tensor | None) -> bool:
        """Return whether the peer's float32 fault shows in a layer: some token sees no other, and itself several times.

        It sees itself in each round, and again where a window of chunks reaches around to its own chunk. It sees no
        other if it is the first of a decoder, or if all others in its chunks are later or padding.
        """
        near = near_pairs(buckets, self.module.config.lsh).sum(dim=2)  # (batch, heads, length, length)
        positions = torch.arange(near.shape[-1])
        others = positions[:, None] > positions if self.module.config.causal else positions[:, None] != positions
        real = positions < (positions.shape[0] if lengths is None else lengths[:, None, None])
        alone = ~((near > 0) & others & real[..., None, :]).any(dim=-1) & real
        return bool((alone & (near.diagonal(dim1=-2, dim2=-1) > 1)).any())

    def _outputs(self, ids: Tensor, call: Call, length: int) -> tuple[dict[str, Tensor], bool]:
        """Return the peer's outputs, cut to `length`, and whether its rounding fault shows."""
        body, config = cast(Reformer, self.module.body), self.module.config
        answer, is_rounded = {}, False
        with torch.no_grad():
            x1 = x2 = body.embed(ids)
            answer["out.hidden.0"] = x2[:, :length]
            for index, layer in enumerate(cast(list[ReformerLayer], list(body.layers))):
                with observe(layer.attention, "buckets") as seen:
                    added, _ = layer.attention(x2, call)
                for [buckets] in seen.values():
                    answer[f"out.buckets.{config.kinds[:index].count('lsh')}"] = self._numbered(buckets, call.lengths)
                    is_rounded = is_rounded or self._is_rounded(buckets, call.lengths)
                x1 = x1 + added
                x2 = x2 + layer.feed_forward(x1)[0]
                answer[f"out.hidden.{index + 1}"] = x2[:, :length]
            hidden = body.norm(torch.cat([x1, x2], dim=-1))
            answer["out.logits"] = self.module.head.logits(hidden)[:, :length]
        return answer, is_rounded

    def _numbered(self, buckets: Tensor, lengths: Tensor | None) -> Tensor:
        """Return buckets with the peer's numbers: (batch, heads, rounds x length), one round after the other."""
        total = math.prod(self.module.config.lsh.factors(self.module.config.max_len)) + (lengths is not None)
        numbered: Tensor = buckets + total * torch.arange(buckets.shape[2])[:, None]
        return numbered.flatten(2)

    def _gradients(self, padded: Tensor, call: Call, ids: Tensor) -> dict[str, Tensor]:
        """Return loss and gradients through the reversible layers."""
        hidden, _ = self.module.body(padded, call.lengths, rotations=call.rotations)
        logits = self.module.head.logits(hidden)[:, : ids.shape[1]]
        if self.module.config.causal:
            logits, ids = logits[:, :-1], ids[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return {"out.loss": loss.detach(), **self.gradients(loss)}


def _max_len(options: Mapping[str, Any]) -> int:
    return math.prod(options["axial_pos_shape"]) if options["axial_pos_embds"] else options["max_position_embeddings"]


def _buckets(options: Mapping[str, Any], length: int) -> int | list[int]:
    """Return the number of buckets, or its factors, by the peer's rule for a sequence's length."""
    chunk_len = max(1, options["lsh_attn_chunk_length"])
    exponent = max(1, (2 * (length // chunk_len)).bit_length() - 1)
    limit = 2 * max(int((options["max_position_embeddings"] // chunk_len) ** 0.5), chunk_len)
    return [2 ** (exponent // 2), 2 ** (exponent - exponent // 2)] if 2**exponent > limit else 2**exponent
