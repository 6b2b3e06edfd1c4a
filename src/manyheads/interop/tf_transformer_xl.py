"""The original TensorFlow code of Transformer-XL (kimiyoung/transformer-xl, folder `tf`), in which the paper's models
were published.

Differs from the PyTorch original and from our defaults; the config names each of them:
- layer norms have epsilon 1e-12 (`norm_eps`);
- the memory begins with memory_len zero vectors, to which queries attend (`initial_memory: zeros`);
- with same_length a query attends to memory_len + 1 positions, including itself (`same_length_extra_key`).

Kernels and projections are stored as (in, out). Tables are always shared by embedding and softmax, projections may be.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.table import build_model
from manyheads.architectures.transformer_xl.config import TransformerXLConfig
from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.interop.names import Pair, import_weights, pick
from manyheads.interop.xl_weights import check_fits
from manyheads.nn.heads.adaptive import AdaptiveHead
from manyheads.nn.heads.linear import LinearHead

__all__ = ["TensorFlowXL", "from_peer", "is_weight", "matches", "options_of_checkpoint", "read_config"]

_FLAGS: dict[str, Any] = {
    "n_layer": ...,
    "d_model": ...,
    "d_embed": ...,
    "n_head": ...,
    "d_head": ...,
    "d_inner": ...,
    "untie_r": False,
    "div_val": 1,
    "proj_share_all_but_first": False,
    "proj_same_dim": True,
    "dropout": 0.0,
    "dropatt": 0.0,
    "tgt_len": 70,
    "mem_len": 70,
    "same_length": False,
    "clamp_len": -1,
}
"""The flags of `train_gpu.py` that describe the model, with its defaults."""
_READING = {
    "enwik8": {"tgt_len": 128, "mem_len": 3800, "clamp_len": 1000, "same_length": True},
    "text8": {"tgt_len": 128, "mem_len": 3800, "clamp_len": 1000, "same_length": True},
    "wt103": {"tgt_len": 128, "mem_len": 1600, "clamp_len": 1000, "same_length": True},
    "lm1b": {"tgt_len": 32, "mem_len": 128, "clamp_len": -1, "same_length": True},
}
"""The settings with which the original evaluates its published models, by the dataset in corpus-info.json."""
_NORM_EPS = 1e-12
_NO_WEIGHT = re.compile(r"(/Adam(_1)?|(^|/)beta[12]_power|(^|/)global_step)$")


class TensorFlowXL:
    """The language model; see `protocols.Wrapper`."""

    def __init__(self, module: LanguageModel) -> None:
        self.module = module

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `protocols.Wrapper.run`: consecutive segments in.ids.0, in.ids.1, ..., with in.target.S, batch-first."""
        count = sum(name.startswith("in.ids.") for name in inputs)
        wanted = [f"in.{kind}.{i}" for i in range(count) for kind in ("ids", "target")]
        if not count or any(name not in inputs for name in wanted):
            raise RequestError(f"segments in.ids.S with in.target.S, S = 0, 1, ..., are needed; got {sorted(inputs)}.")
        body, head = self.module.body, self.module.head
        logits = "head_logits" if self.module.config.cutoffs else "logits"
        state = self.module.start(inputs["in.ids.0"].shape[0], projected=False)
        answer: dict[str, Tensor] = {}
        with torch.no_grad():
            for i in range(count):
                hidden, state = body(inputs[f"in.ids.{i}"], None, state)
                log_probs = head.log_probs(hidden)
                nll = -log_probs.gather(2, inputs[f"in.target.{i}"][..., None])[..., 0]
                answer |= {f"out.hidden.{i}": hidden, f"out.logprobs.{i}": log_probs, f"out.nll.{i}": nll}
                answer |= {f"out.loss.{i}": nll.mean()[None], f"out.{logits}.{i}": _first_logits(self.module, hidden)}
                answer |= {f"out.mems.{i}.{layer}": memory for layer, memory in enumerate(state.memory.layers)}
        return answer


