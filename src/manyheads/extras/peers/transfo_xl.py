"""TransfoXLLMHeadModel of transformers (up to 4.x); first, what the implementations of Transformer-XL share.

Differs from ours: under pre-norm too, queries attend to an initial memory of zeros (`mems: default`); losses are
grouped by cluster; one tensor for queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from manyheads.errors import ConfigError, RequestError
from manyheads.extras.peers.peer import TRANSFORMER_XL, Holds, Options, Peer
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.models.transformer_xl.state import LayerInputs, XLState

if TYPE_CHECKING:
    from manyheads.extras.peers.peer import Layout
    from manyheads.models.composites import LanguageModel


_SIZES = {
    "d_model": "d_model",
    "n_head": "num_heads",
    "d_inner": "d_ff",
    "n_layer": "num_layers",
    "div_val": "div_value",
    "dropout": "dropout",
    "dropatt": "attention_dropout",
    "same_length": "same_length",
}
"""Options with the same value as a setting of ours."""

HEAD: Layout = {
    "crit.out_layers.0.{weight,bias}": "head.{weight,bias}",
    "crit.out_layers.*.{weight,bias}": "head.{tables,biases}.*",
    "crit.out_projs.*": "head.projections.*",
}
_BODY: Layout = {
    "word_emb.emb_layers.*.weight": "body.embedding.tables.*",
    "word_emb.emb_projs.*": "body.embedding.projections.*",
    "layers.*.dec_attn.o_net.weight": "body.layers.*.attention.out_proj.weight",
    "layers.*.dec_attn.r_net.weight": "body.layers.*.attention.position_proj.weight",
    "layers.*.dec_attn.layer_norm.*": "body.layers.*.attention_residual.norm.*",
    "layers.*.pos_ff.CoreNet.{0,3}.*": "body.layers.*.feed_forward.{in,out}_proj.*",
    "layers.*.pos_ff.layer_norm.*": "body.layers.*.feed_forward_residual.norm.*",
}
_RELATIVE: Layout = {"layers.*.dec_attn.qkv_net.weight": "body.layers.*.attention.{q,k,v}_proj.weight"}
_ABSOLUTE: Layout = {
    "layers.*.dec_attn.q_net.weight": "body.layers.*.attention.q_proj.weight",
    "layers.*.dec_attn.kv_net.weight": "body.layers.*.attention.{k,v}_proj.weight",
}


def layout_of_body(config: TransformerXLConfig, prefix: str = "") -> Layout:
    """Return the layout of embedding and layers; the peer's names begin with `prefix`."""
    projections = _RELATIVE if config.attention.startswith("relative") else _ABSOLUTE
    return {f"{prefix}{peer}": ours for peer, ours in {**_BODY, **projections}.items()}


def sizes_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of our config that all peers name alike."""
    return {
        **{ours: options[peer] for peer, ours in _SIZES.items()},
        "head_dim": options["d_head"],
        "d_embed": options["d_embed"] or options["d_model"],
        "cutoffs": tuple(options["cutoffs"]),
        "memory_len": options["mem_len"] or 0,
    }


def options_of_sizes(config: TransformerXLConfig) -> dict[str, Any]:
    """Return the options of `sizes_of`, for our config."""
    return {
        **{peer: getattr(config, ours) for peer, ours in _SIZES.items()},
        "d_head": config.width_of_heads,
        "d_embed": config.embedding_dim,
        "cutoffs": list(config.cutoffs),
        "mem_len": config.memory_len,
    }


def notes_of_export(config: TransformerXLConfig, initial_memory: str) -> list[str]:
    """Return a sentence for each setting for which a peer's log-probabilities differ from the exported model's.

    Args: initial_memory: the peer's.
    """
    notes = []
    if config.memory_len and config.initial_memory != initial_memory:
        notes.append(
            f"The peer computes as with model.initial_memory {initial_memory}, which is {config.initial_memory} in this"
            " model, so it says something else at the start of a text."
        )
    if config.same_length and config.same_length_extra_key:
        notes.append("The peer has no model.same_length_extra_key, so every token attends to one position less.")
    return notes


def num_segments(inputs: Mapping[str, Tensor], *kinds: str) -> int:
    """Return the number of consecutive segments in.KIND.0, in.KIND.1, ...

    Args: kinds: of inputs that each segment has.

    Raises: RequestError: no segment is given, or a segment lacks one of these inputs.
    """
    count = sum(name.startswith(f"in.{kinds[0]}.") for name in inputs)
    if not count or any(f"in.{kind}.{index}" not in inputs for index in range(count) for kind in kinds):
        needed = " with ".join(f"in.{kind}.S" for kind in kinds)
        raise RequestError(f"segments {needed}, S = 0, 1, ..., are needed; got {sorted(inputs)}.")
    return count


def by_cluster(losses: Tensor, targets: Tensor, cutoffs: Iterable[int]) -> Tensor:
    """Return losses in the peers' order: the shortlist's first, then cluster by cluster, in the tensor's shape."""
    edges = torch.tensor(list(cutoffs), dtype=targets.dtype, device=targets.device)
    order = torch.bucketize(targets.flatten().contiguous(), edges, right=True).argsort(stable=True)
    return losses.flatten()[order].view_as(losses)


