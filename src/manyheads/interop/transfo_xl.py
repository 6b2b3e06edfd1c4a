"""TransfoXLLMHeadModel of transformers (up to 4.x).

Differs from ours: queries attend to an initial memory of zeros (`mems: default`); losses are grouped by cluster; one
tensor for queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.table import build_model
from manyheads.architectures.transformer_xl.config import TransformerXLConfig
from manyheads.architectures.transformer_xl.state import LayerInputs, XLState
from manyheads.errors import ConfigError, RequestError
from manyheads.interop.names import Pair, pick
from manyheads.interop.xl_weights import (
    XLNames,
    by_cluster,
    check_fits,
    export_xl,
    gradients,
    import_xl,
    tied_projections,
)

__all__ = ["TransfoXL", "from_peer", "matches", "to_peer"]

_OPTIONS: dict[str, Any] = {
    "vocab_size": 267735,
    "cutoffs": [20000, 40000, 200000],
    "d_model": 1024,
    "d_embed": 1024,
    "n_head": 16,
    "d_head": 64,
    "d_inner": 4096,
    "div_val": 4,
    "pre_lnorm": False,
    "n_layer": 18,
    "mem_len": 1600,
    "clamp_len": 1000,
    "same_length": True,
    "proj_share_all_but_first": True,
    "tie_projs": None,
    "tie_word_embeddings": True,
    "untie_r": True,
    "dropout": 0.1,
    "dropatt": 0.0,
    "layer_norm_epsilon": 1e-5,
    "attn_type": 0,
}
"""TransfoXLConfig's defaults: what a config.json leaves out."""


class TransfoXL:
    """The language model; see `protocols.Wrapper`. config: the fixture's."""

    def __init__(self, module: LanguageModel, config: Mapping[str, Any]) -> None:
        self.module = module
        self.config = config

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `protocols.Wrapper.run`: consecutive segments in.ids.0, in.ids.1, ..., with the memory passed on."""
        count = sum(name.startswith("in.ids.") for name in inputs)
        if not count or any(f"in.ids.{i}" not in inputs for i in range(count)):
            raise RequestError(f"segments in.ids.0, in.ids.1, ... are needed; there are {sorted(inputs)}.")
        state = self.first_memory(inputs["in.ids.0"].shape[0])
        answer: dict[str, Tensor] = {}
        for index in range(count):
            wants_grads = bool(self.config.get("grads")) and index == count - 1
            with torch.set_grad_enabled(wants_grads):
                state = self._segment(index, inputs, state, answer, wants_grads)
        return answer

    def first_memory(self, rows: int) -> XLState:
        """Return the memory of the peer's first call: zeros everywhere, or with `mems: empty` nothing."""
        state = self.module.start(rows, projected=False)
        if self.config.get("mems", "default") == "empty":
            return cast(XLState, state)
        config = self.module.config
        zeros = state.memory.layers[0].new_zeros(rows, config.memory_len, config.d_model)
        return XLState(
            memory=LayerInputs((zeros,) * config.num_layers),
            lengths=torch.full((rows,), config.memory_len),
            attending=config.attending,
        )

    def _segment(
        self, index: int, inputs: Mapping[str, Tensor], state: XLState, answer: dict[str, Tensor], wants_grads: bool
    ) -> XLState:
        ids = inputs[f"in.ids.{index}"]
        hidden, state = self.module.body(ids, None, state)
        log_probs = self.module.head.log_probs(hidden)
        answer[f"out.hidden.{index}"] = hidden.detach()
        answer[f"out.logprobs.{index}"] = log_probs.detach()
        if self.module.config.memory_len:
            for layer, memory in enumerate(cast(LayerInputs, state.memory).layers):
                answer[f"out.mems.{index}.{layer}"] = memory.transpose(0, 1)
        if f"in.target.{index}" in inputs:
            nll = -log_probs.gather(2, inputs[f"in.target.{index}"][..., None])[..., 0]
            answer[f"out.nll.{index}"] = nll.detach()
            if wants_grads:
                found = gradients(self.module, nll.mean(), _names(self.module.config))
                answer |= {f"grad.{name}": grad for name, grad in found.items()}
        if ids.shape[1] > 1:
            losses = -log_probs[:, :-1].gather(2, ids[:, 1:, None])[..., 0].detach()
            answer[f"out.losses_in_token_order.{index}"] = losses
            answer[f"out.losses_as_returned.{index}"] = by_cluster(losses, ids[:, 1:], self.module.config.cutoffs)
        return state


def matches(meta: Mapping[str, Any]) -> bool:
    """See `protocols.Loader.matches`."""
    if "kind" in meta:
        return bool(meta["kind"] == "hf_transfo_xl")
    return str(meta.get("peer", "")).startswith("transformers TransfoXL")