def _first_logits(module: LanguageModel, hidden: Tensor) -> Tensor:
    """Return the logits of all tokens, or with clusters those of the shortlist and of the other clusters."""
    head = module.head
    if isinstance(head, LinearHead):
        return F.linear(hidden, head.weight, head.bias)
    assert isinstance(head, AdaptiveHead)
    shortlist = head.clusters.sizes[0]
    table, bias = head.tables[0][:shortlist], head.biases[0][:shortlist]
    if head.cluster_weight is not None and head.cluster_bias is not None:
        table, bias = torch.cat([table, head.cluster_weight]), torch.cat([bias, head.cluster_bias])
    projected = hidden if head.projections is None else hidden @ head.projections[0]
    return F.linear(projected, table, bias)


def matches(meta: Mapping[str, Any]) -> bool:
    """See `protocols.Loader.matches`."""
    return bool(meta.get("kind") == "txl_tf")


def from_peer(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> TensorFlowXL:
    """See `protocols.Loader.from_peer`.

    Args:
        config: the flags of the original under `flags`, and the content of corpus-info.json under `corpus_info`.
        state_dict: the variables of a checkpoint; what an optimiser keeps is ignored.
    """
    ours = read_config(config)
    weights = {name: tensor for name, tensor in state_dict.items() if is_weight(name)}
    check_fits(ours, weights)
    module = build_model(ours)
    prepared = _prepared(weights, ours)
    import_weights(module, prepared, _pairs(ours))
    return TensorFlowXL(module.eval())


def is_weight(name: str) -> bool:
    """Whether a variable belongs to the model, and not to its optimiser or to the count of steps."""
    return not _NO_WEIGHT.search(name)


def read_config(config: Mapping[str, Any]) -> TransformerXLConfig:
    """Return our config from the original's flags and its corpus-info.json.

    Raises: ConfigError: an unknown flag, or a value of the wrong type or out of range.
    """
    flags, corpus = config.get("flags"), config.get("corpus_info")
    if not isinstance(flags, Mapping) or not isinstance(corpus, Mapping):
        raise ConfigError("the config must hold the original's flags under 'flags', corpus-info.json in 'corpus_info'.")
    peer = pick({name: value for name, value in flags.items() if name != "eval_batch_size"}, _FLAGS, "train_gpu.py")
    for name, value in peer.items():
        kind: type = int if _FLAGS[name] is ... else type(_FLAGS[name])
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ConfigError(f"the flag {name} is {value!r}; it must be of type {kind.__name__}.")
    cutoffs = _inner_cutoffs(corpus)
    clusters = len(cutoffs) + 1
    projects = peer["div_val"] > 1 or peer["d_embed"] != peer["d_model"]
    tied: tuple[bool, ...] = ()
    if projects and not cutoffs:
        tied = (True,)  # without clusters the softmax uses the embedding's projection
    elif projects and peer["proj_share_all_but_first"]:
        tied = (False, *[True] * (clusters - 1))
    return TransformerXLConfig(
        vocab_size=_whole(corpus, "vocab_size"),
        d_model=peer["d_model"],
        num_heads=peer["n_head"],
        head_dim=peer["d_head"],
        d_ff=peer["d_inner"],
        num_layers=peer["n_layer"],
        d_embed=peer["d_embed"],
        cutoffs=cutoffs,
        div_value=peer["div_val"],
        dropout=float(peer["dropout"]),
        attention_dropout=float(peer["dropatt"]),
        norm_eps=_NORM_EPS,
        share_biases=not peer["untie_r"],
        memory_len=peer["mem_len"],
        clamp_len=peer["clamp_len"] if peer["clamp_len"] > 0 else None,
        same_length=peer["same_length"],
        same_length_extra_key=peer["same_length"],
        initial_memory="zeros",
        tie_projections=tied,
    )


def _inner_cutoffs(corpus: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the cutoffs between clusters; corpus-info.json has 0 before them and the vocabulary's size behind them."""
    cutoffs, vocab_size = corpus.get("cutoffs", []), _whole(corpus, "vocab_size")
    if not isinstance(cutoffs, list) or any(type(one) is not int for one in cutoffs):
        raise ConfigError(f"cutoffs is {cutoffs!r} in the corpus info; it must be a list of whole numbers.")
    if cutoffs and (len(cutoffs) < 3 or cutoffs[0] != 0 or cutoffs[-1] != vocab_size):
        raise ConfigError(f"cutoffs is {cutoffs} in the corpus info; it must go from 0 to vocab_size {vocab_size}.")
    return tuple(cutoffs[1:-1])


def _whole(corpus: Mapping[str, Any], name: str) -> int:
    value = corpus.get(name)
    if type(value) is not int:
        raise ConfigError(f"{name} is {value!r} in the corpus info; it must be a whole number.")
    return value


def options_of_checkpoint(weights: Mapping[str, Tensor], corpus: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of a checkpoint from the shapes of its variables, and those of evaluation from its dataset.

    Args: weights: the variables of a model. corpus: the content of corpus-info.json.
    Raises: ModelFileError: a variable is missing, so it is no Transformer-XL. ConfigError: the dataset is none of the
        published models', so the settings of evaluation are unknown.
    """
    embed, softmax, layer = "transformer/adaptive_embed", "transformer/adaptive_softmax", "transformer/layer_0"

    def shape(name: str, dimensions: tuple[int, ...]) -> tuple[int, ...]:
        tensor = weights.get(name)
        if tensor is None or tensor.dim() not in dimensions:
            state = "is missing" if tensor is None else f"has {tensor.dim()} dimensions"
            raise ModelFileError(f"{name} {state}; this is no checkpoint of the original Transformer-XL.")
        return tuple(tensor.shape)

    has_tables = f"{embed}/cutoff_0/lookup_table" in weights
    width = shape(f"{embed}/cutoff_0/lookup_table" if has_tables else f"{embed}/lookup_table", (2,))[1]
    d_inner, d_model = shape(f"{layer}/ff/layer_2/kernel", (2,))
    biases = shape("transformer/r_w_bias", (2, 3))
    dataset = corpus.get("dataset")
    if dataset not in _READING:
        known = ", ".join(_READING)
        raise ConfigError(
            f"the dataset in corpus-info.json is {dataset!r}, not one of {known}, so memory and segment length are"
            " unknown; add a config.json with the training's 'flags' and 'corpus_info'."
        )
    return {
        "n_layer": sum(bool(re.fullmatch(r"transformer/layer_\d+/rel_attn/o/kernel", name)) for name in weights),
        "d_model": d_model,
        "d_embed": width,
        "n_head": biases[-2],
        "d_head": biases[-1],
        "d_inner": d_inner,
        "untie_r": len(biases) == 3,
        "div_val": width // shape(f"{embed}/cutoff_1/lookup_table", (2,))[1] if has_tables else 1,
        "proj_share_all_but_first": not any(f"{softmax}/cutoff_{i}/proj" in weights for i in range(1, 1000)),
        "proj_same_dim": not has_tables or f"{embed}/cutoff_0/proj_W" in weights,
        **_READING[dataset],
    }


def _prepared(weights: Mapping[str, Tensor], config: TransformerXLConfig) -> dict[str, Tensor]:
    """Return the variables in our layout: (out, in), u and v by layer, one bias for one table, and no projection left
    out: `proj_same_dim: false` leaves out those from d_model to d_model, for which an identity is exact.
    """
    prepared: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith(("/kernel", "/proj", "/proj_W")):
            if tensor.dim() != 2:
                raise ModelFileError(f"{name} has {tensor.dim()} dimensions; a matrix is needed.")
            prepared[name] = tensor.t()
        elif name in ("transformer/r_w_bias", "transformer/r_r_bias") and not config.share_biases:
            if tensor.dim() != 3:
                raise ModelFileError(f"{name} has {tensor.dim()} dimensions; with untie_r 3 are needed.")
            prepared |= {f"{name}/{i}": one for i, one in enumerate(tensor)}
        else:
            prepared[name] = tensor
    softmax, clusters = "transformer/adaptive_softmax", len(config.cutoffs) + 1
    if config.cutoffs and config.div_value == 1:
        parts = [prepared.pop(f"{softmax}/cutoff_{i}/b", None) for i in range(clusters)]
        if any(part is None or part.dim() != 1 for part in parts):
            raise ModelFileError(f"{softmax}/cutoff_0/b to cutoff_{clusters - 1}/b must be there, with one dimension.")
        prepared[f"{softmax}/b"] = torch.cat([part for part in parts if part is not None])
    if config.has_projections and config.embedding_dim == config.d_model:
        identity = torch.eye(config.d_model)
        if config.div_value > 1:
            prepared.setdefault("transformer/adaptive_embed/cutoff_0/proj_W", identity)
        if config.cutoffs and not (config.tie_projections and config.tie_projections[0]):
            prepared.setdefault(f"{softmax}/cutoff_0/proj", identity)
    return prepared


def _pairs(config: TransformerXLConfig) -> list[Pair]:
    """Return the names of `_prepared`, and our parameters that they fill."""
    embed, softmax = "transformer/adaptive_embed", "transformer/adaptive_softmax"
    clusters = len(config.cutoffs) + 1
    by_cluster = config.div_value > 1 and bool(config.cutoffs)
    tied = config.tie_projections or (False,) * clusters
    pairs = []
    for i in range(clusters if by_cluster else 1):
        part = f"{embed}/cutoff_{i}" if by_cluster else embed
        pairs.append(Pair(f"{part}/lookup_table", (f"body.embedding.tables.{i}",)))
        if config.has_projections:
            pairs.append(Pair(f"{part}/proj_W", (f"body.embedding.projections.{i}",)))
        bias = f"cutoff_{i}/b" if by_cluster else "b" if config.cutoffs else "bias"
        adaptive = f"head.biases.{i}" if config.has_adaptive_softmax else "head.bias"
        pairs.append(Pair(f"{softmax}/{bias}", (adaptive,)))
    if config.cutoffs:
        pairs.append(Pair(f"{softmax}/cutoff_0/cluster_W", ("head.cluster_weight",)))
        pairs.append(Pair(f"{softmax}/cutoff_0/cluster_b", ("head.cluster_bias",)))
        if config.has_projections:
            pairs += [
                Pair(f"{softmax}/cutoff_{i}/proj", (f"head.projections.{i}",)) for i in range(clusters) if not tied[i]
            ]
    for i in range(config.num_layers):
        theirs, ours = f"transformer/layer_{i}", f"body.layers.{i}"
        attention = f"{ours}.attention"
        qkv = tuple(f"{attention}.{name}_proj.weight" for name in "qkv")
        pairs += [
            Pair(f"{theirs}/rel_attn/qkv/kernel", qkv),
            Pair(f"{theirs}/rel_attn/r/kernel", (f"{attention}.position_proj.weight",)),
            Pair(f"{theirs}/rel_attn/o/kernel", (f"{attention}.out_proj.weight",)),
        ]
        for name, part in (("rel_attn", "attention"), ("ff", "feed_forward")):
            pairs += [
                Pair(f"{theirs}/{name}/LayerNorm/gamma", (f"{ours}.{part}_residual.norm.weight",)),
                Pair(f"{theirs}/{name}/LayerNorm/beta", (f"{ours}.{part}_residual.norm.bias",)),
            ]
        for name, part in (("layer_1", "in_proj"), ("layer_2", "out_proj")):
            pairs += [
                Pair(f"{theirs}/ff/{name}/kernel", (f"{ours}.feed_forward.{part}.weight",)),
                Pair(f"{theirs}/ff/{name}/bias", (f"{ours}.feed_forward.{part}.bias",)),
            ]
        if not config.share_biases or i == 0:
            layer = "" if config.share_biases else f"/{i}"
            pairs += [
                Pair(f"transformer/r_w_bias{layer}", (f"{attention}.content_bias",)),
                Pair(f"transformer/r_r_bias{layer}", (f"{attention}.position_bias",)),
            ]
    return pairs
