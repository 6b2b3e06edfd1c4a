"""The modules of torch.nn as peers: `MultiheadAttention`, and `Transformer` without embeddings and output layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError, RequestError
from manyheads.extras.peers.peer import TRANSFORMER, Holds, Options, Peer, own_heads, require
from manyheads.extras.peers.torch_compatible import TorchMultiheadAttention, mask_of_torch
from manyheads.models.transformer.config import TransformerConfig
from manyheads.models.transformer.model import Decoder, Encoder
from manyheads.nn.attention.multi_head import PROJECTIONS, MultiHeadAttention
from manyheads.nn.attention.settings import DotProductAttentionConfig

if TYPE_CHECKING:
    from manyheads.extras.peers.peer import Layout
    from manyheads.nn.attention.masks import Mask


def _is_torch_like(module: nn.Module) -> bool:
    """Return whether a module of ours has torch's stacked parameters."""
    return hasattr(module, "in_proj_bias")


class TorchAttention(Peer):
    """One matrix for queries, keys and values, blocking or additive masks, extra keys.

    out.out, and out.weights (batch, heads, q_len, k_len). Its weights become a `MultiHeadAttention`; with `add_bias_kv`
    or `add_zero_attn`, which ours does not have, a `TorchMultiheadAttention`. A query that may attend to nothing is NaN
    there and zeros here.
    """

    name = "torch.nn.MultiheadAttention"
    kinds = ("torch_nn_mha",)
    origin = r"torch\.nn\.MultiheadAttention( |$)"
    options: ClassVar[Options] = {
        "embed_dim": int,
        "num_heads": int,
        "dropout": 0.0,
        "bias": True,
        "add_bias_kv": False,
        "add_zero_attn": False,
        "kdim": int | None,
        "vdim": int | None,
        "batch_first": False,
    }
    inputs = ("query", "key", "value", "key_padding_mask", "attn_mask")

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
        if options["add_bias_kv"] or options["add_zero_attn"]:
            return TorchMultiheadAttention(**options)
        return MultiHeadAttention(
            options["embed_dim"],
            options["num_heads"],
            key_dim=options["kdim"],
            value_dim=options["vdim"] or options["embed_dim"],
            dropout=options["dropout"],
            bias=options["bias"],
        )

    @classmethod
    def layout_of(cls, module: Any) -> Layout:
        if _is_torch_like(module):
            return {"*": "*", "out_proj.*": "out_proj.*"}
        one_width = {getattr(module, name).in_features for name in PROJECTIONS[:3]} == {module.out_proj.out_features}
        return {
            **(
                {"in_proj_weight": "{q,k,v}_proj.weight"}
                if one_width
                else {"{q,k,v}_proj_weight": "{q,k,v}_proj.weight"}
            ),
            "in_proj_bias": "{q,k,v}_proj.bias",
            "out_proj.*": "out_proj.*",
        }

    @classmethod
    def describe(cls, module: Any) -> dict[str, Any]:
        if _is_torch_like(module):
            names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
            options = {name: getattr(module, name) for name in names}
            return {**options, "bias": module.in_proj_bias is not None, "add_bias_kv": module.bias_k is not None}
        embed_dim = module.out_proj.out_features
        biases = {getattr(module, name).bias is not None for name in PROJECTIONS}
        cls.refuse(
            {
                **own_heads(module),
                f"query_dim {module.q_proj.in_features}": module.q_proj.in_features != embed_dim,
                "biases in some projections only": len(biases) > 1,
            }
        )
        return {
            "embed_dim": embed_dim,
            "num_heads": module.num_heads,
            "dropout": module.dropout_rate,
            "bias": biases == {True},
            "kdim": module.k_proj.in_features,
            "vdim": module.v_proj.in_features,
            "batch_first": True,
        }

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        query, key, value = require(inputs, "query", "key", "value")
        padding, pattern = inputs.get("in.key_padding_mask"), inputs.get("in.attn_mask")
        if _is_torch_like(self.module):
            out, weights = self.module(query, key, value, padding, True, pattern, average_attn_weights=False)
            return {"out.out": out, "out.weights": weights}
        batched, batch_first = query.dim() == 3, self.chosen["batch_first"]
        if not batched:
            query, key, value = query[None], key[None], value[None]
            padding = None if padding is None else padding[None]
        elif not batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        sizes = (query.shape[0], self.module.num_heads, query.shape[1], key.shape[1])
        mask = mask_of_torch(pattern, padding, *sizes)
        out, _, weights = self.module(query, key, value, mask=mask, need_weights=True)
        if not batched:
            return {"out.out": out[0], "out.weights": weights[0]}
        return {"out.out": out if batch_first else out.transpose(0, 1).contiguous(), "out.weights": weights}


