"""Common code for the two implementations of Transformer-XL: names of weights, tying, the order of losses.

Both keep a tied parameter under all of its names; a file may lack some of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.transformer_xl.config import TransformerXLConfig
from manyheads.errors import ModelFileError
from manyheads.interop.marian_weights import check_size
from manyheads.interop.names import Pair, export_weights, import_weights

__all__ = ["XLNames", "by_cluster", "check_fits", "export_xl", "gradients", "import_xl", "tied_projections"]

_INV_FREQ = "pos_emb.inv_freq"


@dataclass(frozen=True)
class XLNames:
    """The names of a peer's weights.

    prefix: before embedding and layers. bias_groups: the names of each tied u or v. more: pairs of this peer only.
    """

    prefix: str
    more: tuple[Pair, ...] = ()
    bias_groups: tuple[tuple[str, ...], ...] = ()

    def groups(self, config: TransformerXLConfig) -> list[tuple[str, ...]]:
        """Return the names of each parameter that has several; the first is the one that the peer lists."""
        found = list(self.bias_groups)
        embedding = f"{self.prefix}word_emb"
        if config.tie_embeddings:
            tables = len(config.cutoffs) + 1 if config.div_value > 1 else 1
            found += [(f"{embedding}.emb_layers.{i}.weight", f"crit.out_layers.{i}.weight") for i in range(tables)]
        tied = [i for i, is_tied in enumerate(config.tie_projections) if is_tied]
        if config.div_value > 1:
            found += [(f"{embedding}.emb_projs.{i}", f"crit.out_projs.{i}") for i in tied]
        elif tied:
            found.append((f"{embedding}.emb_projs.0", *(f"crit.out_projs.{i}" for i in tied)))
        return found

    def pairs(self, config: TransformerXLConfig) -> list[Pair]:
        """Return each parameter of the peer under its first name, and our tensors that form it."""
        aliases = {name for names in self.groups(config) for name in names[1:]}
        pairs = [*self._ends(config), *self.more]
        relative = config.attention.startswith("relative")
        fused = {
            "qkv_net" if relative else "q_net": ("q_proj", "k_proj", "v_proj") if relative else ("q_proj",),
            **({} if relative else {"kv_net": ("k_proj", "v_proj")}),
            "o_net": ("out_proj",),
            **({"r_net": ("position_proj",)} if config.attention == "relative" else {}),
        }
        for i in range(config.num_layers):
            peer, ours = f"{self.prefix}layers.{i}", f"body.layers.{i}"
            pairs += [
                Pair(f"{peer}.dec_attn.{name}.weight", tuple(f"{ours}.attention.{part}.weight" for part in parts))
                for name, parts in fused.items()
            ]
            modules = {
                "dec_attn.layer_norm": "attention_residual.norm",
                "pos_ff.CoreNet.0": "feed_forward.in_proj",
                "pos_ff.CoreNet.3": "feed_forward.out_proj",
                "pos_ff.layer_norm": "feed_forward_residual.norm",
            }
            pairs += [
                Pair(f"{peer}.{name}.{kind}", (f"{ours}.{own}.{kind}",))
                for name, own in modules.items()
                for kind in ("weight", "bias")
            ]
        return [pair for pair in pairs if pair.peer not in aliases]

    def _ends(self, config: TransformerXLConfig) -> list[Pair]:
        """Return the pairs of embedding and head."""
        clusters = len(config.cutoffs) + 1
        tables = clusters if config.div_value > 1 else 1
        has_head_of_clusters = bool(config.cutoffs) or config.has_projections
        pairs = []
        for i in range(tables):
            weight, bias = (
                (f"head.tables.{i}", f"head.biases.{i}") if has_head_of_clusters else ("head.weight", "head.bias")
            )
            pairs += [
                Pair(f"{self.prefix}word_emb.emb_layers.{i}.weight", (f"body.embedding.tables.{i}",)),
                Pair(f"crit.out_layers.{i}.weight", (weight,)),
                Pair(f"crit.out_layers.{i}.bias", (bias,)),
            ]
        if config.has_projections:
            pairs += [
                Pair(f"{self.prefix}word_emb.emb_projs.{i}", (f"body.embedding.projections.{i}",))
                for i in range(tables)
            ]
            pairs += [Pair(f"crit.out_projs.{i}", (f"head.projections.{i}",)) for i in range(clusters)]
        if config.cutoffs:
            pairs += [Pair(f"crit.cluster_{kind}", (f"head.cluster_{kind}",)) for kind in ("weight", "bias")]
        return pairs


def import_xl(module: LanguageModel, state_dict: Mapping[str, Tensor], names: XLNames) -> None:
    """Copy a peer's weights into our module.

    Raises: ModelFileError: names or shapes do not match, or two tensors differ that should be one parameter.
    """
    weights = {name: tensor for name, tensor in state_dict.items() if not name.endswith(_INV_FREQ)}
    for group in names.groups(module.config):
        found = {name: weights.pop(name) for name in group if name in weights}
        for name, tensor in found.items():
            first = next(iter(found))
            if tensor.shape != found[first].shape or not torch.equal(tensor, found[first]):
                raise ModelFileError(f"{first} and {name} differ, but the config says that they are one parameter.")
        if found:
            weights[group[0]] = next(iter(found.values()))
    # `import_weights` finds a parameter by its first name only; ours may be listed under another.
    listed = {id(tensor): name for name, tensor in module.named_parameters()}
    own = dict(module.named_parameters(remove_duplicate=False))
    pairs = [Pair(peer, tuple(listed[id(own[name])] for name in ours)) for peer, ours in names.pairs(module.config)]
    import_weights(module, weights, pairs)


def export_xl(module: LanguageModel, names: XLNames) -> dict[str, Tensor]:
    """Return the peer's state dict: tied parameters under each of their names."""
    weights = export_weights(module.state_dict(), names.pairs(module.config))
    for first, *others in names.groups(module.config):
        weights |= {other: weights[first].clone() for other in others}
    return weights


def gradients(module: LanguageModel, loss: Tensor, names: XLNames) -> dict[str, Tensor]:
    """Return the gradients of a scalar under the peer's names, each parameter once."""
    own = dict(module.named_parameters(remove_duplicate=False))
    distinct = list({id(tensor): tensor for tensor in own.values()}.values())
    found = torch.autograd.grad(loss, distinct, allow_unused=True)
    by_id = {
        id(tensor): torch.zeros_like(tensor) if grad is None else grad
        for tensor, grad in zip(distinct, found, strict=True)
    }
    return export_weights({name: by_id[id(tensor)] for name, tensor in own.items()}, names.pairs(module.config))


def by_cluster(losses: Tensor, targets: Tensor, cutoffs: Iterable[int]) -> Tensor:
    """Return losses in the peers' order: the shortlist's first, then cluster by cluster, in the tensor's shape."""
    edges = torch.tensor(list(cutoffs), dtype=targets.dtype)
    order = torch.bucketize(targets.flatten(), edges, right=True).argsort(stable=True)
    return losses.flatten()[order].view_as(losses)


def tied_projections(tied: Sequence[bool], cutoffs: Sequence[int], *, exist: bool) -> tuple[bool, ...]:
    """Convert a peer's list to our form: of full length, and empty if nothing is tied or there is nothing to tie."""
    full = (*map(bool, tied), *[False] * (len(cutoffs) + 1))[: len(cutoffs) + 1]
    return full if exist and any(full) else ()


def check_fits(config: TransformerXLConfig, state_dict: Mapping[str, Tensor]) -> None:
    """See `marian_weights.check_size`."""
    check_size(state_dict, *config.lower_bounds())
