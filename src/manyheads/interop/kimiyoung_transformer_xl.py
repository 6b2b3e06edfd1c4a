"""MemTransformerLM, the original PyTorch code of Transformer-XL (kimiyoung/transformer-xl).

Differs from ours, which the wrapper reproduces from outside on the memory between calls:
- attention types 2 and 3 add positions in place to the memory, again in each call;
- the window of the memory is computed with two swapped arguments, which matters with `ext_len`;
- under pre-norm, types 2 and 3 do not normalise queries;
- losses are grouped by cluster, and the i-th row from the end belongs to cluster i;
- the last layer's output is also stored, although nothing reads it; time is the first axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.table import build_model
from manyheads.architectures.transformer_xl.config import AttentionKind, TransformerXLConfig
from manyheads.architectures.transformer_xl.layers import AbsoluteLayer
from manyheads.architectures.transformer_xl.model import TransformerXL, distances_back
from manyheads.architectures.transformer_xl.state import LayerInputs, XLState
from manyheads.errors import ConfigError, ModelFileError, RequestError
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

__all__ = ["OfficialTransformerXL", "from_peer", "matches", "options_of_module", "read_config", "to_peer"]

_KINDS: tuple[AttentionKind, ...] = ("relative", "relative_learned", "absolute", "absolute_learned")
_OPTIONS: dict[str, Any] = {
    "n_token": ...,
    "n_layer": ...,
    "n_head": ...,
    "d_model": ...,
    "d_head": ...,
    "d_inner": ...,
    "dropout": 0.0,
    "dropatt": 0.0,
    "tie_weight": True,
    "d_embed": None,
    "div_val": 1,
    "tie_projs": [False],
    "pre_lnorm": False,
    "tgt_len": 0,
    "ext_len": 0,
    "mem_len": 0,
    "cutoffs": [],
    "adapt_inp": False,
    "same_length": False,
    "attn_type": 0,
    "clamp_len": -1,
    "sample_softmax": -1,
}
"""The constructor's arguments."""


