"""The layout of a peer's weights: a table of its tensors' names and ours, which works in both directions.

    LAYOUT: Layout = {
        "generator.proj.*": "head.*",
        "*.layers.*.self_attn.linears.{0,1,2,3}.*": "body.*.layers.*.self_attn.{q,k,v,out}_proj.*",
        "*.layers.*.norm.{a_2,b_2}": "body.*.layers.*.norm.{weight,bias}",
        "in_proj_*": "{q,k,v}_proj.*",
    }

`*` stands for one part of a dotted name; the stars of both names agree, from left to right. Braces on both sides are
alternatives that pair up. Braces, or a star, on our side alone: all of these tensors together form the peer's tensor,
by default one after the other along the first axis; a `Rule` says how else. Rows for which our module has no tensor do
not apply, so one table holds for any number of layers, with and without biases.

Several names may belong to one parameter of ours, in particular to tied ones. A file must contain one of them, and may
contain more if their values are equal.

What a format holds of a model is a table, too: the fields of its config, each by name. A field that a format does not
list must have its default, and is otherwise refused by name. Therefore a field that is new, or a whole architecture, is
in no format until the format lists it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError, ModelFileError

Holds: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Field of a config -> the values that a format holds, or their classes; (): all."""


def any_of(names: str) -> Holds:
    """Fields, with spaces between them, of which every value is held."""
    return dict.fromkeys(names.split(), ())


TRANSFORMER = {
    **any_of(
        """architecture source_vocab_size target_vocab_size d_model num_heads head_dim value_dim d_ff num_decoder_heads
        encoder_heads decoder_heads cross_heads decoder_d_ff num_encoder_layers num_decoder_layers dropout
        attention_dropout feed_forward_dropout norm_position norm_eps final_norm bias max_len scale_embedding
        tie_embeddings head_bias initialisation"""
    ),
    "positions": ("sinusoidal", "sinusoidal_halves", "learned", "none"),
}
"""What all formats of a Transformer hold, as far as they do not narrow it."""

TRANSFORMER_XL = any_of(
    """architecture vocab_size d_model num_heads head_dim layer_heads d_ff num_layers d_embed cutoffs div_value dropout
    attention_dropout attention norm_position norm_eps share_biases max_len memory_len clamp_len same_length
    same_length_extra_key initial_memory ext_len tie_embeddings tie_projections"""
)

REFORMER = any_of(
    """architecture vocab_size d_model num_heads head_dim d_ff dropout attention_dropout activation norm_eps max_len
    chunk_len num_hashes num_buckets exact_len ff_chunk_len reversible keep_attention hash_seed num_layers layers
    positions axial_shape axial_dims causal visible chunks_before chunks_after within_bucket correct_duplicates
    look_across_rounds wrap local_chunk_len local_chunks_before local_chunks_after local_wrap local_slopes train_slopes
    shared_rotations pad_to_chunks"""
)


def check_held(name: str, config: Any, holds: Holds, section: str = "") -> None:
    """Args: name: of the format, in messages. section: before the names of fields, there.

    Raises: ConfigError: a field has a value that the format does not hold.
    """
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name in holds:
            demand(name, f"{section}{item.name}", value, holds[item.name])
            continue
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if value != default:
            raise ConfigError(
                f"{name} cannot hold a model with {section}{item.name} {value!r}; take another format, or train"
                " without this."
            )
    if undivided := getattr(config, "undivided", ""):
        raise ConfigError(
            f"{name} cannot hold a model with {section}{undivided}; take another format, or train without this. In this"
            " format each layer has num_heads heads of width d_model / num_heads; take a model before it was pruned."
        )


def demand(name: str, setting: str, value: Any, values: tuple[Any, ...]) -> None:
    """Raises: ConfigError: the value of a setting is not one of those that the format has; (): it has all."""
    if values and value not in values and type(value) not in values:
        shown = getattr(value, "kind", value)
        known = ", ".join(dict.fromkeys(repr(getattr(one, "kind", one)) for one in values))
        raise ConfigError(
            f"{name} cannot hold a model with {setting} {shown!r}; it has {known}. Train with one of these, or use"
            " another format or manyheads itself."
        )


@dataclass(frozen=True)
class Rule:
    """Our tensors that form one of the peer's.

    ours: their names. join: ours to the peer's; split: the inverse, given the number of our tensors.
    """

    ours: str
    join: Callable[[list[Tensor]], Tensor] = torch.cat
    split: Callable[[Tensor, int], Sequence[Tensor]] = torch.chunk


Layout = Mapping[str, str | Rule]


def flipped(ours: str) -> Rule:
    """Return the rule for a tensor whose rows are in reverse order."""
    return Rule(ours, lambda parts: parts[0].flip(0), lambda tensor, _: [tensor.flip(0)])


def transposed(ours: str) -> Rule:
    """Return the rule for matrices that are stored as (in, out); several stand side by side."""
    return Rule(ours, lambda parts: torch.cat(parts).t().contiguous(), lambda tensor, count: tensor.t().chunk(count))


