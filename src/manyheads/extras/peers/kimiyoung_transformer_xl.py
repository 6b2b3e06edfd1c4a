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
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import ConfigError, ModelFileError
from manyheads.extras.peers.peer import TRANSFORMER_XL, Holds, Layout, Options, Peer, Rule, flipped, require, stacked
from manyheads.extras.peers.transfo_xl import (
    HEAD,
    by_cluster,
    layout_of_body,
    notes_of_export,
    num_segments,
    options_of_sizes,
    sizes_of,
    tied_projections,
)
from manyheads.models.transformer_xl.config import AttentionKind, TransformerXLConfig
from manyheads.models.transformer_xl.model import AbsoluteLayer, TransformerXL, distances_back
from manyheads.models.transformer_xl.state import LayerInputs, XLState
from manyheads.nn.heads.linear import LinearHead, LogUniformCandidates

if TYPE_CHECKING:
    from pathlib import Path

    from manyheads.extras.peers.legacy_pickle import Saved
    from manyheads.models.composites import LanguageModel

_KINDS: tuple[AttentionKind, ...] = ("relative", "relative_learned", "absolute", "absolute_learned")


class OfficialTransformerXL(Peer):
    """The language model on consecutive segments in.data.0, in.data.1, ..., time-first.

    With `update_mems_arguments_swapped_back` in the config, the memory's window is computed as the code's comment
    describes, not as the published code does.
    """

    name = "MemTransformerLM"
    kinds = ("txl_official",)
    origin = "kimiyoung/transformer-xl pytorch/mem_transformer"
    options: ClassVar[Options] = {
        "n_token": int,
        "n_layer": int,
        "n_head": int,
        "d_model": int,
        "d_head": int,
        "d_inner": int,
        "dropout": 0.0,
        "dropatt": 0.0,
        "tie_weight": True,
        "d_embed": int | None,
        "div_val": 1,
        "tie_projs": [False],
        "pre_lnorm": False,
        "tgt_len": int | None,
        "ext_len": int | None,
        "mem_len": int | None,
        "cutoffs": list[int],
        "adapt_inp": False,
        "same_length": False,
        "attn_type": 0,
        "clamp_len": -1,
        "sample_softmax": -1,
    }
    holds: ClassVar[Holds] = {**TRANSFORMER_XL, "norm_eps": (1e-5,)}
    unused = r".*pos_emb\.inv_freq"

    @classmethod
    def config_of(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TransformerXLConfig:
        if not 0 <= options["attn_type"] < 4:
            raise ConfigError(f"attn_type is {options['attn_type']}; MemTransformerLM knows 0, 1, 2 and 3.")
        if options["sample_softmax"] > 0:
            raise ConfigError(
                f"sample_softmax is {options['sample_softmax']}, with which MemTransformerLM itself cannot be built;"
                " set it to -1. Training here samples candidates by training.num_sampled."
            )
        kind, clamp_len = _KINDS[options["attn_type"]], options["clamp_len"]
        # Larger distances count as clamp_len; for trained distances (type 1) the peer keeps clamp_len rows.
        limit = {"relative_learned": clamp_len - 1, "absolute_learned": None}.get(kind, clamp_len)
        sizes = sizes_of(options)
        return TransformerXLConfig(
            vocab_size=options["n_token"],
            **sizes,
            attention=kind,
            norm_position="pre" if options["pre_lnorm"] else "post",
            max_len=max(1, sum(options[name] or 0 for name in ("tgt_len", "ext_len", "mem_len"))),
            clamp_len=limit if clamp_len > 0 else None,
            ext_len=options["ext_len"] or 0,
            tie_embeddings=options["tie_weight"],
            tie_projections=tied_projections(options["tie_projs"], sizes),
        )

    @classmethod
    def layout_of(cls, module: LanguageModel) -> Layout:
        """See `Peer.layout_of`. Clusters, and the rows of trained positions, are in reverse order. Types 1 and 3 have
        one parameter for all layers.
        """
        config = module.config
        biases: dict[str, Layout] = {
            "relative": {"{r_w,r_r}_bias": "body.layers.0.attention.{content,position}_bias"},
            "relative_learned": {
                "r_w_bias": stacked("body.layers.*.attention.content_bias"),
                "r_emb": _by_distance("body.layers.*.attention.distance_embedding"),
                "r_bias": _by_distance("body.layers.*.attention.distance_bias"),
            },
            "absolute": {},
            "absolute_learned": {"r_emb": _by_distance("body.layers.*.positions", config.num_heads)},
        }
        clusters = {"crit.cluster_*": flipped("head.cluster_*")}
        return {**layout_of_body(config), **HEAD, **clusters, **biases[config.attention]}

    @classmethod
    def is_folder(cls, folder: Path) -> bool:
        return not (folder / "config.json").exists() and (folder / "model.pt").is_file()

    @classmethod
    def options_of_saved(cls, saved: Saved) -> dict[str, Any] | None:
        return options_of_module(saved.settings, saved.tensors) if saved.settings else None

    @classmethod
    def notes_of_export(cls, config: TransformerXLConfig) -> list[str]:
        return notes_of_export(config, "empty")

    @classmethod
    def describe(cls, module: LanguageModel) -> dict[str, Any]:
        """See `Peer.describe`. `tgt_len` is max_len minus memory and context, because their sum is the size of the
        peer's tables.
        """
        config = module.config
        cls.check(config)
        learned, width = config.attention.endswith("learned"), config.num_heads * config.width_of_heads
        tgt_len = config.max_len - config.memory_len - config.ext_len if learned else 0
        clamp_len = -1 if config.clamp_len is None else config.clamp_len + (config.attention == "relative_learned")
        in_heads = f"head_dim {config.head_dim} and trained positions, which need head_dim = d_model / num_heads"
        unshared = config.attention == "relative" and not config.share_biases and config.num_layers > 1
        tables = f"max_len {config.max_len}, below memory_len {config.memory_len} + ext_len {config.ext_len}"
        clamped = clamp_len == 0 or (config.attention == "absolute_learned" and clamp_len > 0)
        cls.refuse(
            {
                config.uneven_heads: config.uneven_heads,
                in_heads: config.attention == "absolute_learned" and width != config.d_model,
                "share_biases false and relative attention": unshared,
                tables: tgt_len < 0,
                f"clamp_len {config.clamp_len} and {config.attention} attention": clamped,
            }
        )
        return {
            "n_token": config.vocab_size,
            **options_of_sizes(config),
            "tie_weight": config.tie_embeddings,
            "tie_projs": list(config.tie_projections or (False,)),
            "pre_lnorm": config.norm_position == "pre",
            "tgt_len": tgt_len,
            "ext_len": config.ext_len,
            "attn_type": _KINDS.index(config.attention),
            "clamp_len": clamp_len,
        }

    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        count = num_segments(inputs, "data", "target")
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
        lengths = torch.full((data.shape[1],), memories[0].shape[0])
        memory = LayerInputs(tuple(one.transpose(0, 1) for one in memories[:-1]), lengths)
        state = XLState(memory, config.attending)
        hidden = [one.transpose(0, 1) for one in body.hidden_states(data.t(), None, state)]
        scored = hidden[-1][-target.shape[0] :]
        losses = self.module.head.token_losses(scored.flatten(0, 1), target.flatten()).view(target.shape)
        answer |= {
            f"out.hidden.{index}": hidden[-1].detach(),
            f"out.loss_in_token_order.{index}": losses.detach(),
            f"out.loss.{index}": by_cluster(losses.detach(), target, config.cutoffs),
        }
        if wants_grads:
            answer |= self.gradients(losses.mean())
        with torch.no_grad():
            memories = self._next_memories(memories, [one.detach() for one in hidden])
        if config.memory_len:
            answer |= {f"out.mems.{index}.{layer}": memory for layer, memory in enumerate(memories)}
        return memories

    def _next_memories(self, old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
        """Return the peer's memory, with its in-place positions and its window."""
        mlen, qlen = old[0].shape[0], new[0].shape[0]
        ext_len, mem_len = self.chosen["ext_len"] or 0, self.module.config.memory_len
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


def _by_distance(ours: str, heads: int = 0) -> Rule:
    """Return the rule for all layers' trained positions; with `heads`, the peer has an axis of heads."""

    def join(parts: list[Tensor]) -> Tensor:
        positions = torch.stack(parts).flip(1)
        return positions.view(*positions.shape[:2], heads, -1) if heads else positions

    def split(tensor: Tensor, _: int) -> tuple[Tensor, ...]:
        tensor = tensor.flip(1)
        return (tensor.flatten(2) if heads else tensor).unbind()

    return Rule(ours, join, split)


def options_of_module(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the constructor's arguments of a module that was saved whole, as by the official training script.

    Args:
        settings: the attributes of the module and its parts, by dotted name; see `legacy_pickle.Saved`.
        tensors: its state dict; equal tensors were tied.

    Raises: ModelFileError: an attribute is missing, so this is not a MemTransformerLM.
    """
    own = ("n_token", "n_layer", "n_head", "d_model", "d_head", "d_embed", "attn_type")
    where = {
        **{name: name for name in (*own, "tgt_len", "ext_len", "mem_len", "same_length", "clamp_len")},
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


_HIT = -1e30


class SampleLogits(Peer):
    """The sampled softmax (utils/log_uniform_sampler.py): an embedding, a bias and a sampler.

    in.hidden (T, B, d), in.labels (T, B), in.neg_samples: the ids that the peer drew. Differs from ours
    (`nn.heads.linear`): the probability of being drawn uses log1p(p) instead of -log1p(-p), so it is too low for 2
    n_sample draws with replacement; it is also subtracted from the target's logit; and a candidate that equals the
    target stays in the sum with a logit of -1e30.
    """

    name = "sample_logits"
    kinds = ("txl_sample_logits",)
    origin = "kimiyoung/transformer-xl pytorch/utils/log_uniform_sampler"
    section = None
    ignores_others = True
    options: ClassVar[Options] = {"vocab": int, "d": int, "n_sample": int}
    layout: ClassVar[Layout] = {"emb.weight": "weight", "bias": "bias"}

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> LinearHead:
        if min(options.values()) < 1:
            raise ConfigError(f"vocab, d and n_sample must be whole numbers above 0; they are {options}.")
        return LinearHead(options["d"], options["vocab"], bias=True)

    @classmethod
    def describe(cls, module: LinearHead) -> dict[str, Any]:
        """See `Peer.describe`; without n_sample, which is not a property of the weights."""
        cls.refuse({"a head without a bias": module.bias is None})
        return {"vocab": module.weight.shape[0], "d": module.weight.shape[1]}

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        hidden, labels, drawn = require(inputs, "hidden", "labels", "neg_samples")
        table, bias = self.module.weight, self.module.bias
        assert bias is not None
        dist = LogUniformCandidates(table.shape[0], 1).probabilities
        log_q = torch.log(-torch.expm1(-2 * self.chosen["n_sample"] * torch.log1p(dist)))
        log_q, dist = log_q.to(table.dtype), dist.to(table.dtype)
        true = (hidden * F.embedding(labels, table)).sum(-1) + bias[labels] - log_q[labels]
        others = hidden @ table[drawn].t() + bias[drawn] - log_q[drawn]
        others = others.masked_fill(labels[..., None] == drawn, _HIT)
        logits = torch.cat([true[..., None], others], dim=-1)
        return {
            "out.dist": dist,
            "out.log_q": log_q,
            "out.logits": logits,
            "out.loss": -torch.log_softmax(logits, dim=-1)[..., 0],
        }