class EncoderDecoder(nn.Module):
    """Our two stacks, on vectors. Shape: source (batch, source_len, d_model), target (batch, target_len, d_model)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Mask | None = None,
        target_mask: Mask | None = None,
        memory_mask: Mask | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (memory, output)."""
        memory = self.encoder(source, source_mask)
        return memory, self.decoder(target, memory, target_mask, memory_mask)


class TorchTransformer(Peer):
    """The two stacks: out.memory and out.out.

    Differs from ours: masks are True = blocked or are added to the scores; the query, key and value projections of an
    attention layer are one matrix; both stacks end with a norm, also with post-norm; sequences may be length-first.
    Memory's padding is the source's, unless in.memory_key_padding is given. Gradients, if the config asks for them
    (`grads`), are those of the mean over real target positions of mean_d(out^2) x sum_d(sin(out)).
    """

    name = "torch.nn.Transformer"
    kinds = ("torch_nn_transformer",)
    origin = r"torch\.nn\.Transformer( |$)"
    options: ClassVar[Options] = {
        "d_model": 512,
        "nhead": 8,
        "num_encoder_layers": 6,
        "num_decoder_layers": 6,
        "dim_feedforward": 2048,
        "dropout": 0.1,
        "activation": "relu",
        "layer_norm_eps": 1e-5,
        "batch_first": False,
        "norm_first": False,
        "bias": True,
    }
    same: ClassVar[Mapping[str, str]] = {
        "d_model": "d_model",
        "nhead": "num_heads",
        "num_encoder_layers": "num_encoder_layers",
        "num_decoder_layers": "num_decoder_layers",
        "dim_feedforward": "d_ff",
        "activation": "activation",
        "layer_norm_eps": "norm_eps",
        "bias": "bias",
    }
    # Embeddings and the output are left out.
    holds: ClassVar[Holds] = {
        **TRANSFORMER,
        "activation": ("relu", "gelu"),
        "attention": (DotProductAttentionConfig(),),
        "norm": ("layer",),
    }
    inputs = ("src", "tgt", "src_mask", "tgt_mask", "memory_mask", "*_key_padding")
    layout: ClassVar[Layout] = {
        "*.layers.*.self_attn.in_proj_*": "*.layers.*.self_attn.{q,k,v}_proj.*",
        "*.layers.*.self_attn.out_proj.*": "*.layers.*.self_attn.out_proj.*",
        "*.layers.*.multihead_attn.in_proj_*": "*.layers.*.cross_attn.{q,k,v}_proj.*",
        "*.layers.*.multihead_attn.out_proj.*": "*.layers.*.cross_attn.out_proj.*",
        "*.layers.*.linear{1,2}.*": "*.layers.*.feed_forward.{in,out}_proj.*",
        "encoder.layers.*.norm{1,2}.*": "encoder.layers.*.{self_attn,feed_forward}_residual.norm.*",
        "decoder.layers.*.norm{1,2,3}.*": "decoder.layers.*.{self_attn,cross_attn,feed_forward}_residual.norm.*",
        "*.norm.*": "*.norm.*",
    }

    @classmethod
    def form_of(cls, model: Any) -> Any:
        return model.body

    @classmethod
    def notes_of_export(cls, config: Any) -> list[str]:
        return ["torch.nn.Transformer has no embeddings and no output layer, so these were left out."]

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> EncoderDecoder:
        if options["activation"] not in ("relu", "gelu"):
            raise ConfigError(f"activation is {options['activation']!r}; torch.nn.Transformer has 'relu' and 'gelu'.")
        return EncoderDecoder(
            TransformerConfig(
                **cls.fields_of(options),
                dropout=options["dropout"],
                attention_dropout=options["dropout"],
                feed_forward_dropout=options["dropout"],
                norm_position="pre" if options["norm_first"] else "post",
                final_norm=True,
            )
        )

    @classmethod
    def describe(cls, module: Any) -> dict[str, Any]:
        """See `Peer.describe`. module: an `EncoderDecoder`, or the body of a translation model, whose embeddings the
        peer does not have.
        """
        config = module.config
        cls.check(config)
        cls.demand(config, {"has_final_norm": True})
        cls.refuse(
            {
                f"decoder_d_ff {config.decoder_d_ff}": config.d_ff_of("decoder") != config.d_ff,
                f"num_decoder_heads {config.num_decoder_heads}": config.heads_of("decoder") != config.num_heads,
            }
        )
        return {
            **cls.options_of(config),
            # The peer has one dropout rate. If ours differ, results in evaluation are still the same.
            "dropout": max(config.dropout, config.attention_dropout, config.feed_forward_dropout),
            "batch_first": True,
            "norm_first": config.norm_position == "pre",
        }

    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given = require(inputs, "src", "tgt")
        source, target = map(self._batch_first, given)
        batch, source_len, target_len = source.shape[0], source.shape[1], target.shape[1]
        memory_padding = "memory_key_padding" if "in.memory_key_padding" in inputs else "src_key_padding"
        wants_grad = bool(self.config.get("grads"))
        with torch.set_grad_enabled(wants_grad):
            memory, out = self.module(
                source,
                target,
                self._mask(inputs, "src_mask", "src_key_padding", batch, source_len, source_len),
                self._mask(inputs, "tgt_mask", "tgt_key_padding", batch, target_len, target_len),
                self._mask(inputs, "memory_mask", memory_padding, batch, target_len, source_len),
            )
            batched = given[0].dim() == 3
            answer = {"out.memory": self._peer_layout(memory, batched), "out.out": self._peer_layout(out, batched)}
            if wants_grad:
                answer |= self._gradients(out, inputs.get("in.tgt_key_padding"))
        return answer

    def _gradients(self, out: Tensor, padding: Tensor | None) -> dict[str, Tensor]:
        real = torch.ones(out.shape[:2], dtype=torch.bool)
        if padding is not None:
            real = (~padding if padding.dtype == torch.bool else ~torch.isneginf(padding)).view(out.shape[:2])
        loss = (out.square().mean(dim=-1) * out.sin().sum(dim=-1))[real].mean()
        return self.gradients(loss)

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x[None]  # torch also accepts one sequence without a batch axis
        if x.dim() != 3:
            raise RequestError(f"a sequence of vectors has 2 or 3 axes, this one has shape {tuple(x.shape)}.")
        return x if self.chosen["batch_first"] else x.transpose(0, 1)

    def _peer_layout(self, x: Tensor, batched: bool) -> Tensor:
        x = x.detach()
        if not batched:
            return x[0]
        return x if self.chosen["batch_first"] else x.transpose(0, 1).contiguous()

    def _mask(self, inputs: Mapping[str, Tensor], pattern: str, padding: str, *sizes: int) -> Mask | None:
        """Return one attention's mask. sizes: batch, q_len, k_len."""
        batch, q_len, k_len = sizes
        keys = inputs.get(f"in.{padding}")
        keys = None if keys is None else keys.view(-1, k_len)
        return mask_of_torch(inputs.get(f"in.{pattern}"), keys, batch, self.module.config.num_heads, q_len, k_len)