def stacked(ours: str) -> Rule:
    """Return the rule for one tensor with a first axis of layers."""
    return Rule(ours, torch.stack, lambda tensor, _: tensor.unbind())


def nested(layouts: Mapping[str, Layout]) -> Layout:
    """Return one layout for several modules, whose names begin with the key on both sides."""
    return {
        f"{key}.{peer}": Rule(f"{key}.{rule.ours}", rule.join, rule.split)
        for key, layout in layouts.items()
        for peer, rule in _rules(layout)
    }


def import_weights(module: nn.Module, state_dict: Mapping[str, Tensor], layout: Layout) -> None:
    """Copy a peer's weights into our module, in the peer's precision; of several, in one that holds all of them.

    Raises: ModelFileError: a name is missing or unknown, a shape or type does not fit, or values differ under the names
        of one parameter; the first few are listed.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    found: list[tuple[Tensor, Rule, list[str]]] = []
    tensors = _tensors(layout, own)
    unknown = state_dict.keys() - {name for names, _, _ in tensors for name in names}
    problems = [f"{name} is unknown" for name in sorted(unknown)]
    for names, rule, ours in tensors:
        given = [name for name in names if name in state_dict]
        if not given:
            problems.append(f"{names[0]} is missing")
            continue
        tensor = state_dict[given[0]]
        shape = rule.join([own[name].to("meta") for name in ours]).shape
        if tensor.shape != shape:
            problems.append(f"{given[0]} has shape {tuple(tensor.shape)}, the config asks for {tuple(shape)}")
        if not tensor.is_floating_point():
            problems.append(f"{given[0]} has type {tensor.dtype}, not a floating-point type")
        problems += [
            f"{given[0]} and {other} differ, but the config says that they are one parameter"
            for other in given[1:]
            if state_dict[other].shape != tensor.shape or not torch.equal(state_dict[other], tensor)
        ]
        found.append((tensor, rule, ours))
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise ModelFileError(f"these weights do not match their config: {'; '.join(problems[:5])}{more}.")
    if found:
        module.to(reduce(torch.promote_types, (tensor.dtype for tensor, _, _ in found)))
    with torch.no_grad():
        for tensor, rule, ours in found:
            for name, part in zip(ours, rule.split(tensor, len(ours)), strict=True):
                own[name].copy_(part)


def export_weights(module: nn.Module, layout: Layout, *, all_names: bool = True) -> dict[str, Tensor]:
    """Return copies of our parameters under the peer's names.

    Args: all_names: write a parameter under each of its names; otherwise only under the first.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    return {
        name: rule.join([own[part].detach() for part in ours])
        for names, rule, ours in _tensors(layout, own)
        for name in (names if all_names else names[:1])
    }


def export_gradients(loss: Tensor, module: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """Return the gradients of a scalar under the peer's names, each parameter once, under the first of its names."""
    own = dict(module.named_parameters(remove_duplicate=False))
    distinct = {id(tensor): tensor for tensor in own.values()}
    found = torch.autograd.grad(loss, list(distinct.values()), materialize_grads=True)
    gradients = dict(zip(distinct, found, strict=True))
    return {
        names[0]: rule.join([gradients[id(own[part])] for part in ours]) for names, rule, ours in _tensors(layout, own)
    }


def _tensors(layout: Layout, own: Mapping[str, Tensor]) -> list[tuple[list[str], Rule, list[str]]]:
    """Return for each of the peer's tensors: its names, the rule, and the names of our tensors."""
    parts: dict[str, list[str]] = {}
    rules: dict[str, Rule] = {}
    for peer, rule in _rules(layout):
        theirs, ours = _alternatives(peer), _alternatives(rule.ours)
        groups = zip(theirs, ([one] for one in ours), strict=True) if len(theirs) > 1 else [(peer, ours)]
        for pattern, together in groups:
            first = re.compile(re.escape(together[0]).replace(r"\*", "([^.]+)"))
            for match in filter(None, map(first.fullmatch, own)):
                name = _filled(pattern, match)
                rules[name] = rule
                parts.setdefault(name, []).extend(_filled(one, match) for one in together)
    same: dict[tuple[int, ...], list[str]] = {}
    for name, ours in parts.items():
        same.setdefault(tuple(id(own[one]) for one in ours), []).append(name)
    return [(names, rules[names[0]], parts[names[0]]) for names in same.values()]


def _rules(layout: Layout) -> list[tuple[str, Rule]]:
    return [(peer, ours if isinstance(ours, Rule) else Rule(ours)) for peer, ours in layout.items()]


def _alternatives(pattern: str) -> list[str]:
    """Expand the braces of a pattern, which has one pair at most."""
    before, _, rest = pattern.partition("{")
    choices, _, after = rest.partition("}")
    return [before + choice + after for choice in choices.split(",")]


def _filled(pattern: str, match: re.Match[str]) -> str:
    """Replace the stars by what they matched on our side."""
    stars = iter(match.groups())
    return re.sub(r"\*", lambda _: next(stars), pattern)