def from_peer(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> TransfoXL:
    """See `protocols.Loader.from_peer`. config: TransfoXLConfig's options under `model`; `mems`: default or empty."""
    options = config.get("model")
    if not isinstance(options, Mapping):
        raise ConfigError("the config must hold TransfoXLConfig's options under 'model'.")
    ours = read_config(options)
    check_fits(ours, state_dict)
    module = build_model(ours)
    import_xl(module, state_dict, _names(ours))
    return TransfoXL(module.eval(), config)


def read_config(options: Mapping[str, Any]) -> TransformerXLConfig:
    """Return our config from TransfoXLConfig's options; options without effect in the peer's forward pass are ignored.

    Raises: ConfigError: an option of the wrong type or out of range, or one that the peer's code does not support.
    """
    peer = pick({name: value for name, value in options.items() if name in _OPTIONS}, _OPTIONS, "TransfoXL")
    _check_types(peer)
    if options.get("model_type", "transfo-xl") != "transfo-xl":
        raise ConfigError(f"this is a config of model_type {options['model_type']!r}, not of a TransfoXL model.")
    if peer["attn_type"] != 0:
        raise ConfigError(f"attn_type is {peer['attn_type']}; TransfoXL itself knows 0 alone.")
    d_embed, cutoffs = peer["d_embed"], tuple(peer["cutoffs"])
    # A config that the peer saved has `tie_projs`, which takes precedence over the shorter option.
    tied = peer["tie_projs"]
    if tied is None:
        tied = [False, *[peer["proj_share_all_but_first"]] * len(cutoffs)]
    return TransformerXLConfig(
        vocab_size=peer["vocab_size"],
        d_model=peer["d_model"],
        num_heads=peer["n_head"],
        head_dim=peer["d_head"],
        d_ff=peer["d_inner"],
        num_layers=peer["n_layer"],
        d_embed=d_embed,
        cutoffs=cutoffs,
        div_value=peer["div_val"],
        dropout=float(peer["dropout"]),
        attention_dropout=float(peer["dropatt"]),
        norm_position="pre" if peer["pre_lnorm"] else "post",
        norm_eps=float(peer["layer_norm_epsilon"]),
        share_biases=not peer["untie_r"],
        memory_len=peer["mem_len"],
        clamp_len=peer["clamp_len"] if peer["clamp_len"] > 0 else None,
        same_length=peer["same_length"],
        tie_embeddings=peer["tie_word_embeddings"],
        tie_projections=tied_projections(tied, cutoffs, exist=peer["div_val"] > 1 or d_embed != peer["d_model"]),
    )


def to_peer(module: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The inverse of `from_peer`: TransfoXLConfig's options (under `model`) and the state dict.

    Raises: ConfigError: the peer does not support one of the options.
    """
    config = module.config
    if config.attention != "relative":
        raise ConfigError(f"TransfoXL cannot hold a model with attention {config.attention!r}; it has 'relative'.")
    for name, value in {"ext_len": 0}.items():
        if getattr(config, name) != value:
            raise ConfigError(f"TransfoXL cannot hold a model with {name} {getattr(config, name)}; it has {value}.")
    if config.clamp_len == 0:
        raise ConfigError("TransfoXL cannot hold a model with clamp_len 0, which it treats as no limit.")
    tied = list(config.tie_projections) or [False] * (len(config.cutoffs) + 1)
    options = {
        "vocab_size": config.vocab_size,
        "cutoffs": list(config.cutoffs),
        "d_model": config.d_model,
        "d_embed": config.embedding_dim,
        "n_head": config.num_heads,
        "d_head": config.width_of_heads,
        "d_inner": config.d_ff,
        "div_val": config.div_value,
        "pre_lnorm": config.norm_position == "pre",
        "n_layer": config.num_layers,
        "mem_len": config.memory_len,
        "clamp_len": -1 if config.clamp_len is None else config.clamp_len,
        "same_length": config.same_length,
        "proj_share_all_but_first": all(tied[1:]) and not tied[0],
        "tie_projs": tied,
        "tie_word_embeddings": config.tie_embeddings,
        "untie_r": not config.share_biases,
        "dropout": config.dropout,
        "dropatt": config.attention_dropout,
        "layer_norm_epsilon": config.norm_eps,
    }
    return {"model": options}, export_xl(module, _names(config))


def _check_types(peer: Mapping[str, Any]) -> None:
    for name, default in _OPTIONS.items():
        value, kind = peer[name], list if default is None else type(default)
        if value is None and default is None:
            continue
        fits = type(value) is kind or (kind is float and type(value) is int)
        if kind is list:
            inner = bool if name == "tie_projs" else int
            fits = isinstance(value, list | tuple) and all(type(one) is inner for one in value)
        if not fits:
            raise ConfigError(f"{name} is {value!r} in TransfoXL's config; it must be of type {kind.__name__}.")


def _names(config: TransformerXLConfig) -> XLNames:
    """Return the names. u and v are parameters of the whole model, repeated in every layer, or of each layer."""
    pairs, groups = [], []
    layers = [f"transformer.layers.{i}.dec_attn" for i in range(config.num_layers)]
    for peer, ours in (("r_w_bias", "content_bias"), ("r_r_bias", "position_bias")):
        if config.share_biases:
            groups.append((f"transformer.{peer}", *(f"{layer}.{peer}" for layer in layers)))
            pairs.append(Pair(f"transformer.{peer}", (f"body.layers.0.attention.{ours}",)))
        else:
            pairs += [Pair(f"{layer}.{peer}", (f"body.layers.{i}.attention.{ours}",)) for i, layer in enumerate(layers)]
    return XLNames("transformer.", tuple(pairs), tuple(groups))