class OfficialTransformerXL:
    """The language model; see `protocols.Wrapper`. config: the fixture's."""

    def __init__(self, module: LanguageModel, config: Mapping[str, Any]) -> None:
        self.module = module
        self.config = config
        self.options = pick(config["model"], _OPTIONS, "MemTransformerLM")

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `protocols.Wrapper.run`: consecutive segments in.data.0, in.data.1, ..., time-first."""
        count = sum(name.startswith("in.data.") for name in inputs)
        wanted = [f"in.{kind}.{i}" for i in range(count) for kind in ("data", "target")]
        if not count or any(name not in inputs for name in wanted):
            raise RequestError(f"segments in.data.S with in.target.S, S = 0, 1, ..., are needed; got {sorted(inputs)}.")
        memories: list[Tensor] | None = None
        answer: dict[str, Tensor] = {}
        with self._raw_queries():
            for index in range(count):
                wants_grads = bool(self.config.get("grads")) and index == count - 1
                with torch.set_grad_enabled(wants_grads):
                    memories = self._segment(index, inputs, memories, answer, wants_grads)
        return answer

    def _segment(
        self,
        index: int,
        inputs: Mapping[str, Tensor],
        memories: list[Tensor] | None,
        answer: dict[str, Tensor],
        wants_grads: bool,
    ) -> list[Tensor]:
        """Reproduce one call of the peer. memories: its previous `mems`, time-first. Returns: its next ones."""
        data, target = inputs[f"in.data.{index}"], inputs[f"in.target.{index}"]
        body, config = cast(TransformerXL, self.module.body), self.module.config
        if memories is None:
            like = next(body.parameters())
            memories = [like.new_zeros(0, data.shape[1], config.d_model)] * (config.num_layers + 1)
        state = XLState(
            memory=LayerInputs(tuple(memory.transpose(0, 1) for memory in memories[:-1])),
            lengths=torch.full((data.shape[1],), memories[0].shape[0]),
            attending=config.attending,
        )
        hidden = [one.transpose(0, 1) for one in body.hidden_states(data.t(), None, state)]
        scored = hidden[-1][-target.shape[0] :]
        losses = self.module.head.token_losses(scored.flatten(0, 1), target.flatten()).view(target.shape)
        answer[f"out.hidden.{index}"] = hidden[-1].detach()
        answer[f"out.loss_in_token_order.{index}"] = losses.detach()
        answer[f"out.loss.{index}"] = by_cluster(losses.detach(), target, config.cutoffs)
        if wants_grads:
            found = gradients(self.module, losses.mean(), _names(config))
            answer |= {f"grad.{name}": grad for name, grad in _peer_order(found, config).items()}
        with torch.no_grad():
            memories = self._next_memories(memories, [one.detach() for one in hidden])
        if config.memory_len:
            answer |= {f"out.mems.{index}.{layer}": memory for layer, memory in enumerate(memories)}
        return memories

    def _next_memories(self, old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
        """Return the peer's memory, with its in-place positions and its window."""
        mlen, qlen = old[0].shape[0], new[0].shape[0]
        ext_len, mem_len = self.options["ext_len"] or 0, self.module.config.memory_len
        if self.config.get("update_mems_arguments_swapped_back"):
            end = mlen + max(0, qlen - ext_len)
        else:
            end = qlen + max(0, mlen - ext_len)
        begin = max(0, end - mem_len)
        seen = [torch.cat(both) for both in zip(old, new, strict=True)]
        piled = [
            one if places is None else one + places[:, None]
            for one, places in zip(seen, self._positions(mlen + qlen, seen[0]), strict=True)
        ]
        return [one[begin:end] for one in piled]

    def _positions(self, k_len: int, like: Tensor) -> list[Tensor | None]:
        """Return the positions that the peer adds to memory and input of each layer, (k_len, d_model), and to the last
        output.
        """
        body, config = cast(TransformerXL, self.module.body), self.module.config
        distances = distances_back(k_len, config.clamp_len, like.device)
        nothing: list[Tensor | None] = [None] * (config.num_layers + 1)
        if config.attention == "absolute":
            assert body.encoding is not None
            nothing[0] = body.encoding(distances, k_len - 1).to(like.dtype)
        if config.attention == "absolute_learned":
            rows = distances.clamp(max=config.max_len - 1)
            return [cast(Tensor, cast(AbsoluteLayer, layer).positions)[rows] for layer in body.layers] + [None]
        return nothing

    @contextmanager
    def _raw_queries(self) -> Iterator[None]:
        """Within the block, project queries without normalisation, as in types 2 and 3 with pre-norm."""
        config = self.module.config
        if config.norm_position != "pre" or config.attention.startswith("relative"):
            yield
            return
        with ExitStack() as stack:
            for layer in cast(TransformerXL, self.module.body).layers:
                raw: list[Tensor] = []

                def note(_: nn.Module, arguments: Any, raw: list[Tensor] = raw) -> None:
                    raw[:] = arguments[:1]

                def replace(_: nn.Module, arguments: Any, raw: list[Tensor] = raw) -> Any:
                    return (*raw, *arguments[1:])

                own = cast(AbsoluteLayer, layer)
                for handle in (
                    own.attention_residual.register_forward_pre_hook(note),
                    own.attention.register_forward_pre_hook(replace),
                ):
                    stack.callback(handle.remove)
            yield


def matches(meta: Mapping[str, Any]) -> bool:
    """See `protocols.Loader.matches`."""
    if "kind" in meta:
        return bool(meta["kind"] == "txl_official")
    return str(meta.get("peer", "")).startswith("kimiyoung/transformer-xl pytorch/mem_transformer")


