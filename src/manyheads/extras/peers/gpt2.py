"""GPT2LMHeadModel of transformers, and the GPT of nanoGPT.

Differs from ours: one tensor for queries, keys and values; transformers stores matrices as (in, out), since OpenAI's
code had convolutions of width 1 there; the published files of GPT-2 name the body's tensors without `transformer.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.errors import ConfigError
from manyheads.extras.peers.peer import Holds, Layout, Options, Peer, any_of, require, transposed
from manyheads.models.decoder.config import DecoderConfig

if TYPE_CHECKING:
    from manyheads.extras.peers.legacy_pickle import Saved
    from manyheads.models.composites import LanguageModel

_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "swish",
    "swish": "swish",
    "tanh": "tanh",
    "quick_gelu": "quick_gelu",
}
_BODY: Layout = {
    "transformer.wte.weight": "body.embedding.weight",
    "transformer.wpe.weight": "body.positions.weight",
    "transformer.h.*.ln_1.*": "body.layers.*.self_attn_residual.norm.*",
    "transformer.h.*.ln_2.*": "body.layers.*.feed_forward_residual.norm.*",
    "transformer.ln_f.*": "body.norm.*",
    "lm_head.weight": "head.weight",
}
_BIASES: Layout = {
    "transformer.h.*.attn.c_attn.bias": "body.layers.*.self_attn.{q,k,v}_proj.bias",
    "transformer.h.*.attn.c_proj.bias": "body.layers.*.self_attn.out_proj.bias",
    "transformer.h.*.mlp.c_fc.bias": "body.layers.*.feed_forward.in_proj.bias",
    "transformer.h.*.mlp.c_proj.bias": "body.layers.*.feed_forward.out_proj.bias",
}
_MATRICES = {
    "transformer.h.*.attn.c_attn.weight": "body.layers.*.self_attn.{q,k,v}_proj.weight",
    "transformer.h.*.attn.c_proj.weight": "body.layers.*.self_attn.out_proj.weight",
    "transformer.h.*.mlp.c_fc.weight": "body.layers.*.feed_forward.in_proj.weight",
    "transformer.h.*.mlp.c_proj.weight": "body.layers.*.feed_forward.out_proj.weight",
}
_HELD: Holds = {
    **any_of("architecture vocab_size d_model num_heads head_dim num_layers dropout max_len"),
    "positions": ("learned",),
}


class GPT2(Peer):
    """The language model on in.ids: out.logits, and with `grads` in the config out.loss and the gradients."""

    name = "GPT2"
    origin = "transformers GPT2"
    options: ClassVar[Options] = {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": int | None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }
    ignores_others = True
    inputs = ("ids",)
    same: ClassVar[Mapping[str, str]] = {
        "vocab_size": "vocab_size",
        "n_positions": "max_len",
        "n_embd": "d_model",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "resid_pdrop": "dropout",
        "attn_pdrop": "attention_dropout",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    }
    layout: ClassVar[Layout] = {**_BODY, **_BIASES, **{peer: transposed(ours) for peer, ours in _MATRICES.items()}}
    holds: ClassVar[Holds] = {
        **_HELD,
        **any_of("d_ff attention_dropout norm_eps tie_embeddings"),
        "activation": tuple(dict.fromkeys(_ACTIVATIONS.values())),
    }
    unused = r".*\.attn\.(masked_)?bias"  # the causal mask, in older files

    @classmethod
    def prepare(cls, weights: Mapping[str, Tensor], module: Any) -> dict[str, Tensor]:
        return {_full_name(name): tensor for name, tensor in cls.parameters_in(weights).items()}

    @classmethod
    def config_of(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DecoderConfig:
        unlike = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
        for name, value in unlike.items():
            if options[name] is not value:
                raise ConfigError(f"{name} is {options[name]}; models of GPT-2 with {name} {value} can be converted.")
        if options["activation_function"] not in _ACTIVATIONS:
            raise ConfigError(
                f"activation_function is {options['activation_function']!r}; those of {sorted(_ACTIVATIONS)} are known."
            )
        if options["embd_pdrop"] != options["resid_pdrop"]:
            raise ConfigError(
                f"embd_pdrop is {options['embd_pdrop']:g} and resid_pdrop {options['resid_pdrop']:g}, but here one rate"
                " serves both; set them to the same number in config.json. They count in training only."
            )
        return DecoderConfig(
            **cls.fields_of(options),
            d_ff=4 * options["n_embd"] if options["n_inner"] is None else options["n_inner"],
            activation=_ACTIVATIONS[options["activation_function"]],  # type: ignore[arg-type]
        )

    @classmethod
    def describe(cls, module: LanguageModel) -> dict[str, Any]:
        config = module.config
        cls.check(config)
        cls.refuse(_own_width(config))
        names = {ours: peer for peer, ours in reversed(_ACTIVATIONS.items())}
        return {
            **cls.options_of(config),
            "n_inner": config.d_ff,
            "embd_pdrop": config.dropout,
            "activation_function": names[config.activation],
        }

    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        [ids] = require(inputs, "ids")
        with torch.set_grad_enabled(bool(self.config.get("grads"))):
            hidden, _ = self.module.body(ids)
            logits = self.module.head.logits(hidden)
        answer = {"out.hidden": hidden.detach(), "out.logits": logits.detach()}
        if self.config.get("grads"):
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            answer |= {"out.loss": loss.detach(), **self.gradients(loss)}
        return answer


class NanoGPT(GPT2):
    """As `GPT2`; linear layers store their matrices as ours, the activation is the exact GELU, biases are optional."""

    name = "nanoGPT"
    origin = "nanoGPT"
    options: ClassVar[Options] = {
        "block_size": 1024,
        "vocab_size": 50304,
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "dropout": 0.0,
        "bias": True,
    }
    ignores_others = False
    same: ClassVar[Mapping[str, str]] = {
        "block_size": "max_len",
        "vocab_size": "vocab_size",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "n_embd": "d_model",
        "dropout": "dropout",
        "bias": "bias",
    }
    layout: ClassVar[Layout] = {**_BODY, **_BIASES, **_MATRICES}
    holds: ClassVar[Holds] = {
        **_HELD,
        **any_of("d_ff attention_dropout bias"),
        **{"norm_eps": (1e-5,), "tie_embeddings": (True,), "activation": ("gelu",)},
    }

    @classmethod
    def config_of(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DecoderConfig:
        return DecoderConfig(
            **cls.fields_of(options),
            d_ff=4 * options["n_embd"],
            attention_dropout=options["dropout"],
            activation="gelu",
        )

    @classmethod
    def options_of_saved(cls, saved: Saved) -> dict[str, Any] | None:
        return {name.removeprefix("model_args."): value for name, value in saved.options.items()} or None

    @classmethod
    def describe(cls, module: LanguageModel) -> dict[str, Any]:
        config = module.config
        cls.check(config)
        cls.refuse(
            {
                **_own_width(config),
                f"d_ff {config.d_ff}, which is not 4 x d_model": config.d_ff != 4 * config.d_model,
                f"attention_dropout {config.attention_dropout:g}, which is not dropout": (
                    config.attention_dropout != config.dropout
                ),
            }
        )
        return cls.options_of(config)


def _full_name(name: str) -> str:
    """Return a tensor's name without the prefix of compiled modules, and with that of the body."""
    name = name.removeprefix("_orig_mod.")
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _own_width(config: DecoderConfig) -> dict[str, bool]:
    return {f"head_dim {config.head_dim}": config.num_heads * config.width_of_heads != config.d_model}
