"""Common code for the other implementations of Transformer-XL: options, names of weights, the order of losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyheads.errors import RequestError

if TYPE_CHECKING:
    from manyheads.extras.peers.layout import Layout
    from manyheads.models.transformer_xl.config import TransformerXLConfig

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