def from_peer(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> OfficialTransformerXL:
    """See `protocols.Loader.from_peer`.

    Args: config: MemTransformerLM's arguments under `model`; `update_mems_arguments_swapped_back`: compute the memory's
        window as the code's comment describes, not as the published code does.
    """
    if not isinstance(config.get("model"), Mapping):
        raise ConfigError("the config must hold MemTransformerLM's arguments under 'model'.")
    ours = read_config(config["model"])
    check_fits(ours, state_dict)
    module = build_model(ours)
    import_xl(module, _our_order(state_dict, ours), _names(ours))
    return OfficialTransformerXL(module.eval(), config)


def read_config(options: Mapping[str, Any]) -> TransformerXLConfig:
    """Our config from the constructor's arguments.

    Raises: ConfigError: an argument of the wrong type or out of range, or one that the published code cannot run with.
    """
    peer = pick(options, _OPTIONS, "MemTransformerLM")
    _check_types(peer)
    kind = _KINDS[peer["attn_type"]] if 0 <= peer["attn_type"] < 4 else None
    if kind is None:
        raise ConfigError(f"attn_type is {peer['attn_type']}; MemTransformerLM knows 0, 1, 2 and 3.")
    if peer["sample_softmax"] > 0:
        raise ConfigError("sample_softmax is on; neither MemTransformerLM nor our model can be built with it.")
    d_embed, cutoffs = peer["d_embed"] or peer["d_model"], tuple(peer["cutoffs"])
    # Larger distances count as clamp_len; for trained distances (type 1) the peer keeps clamp_len rows.
    clamp_len = {"relative_learned": peer["clamp_len"] - 1, "absolute_learned": None}.get(kind, peer["clamp_len"])
    return TransformerXLConfig(
        vocab_size=peer["n_token"],
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
        attention=kind,
        norm_position="pre" if peer["pre_lnorm"] else "post",
        max_len=max(1, sum(peer[name] or 0 for name in ("tgt_len", "ext_len", "mem_len"))),
        memory_len=peer["mem_len"] or 0,
        clamp_len=clamp_len if peer["clamp_len"] > 0 else None,
        same_length=peer["same_length"],
        ext_len=peer["ext_len"] or 0,
        tie_embeddings=peer["tie_weight"],
        tie_projections=tied_projections(
            peer["tie_projs"], cutoffs, exist=peer["div_val"] > 1 or d_embed != peer["d_model"]
        ),
    )


def options_of_module(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the constructor's arguments of a module that was saved whole, as by the official training script.

    Args:
        settings: the attributes of the module and its parts, by dotted name; see `legacy_pickle.Saved`.
        tensors: its state dict; equal tensors were tied.

    Raises: ModelFileError: an attribute is missing, so this is not a MemTransformerLM.
    """
    where = {name: name for name in ("n_token", "n_layer", "n_head", "d_model", "d_head", "d_embed", "attn_type")}
    where |= {name: name for name in ("tgt_len", "ext_len", "mem_len", "same_length", "clamp_len")}
    where |= {
        "d_inner": "layers.0.pos_ff.d_inner",
        "pre_lnorm": "layers.0.dec_attn.pre_lnorm",
        "dropout": "drop.p",
        "dropatt": "layers.0.dec_attn.dropatt.p",
        "div_val": "word_emb.div_val",
        "cutoffs": "word_emb.cutoffs",
    }
    missing = sorted(name for name in where.values() if name not in settings)
    if missing:
        raise ModelFileError(
            f"the saved module has no {missing[0]}; it is not a MemTransformerLM that was saved whole."
        )
    options = {name: settings[place] for name, place in where.items()}
    if not isinstance(options["cutoffs"], list):
        raise ModelFileError(f"the saved module's cutoffs are {options['cutoffs']!r}; they must be a list.")
    options["cutoffs"] = options["cutoffs"][:-1]  # the peer appends the vocabulary's size

    def is_same(one: str, other: str) -> bool:
        return one in tensors and other in tensors and torch.equal(tensors[one], tensors[other])

    by_cluster_table = options["div_val"] != 1
    options["tie_weight"] = is_same("word_emb.emb_layers.0.weight", "crit.out_layers.0.weight")
    options["tie_projs"] = [
        is_same(f"word_emb.emb_projs.{i if by_cluster_table else 0}", f"crit.out_projs.{i}")
        for i in range(len(options["cutoffs"]) + 1)
    ]
    return options


def to_peer(module: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The inverse of `from_peer`: the constructor's arguments (under `model`) and the state dict.

    `tgt_len` is max_len minus memory and context, because their sum is the size of the peer's tables.
    Raises: ConfigError: the peer does not support one of the options.
    """
    config = module.config
    if config.norm_eps != 1e-5:
        raise ConfigError(f"MemTransformerLM cannot hold a model with norm_eps {config.norm_eps}; it has 1e-5.")
    if config.attention == "absolute_learned" and config.num_heads * config.width_of_heads != config.d_model:
        raise ConfigError("MemTransformerLM holds trained positions in heads, so head_dim must be d_model / num_heads.")
    if config.attention == "relative" and not config.share_biases and config.num_layers > 1:
        raise ConfigError("MemTransformerLM cannot hold a model with share_biases false and relative attention.")
    learned = config.attention.endswith("learned")
    tgt_len = config.max_len - config.memory_len - config.ext_len if learned else 0
    if tgt_len < 0:
        raise ConfigError(
            f"MemTransformerLM cannot hold a model with max_len {config.max_len}, below memory_len {config.memory_len}"
            f" and ext_len {config.ext_len} together."
        )
    clamp_len = -1 if config.clamp_len is None else config.clamp_len + (config.attention == "relative_learned")
    if clamp_len == 0 or (config.attention == "absolute_learned" and clamp_len > 0):
        raise ConfigError(
            f"MemTransformerLM cannot hold a model with clamp_len {config.clamp_len} and {config.attention} attention."
        )
    options = {
        "n_token": config.vocab_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "d_model": config.d_model,
        "d_head": config.width_of_heads,
        "d_inner": config.d_ff,
        "dropout": config.dropout,
        "dropatt": config.attention_dropout,
        "tie_weight": config.tie_embeddings,
        "d_embed": config.embedding_dim,
        "div_val": config.div_value,
        "tie_projs": list(config.tie_projections or (False,)),
        "pre_lnorm": config.norm_position == "pre",
        "tgt_len": tgt_len,
        "ext_len": config.ext_len,
        "mem_len": config.memory_len,
        "cutoffs": list(config.cutoffs),
        "same_length": config.same_length,
        "attn_type": _KINDS.index(config.attention),
        "clamp_len": clamp_len,
    }
    return {"model": options}, _peer_order(export_xl(module, _names(config)), config)


def _check_types(peer: Mapping[str, Any]) -> None:
    optional = ("d_embed", "tgt_len", "ext_len", "mem_len")
    for name, default in _OPTIONS.items():
        value = peer[name]
        kind = int if default is ... or default is None else type(default)
        fits = type(value) is kind or (kind is float and type(value) is int) or (value is None and name in optional)
        if kind is list:
            inner = bool if name == "tie_projs" else int
            fits = isinstance(value, list | tuple) and all(type(one) is inner for one in value)
        if not fits:
            raise ConfigError(f"{name} is {value!r} in MemTransformerLM's config; it must be of type {kind.__name__}.")


_STACKED = {"r_w_bias": "content_bias", "r_emb": "distance_embedding", "r_bias": "distance_bias"}
"""The peer's parameters with an axis of layers (types 1 and 3), and ours in a layer's attention."""


def _names(config: TransformerXLConfig) -> XLNames:
    """Return the names, with a separate parameter for each layer instead of stacked ones."""
    layers = range(config.num_layers)
    pairs: list[Pair] = []
    if config.attention == "relative":
        biases = {"r_w_bias": "content_bias", "r_r_bias": "position_bias"}
        pairs = [Pair(peer, (f"body.layers.0.attention.{ours}",)) for peer, ours in biases.items()]
    elif config.attention == "relative_learned":
        pairs = [
            Pair(f"{peer}.{i}", (f"body.layers.{i}.attention.{ours}",))
            for peer, ours in _STACKED.items()
            for i in layers
        ]
    elif config.attention == "absolute_learned":
        pairs = [Pair(f"r_emb.{i}", (f"body.layers.{i}.positions",)) for i in layers]
    return XLNames("", tuple(pairs))


def _our_order(state_dict: Mapping[str, Tensor], config: TransformerXLConfig) -> dict[str, Tensor]:
    """Return the peer's tensors with clusters in order, and trained positions per layer by increasing distance."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if name in ("crit.cluster_weight", "crit.cluster_bias"):
            tensors[name] = tensor.flip(0)
        elif name in _STACKED and config.attention.endswith("learned"):
            for i, one in enumerate(tensor):
                one = one if name == "r_w_bias" else one.flip(0)
                tensors[f"{name}.{i}"] = one.flatten(1) if config.attention == "absolute_learned" else one
        else:
            tensors[name] = tensor
    return tensors


def _peer_order(tensors: Mapping[str, Tensor], config: TransformerXLConfig) -> dict[str, Tensor]:
    """The inverse of `_our_order`."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        stacked, _, number = name.rpartition(".")
        if stacked in _STACKED and number.isdigit():
            one = tensor if stacked == "r_w_bias" else tensor.flip(0)
            if config.attention == "absolute_learned":
                one = one.view(-1, config.num_heads, config.width_of_heads)
            stacks.setdefault(stacked, []).append(one)
        else:
            found[name] = tensor.flip(0) if name in ("crit.cluster_weight", "crit.cluster_bias") else tensor
    return found | {name: torch.stack(parts) for name, parts in stacks.items()}