def tied_projections(tied: Sequence[bool], sizes: Mapping[str, Any]) -> tuple[bool, ...]:
    """Convert a peer's list to our form: of full length, and empty if nothing is tied or there is nothing to tie.

    Args: sizes: of `sizes_of`.
    """
    cutoffs, exist = sizes["cutoffs"], sizes["div_value"] > 1 or sizes["d_embed"] != sizes["d_model"]
    full = (*map(bool, tied), *[False] * (len(cutoffs) + 1))[: len(cutoffs) + 1]
    return full if exist and any(full) else ()


class TransfoXL(Peer):
    """The language model on consecutive segments in.ids.0, in.ids.1, ..., with the memory passed on.

    `mems` in the config is `default`, or `empty` to begin without a memory.
    """

    name = "TransfoXL"
    kinds = ("hf_transfo_xl",)
    origin = "transformers TransfoXL"
    options: ClassVar[Options] = {
        "model_type": "transfo-xl",
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
        "tie_projs": list[bool] | None,
        "tie_word_embeddings": True,
        "untie_r": True,
        "dropout": 0.1,
        "dropatt": 0.0,
        "layer_norm_epsilon": 1e-5,
        "attn_type": 0,
    }
    ignores_others = True
    holds: ClassVar[Holds] = {**TRANSFORMER_XL, "attention": ("relative",), "ext_len": (0,)}
    head = r"crit\."
    unused = r".*pos_emb\.inv_freq"

    @classmethod
    def config_of(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TransformerXLConfig:
        if options["attn_type"] != 0:
            raise ConfigError(f"attn_type is {options['attn_type']}; TransfoXL itself knows 0 alone.")
        sizes = sizes_of(options)
        # A config that the peer saved has `tie_projs`, which takes precedence over the shorter option.
        tied = options["tie_projs"]
        if tied is None:
            tied = [False, *[options["proj_share_all_but_first"]] * len(sizes["cutoffs"])]
        return TransformerXLConfig(
            vocab_size=options["vocab_size"],
            **sizes,
            norm_position="pre" if options["pre_lnorm"] else "post",
            initial_memory="empty" if options["pre_lnorm"] else "zeros",
            norm_eps=options["layer_norm_epsilon"],
            share_biases=not options["untie_r"],
            clamp_len=options["clamp_len"] if options["clamp_len"] > 0 else None,
            tie_embeddings=options["tie_word_embeddings"],
            tie_projections=tied_projections(tied, sizes),
        )

    @classmethod
    def layout_of(cls, module: LanguageModel) -> Layout:
        """See `Peer.layout_of`. Shared u and v are also parameters of the whole model."""
        biases = {"{r_w,r_r}_bias": "body.layers.0.attention.{content,position}_bias"}
        every = {"layers.*.dec_attn.{r_w,r_r}_bias": "body.layers.*.attention.{content,position}_bias"}
        rows = {**biases, **every} if module.config.share_biases else every
        named = {f"transformer.{peer}": ours for peer, ours in rows.items()}
        return {**layout_of_body(module.config, "transformer."), **HEAD, "crit.cluster_*": "head.cluster_*", **named}

    @classmethod
    def notes_of_import(cls, options: Mapping[str, Any], config: TransformerXLConfig) -> list[str]:
        if config.norm_position != "pre" or not config.memory_len:
            return []
        return [
            "With pre_lnorm the peer attends to a memory of zeros before the first segment, the converted model to"
            " none, so it says something else at the start of a text."
        ]

    @classmethod
    def notes_of_export(cls, config: TransformerXLConfig) -> list[str]:
        return notes_of_export(config, "zeros")

    @classmethod
    def describe(cls, module: LanguageModel) -> dict[str, Any]:
        config = module.config
        cls.check(config)
        no_limit = "clamp_len 0, which it treats as no limit"
        cls.refuse({config.uneven_heads: config.uneven_heads, no_limit: config.clamp_len == 0})
        tied = list(config.tie_projections) or [False] * (len(config.cutoffs) + 1)
        return {
            "vocab_size": config.vocab_size,
            **options_of_sizes(config),
            "pre_lnorm": config.norm_position == "pre",
            "clamp_len": -1 if config.clamp_len is None else config.clamp_len,
            "proj_share_all_but_first": all(tied[1:]) and not tied[0],
            "tie_projs": tied,
            "tie_word_embeddings": config.tie_embeddings,
            "untie_r": not config.share_biases,
            "layer_norm_epsilon": config.norm_eps,
        }

    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        count = num_segments(inputs, "ids")
        state = self.first_memory(inputs["in.ids.0"].shape[0])
        answer: dict[str, Tensor] = {}
        for index in range(count):
            wants_grads = bool(self.config.get("grads")) and index == count - 1
            with torch.set_grad_enabled(wants_grads):
                state = self._segment(index, inputs, state, answer, wants_grads)
        return answer

    def first_memory(self, rows: int) -> XLState:
        """Return the memory of the peer's first call: zeros everywhere, or with `mems: empty` nothing."""
        config = self.module.config
        columns = 0 if self.config.get("mems", "default") == "empty" else config.memory_len
        zeros = next(self.module.parameters()).new_zeros(rows, columns, config.d_model)
        return XLState(
            memory=LayerInputs((zeros,) * config.num_layers, lengths=torch.full((rows,), columns)),
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
                answer |= self.gradients(nll.mean())
        if ids.shape[1] > 1:
            losses = -log_probs[:, :-1].gather(2, ids[:, 1:, None])[..., 0].detach()
            answer[f"out.losses_in_token_order.{index}"] = losses
            answer[f"out.losses_as_returned.{index}"] = by_cluster(losses, ids[:, 1:], self.module.config.cutoffs)
        return state
