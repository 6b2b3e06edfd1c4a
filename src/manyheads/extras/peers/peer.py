"""The base class of peers: options, a layout of weights, inputs, and a way to compute as it does.

The layout is a table of its tensors' names and ours, which works in both directions.

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

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatchcase
from functools import reduce
from types import GenericAlias, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from manyheads.catalogue import build_model
from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.models.pretrained import check_size
from manyheads.nn.attention.masks import Dense, Mask

if TYPE_CHECKING:
    from pathlib import Path

    from manyheads.extras.peers.legacy_pickle import Saved
    from manyheads.models.composites import Seq2Seq
    from manyheads.models.protocols import ModelConfig


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
"""The values of fields that all formats of a Transformer can hold; a format can allow fewer."""

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


Options = Mapping[str, Any]
"""A constructor's arguments and their defaults. A type in place of a default means: `int`, the argument is required;
`int | None`, the default is None; `list[int]`, the default is an empty list."""


class Peer:
    """One of our modules with a peer's weights, and with the peer's inputs and outputs.

    A subclass describes one module or model of another implementation by these tables and by the methods below them.

    Attributes:
        name: the peer in messages. kinds: `kind` in the JSON of its fixtures, beside the name. origin: a regular
            expression that `peer` in the JSON of a fixture without a kind begins with, unless it is the name.
        options: its constructor's arguments. section: the key in a config that holds them; None: the config itself.
            ignores_others: whether other options are ignored; otherwise they are errors.
        inputs: shell patterns of its inputs, without `in.`; None: others are ignored.
        same: an option -> the field of our config that has the same value, where both directions are supported.
        layout: the names of its weights and of ours. holds: of a whole model that is written, the fields of our config
            that it has. unused: a regular expression of names in its state dict that are
            not parameters.
        module: our module, in evaluation mode. config: as given to `from_peer`. chosen: the options, with defaults.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ()
    origin: ClassVar[str] = "(?!)"
    options: ClassVar[Options] = {}
    section: ClassVar[str | None] = "model"
    ignores_others: ClassVar[bool] = False
    inputs: ClassVar[tuple[str, ...] | None] = None
    same: ClassVar[Mapping[str, str]] = {}
    layout: ClassVar[Layout] = {}
    holds: ClassVar[Holds] = {}
    unused: ClassVar[str] = ""
    head: ClassVar[str] = ""

    def __init__(self, module: Any, config: Mapping[str, Any], chosen: Mapping[str, Any]) -> None:
        self.module, self.config, self.chosen = module, config, chosen

    @classmethod
    def matches(cls, meta: Mapping[str, Any]) -> bool:
        """Return whether a fixture's JSON describes this peer, by its `kind`, or by its `peer` if there is no kind."""
        if "kind" in meta:
            return meta["kind"] in (cls.name, *cls.kinds)
        peer = str(meta.get("peer", ""))
        return peer == cls.name or re.match(cls.origin, peer) is not None

    @classmethod
    def from_peer(cls, config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> Peer:
        """Return our module with the peer's weights.

        Args:
            config: the peer's constructor arguments, as in a fixture's JSON.
            state_dict: the peer's parameters and buffers under its own names.

        Raises: ConfigError: an unknown option, or a value that has no counterpart. ModelFileError: weights that do not
            match the config.
        """
        chosen = cls.read(config)
        if cls.head and not any(re.match(cls.head, name) for name in state_dict):
            raise ModelFileError(
                f"the weights have no language-model head: they are those of a base model of {cls.name}, or of one with"
                " another head; convert the model that was trained with its language-model head."
            )
        module = cls.build(chosen, state_dict)
        import_weights(module, cls.prepare(state_dict, module), cls.layout_of(module))
        return cls(module.eval(), config, chosen)

    @classmethod
    def to_peer(cls, module: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The inverse of `from_peer`: the config, and the state dict under the peer's names.

        Raises: ConfigError: the peer does not support one of the options.
        """
        options = cls.describe(module)
        return {cls.section: options} if cls.section else options, export_weights(module, cls.layout_of(module))

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the peer's options in a config, with its defaults. Raises: ConfigError: see `read_options`."""
        given = config.get(cls.section, None if cls.options else {}) if cls.section else config
        if not isinstance(given, Mapping):
            raise ConfigError(f"the config must hold the options of {cls.name} under {cls.section!r}.")
        if cls.ignores_others:
            given = {name: value for name, value in given.items() if name in cls.options}
        return read_options(given, cls.options, cls.name)

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
        """Return our module for the peer's options. weights: the peer's, which determine sizes that no option gives.

        A peer that is a whole model only says which config it has.
        """
        config = cls.config_of(options, weights)
        tensors = cls.parameters_in(weights).values()
        check_size(config, sum(tensor.numel() for tensor in tensors), len(tensors), "the weights")
        return build_model(config)

    @classmethod
    def config_of(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ModelConfig:
        """Return the config of our model; see `build`."""
        raise NotImplementedError

    @classmethod
    def fields_of(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of our config that `same` names, for the peer's options."""
        return {ours: options[peer] for peer, ours in cls.same.items()}

    @classmethod
    def options_of(cls, config: object) -> dict[str, Any]:
        """Return the peer's options that `same` names, for our config."""
        return {peer: getattr(config, ours) for peer, ours in cls.same.items()}

    @classmethod
    def parameters_in(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the peer's tensors without those that are not parameters."""
        return {name: tensor for name, tensor in weights.items() if not re.fullmatch(cls.unused, name)}

    @classmethod
    def prepare(cls, weights: Mapping[str, Tensor], module: Any) -> dict[str, Tensor]:
        """Return the peer's weights as the layout describes them, here without the unused ones."""
        return cls.parameters_in(weights)

    @classmethod
    def layout_of(cls, module: Any) -> Layout:
        """Return the layout of the weights, which may depend on the module."""
        return cls.layout

    @classmethod
    def describe(cls, module: Any) -> dict[str, Any]:
        """Return the peer's options for our module. Raises: ConfigError: the peer does not support one of ours."""
        raise ConfigError(f"{cls.name} cannot be exported.")

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Reproduce the peer's computation.

        Args: inputs: the `in.*` and `rot.*` tensors of a fixture under their full names, in the peer's layout and mask
            convention.
        Returns: every `out.*` (or `exact.*`) and `grad.*` of the fixture, under their full names.
        Raises: RequestError: an input is missing or not supported.
        """
        for name in sorted(inputs) if self.inputs is not None else ():
            known = [f"in.{pattern}" for pattern in self.inputs or ()]
            if name.startswith(("in.", "rot.")) and not any(fnmatchcase(name, pattern) for pattern in known):
                raise RequestError(f"{self.name} has no input {name}; it has {', '.join(known)}.")
        return self.answer(inputs)

    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs for inputs with known names; see `run`."""
        raise NotImplementedError

    @classmethod
    def is_folder(cls, folder: Path) -> bool:
        """Tell whether a folder is the peer's by its files; most are recognised by their config.json."""
        return False

    @classmethod
    def options_of_saved(cls, saved: Saved) -> dict[str, Any] | None:
        """Return the options in a checkpoint that can stand without a config.json; None: it has none."""
        return None

    @classmethod
    def notes_of_import(cls, options: Mapping[str, Any], config: Any) -> list[str]:
        """Return a sentence for each reason for which a converted model, of our config, differs from the peer's."""
        return []

    @classmethod
    def form_of(cls, model: Any) -> Any:
        """Return what `to_peer` takes of a whole model of ours."""
        return model

    @classmethod
    def notes_of_export(cls, config: Any) -> list[str]:
        """Return a sentence for each reason for which the peer's model differs from ours of this config."""
        return []

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """Return `grad.*` for every weight of the peer."""
        found = export_gradients(loss, self.module, self.layout_of(self.module))
        return {f"grad.{name}": gradient for name, gradient in found.items()}

    @classmethod
    def refuse(cls, reasons: Mapping[str, object]) -> None:
        """Raises: ConfigError: a reason, worded as a property of our module, holds."""
        for reason, holds in reasons.items():
            if holds:
                raise ConfigError(
                    f"{cls.name} cannot hold a model with {reason}; take another format, or train without this."
                )

    @classmethod
    def demand(cls, config: object, wanted: Mapping[str, Any]) -> None:
        """Raises: ConfigError: our config has another value than the only one that the peer supports."""
        for name, value in wanted.items():
            demand(cls.name, name, getattr(config, name), (value,))

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises: ConfigError: the peer cannot hold a model of this config."""
        check_held(cls.name, config, cls.holds)


def own_heads(module: Any) -> dict[str, bool]:
    """Return reasons for `Peer.refuse` for which multi-head attention differs from that of most peers, which divide
    d_model among the heads and multiply queries by keys.
    """
    d_model = module.out_proj.out_features
    return {
        f"head_dim {module.head_dim}": module.head_dim * module.num_heads != d_model,
        f"values of width {module.v_proj.out_features}": module.v_proj.out_features != d_model,
        "scores of its own": getattr(module, "score", None) is not None,
        "a relative bias": getattr(module, "relative_bias", None) is not None,
    }


def read_options(given: Mapping[str, Any], options: Options, what: str) -> dict[str, Any]:
    """Return a peer's constructor arguments with its defaults filled in.

    Raises: ConfigError: an argument is unknown, missing or of the wrong type.
    """
    unknown = sorted(given.keys() - options.keys())
    if unknown:
        raise ConfigError(f"{what} has no option {unknown[0]!r}; its options are {sorted(options)}.")
    values = {}
    for name, default in options.items():
        if name not in given:
            if isinstance(default, type):
                raise ConfigError(f"{what} needs the option {name!r}.")
            implied: dict[type, Any] = {UnionType: None, GenericAlias: []}
            values[name] = implied.get(type(default), default)
            continue
        kind: Any = type(default)
        if isinstance(default, type | UnionType | GenericAlias):
            kind = default
        elif isinstance(default, list):
            kind = GenericAlias(list, (type(default[0]),))
        if not _fits(given[name], kind):
            shown = kind.__name__ if isinstance(kind, type) else kind
            raise ConfigError(f"{name} is {given[name]!r} in the options of {what}; it must be of type {shown}.")
        values[name] = float(given[name]) if kind is float else given[name]
    if values.get("model_type") != options.get("model_type"):
        raise ConfigError(f"this is a config of model_type {values['model_type']!r}, not of a {what} model.")
    return values


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if isinstance(kind, GenericAlias):
        return isinstance(value, list | tuple) and all(_fits(item, get_args(kind)[0]) for item in value)
    return type(value) is kind or (kind is float and type(value) is int)


def require(inputs: Mapping[str, Tensor], *names: str) -> list[Tensor]:
    """Return required inputs, whose names are given without `in.`.

    Raises: RequestError: one is missing.
    """
    for name in names:
        if f"in.{name}" not in inputs:
            raise RequestError(f"the input in.{name} is missing; there are {sorted(inputs)}.")
    return [inputs[f"in.{name}"] for name in names]


class Parts(nn.ModuleDict):
    """Several of our modules that a peer's weights fill together, by name."""


def weights_by_part(weights: Mapping[str, Tensor], parts: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """Return the weights of each part, whose names begin with it, without this beginning.

    Raises: ModelFileError: a name begins otherwise.
    """
    own: dict[str, dict[str, Tensor]] = {part: {} for part in parts}
    for name, tensor in weights.items():
        part, _, rest = name.partition(".")
        if part not in own:
            raise ModelFileError(f"the weight {name} is unknown; names begin with one of {sorted(own)}.")
        own[part][rest] = tensor
    return own


@contextmanager
def uniform_when_empty(module: nn.Module, name: str, allowed: Tensor | None) -> Iterator[Mask | None]:
    """Reproduce a masking convention in every attention layer called `name`; yields the mask to pass to `module`.

    Some peers fill blocked scores with a large negative number, so a query that may attend to nothing attends to all
    keys equally.

    Shape: allowed (batch, heads or 1, q_len or 1, k_len), True = may attend.
    """
    if allowed is None:
        yield None
        return
    empty = ~allowed.any(dim=-1, keepdim=True)
    if not empty.any():
        yield Dense(allowed)
        return

    def score(query: Tensor, key: Tensor) -> Tensor:
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
        return scores.masked_fill(empty, 0.0)

    layers = [cast(Any, layer) for path, layer in module.named_modules() if path.rpartition(".")[2] == name]
    before = [layer.score for layer in layers]
    try:
        for layer in layers:
            layer.score = score
        yield Dense(allowed | empty)
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer.score = old


def encode(model: Seq2Seq, source: Tensor, allowed: Tensor) -> Tensor:
    """Return the encoder's output by this convention.

    Shape: source (batch, source_len) ids, allowed (batch, 1, 1 or source_len, source_len) -> (batch, source_len,
        d_model).
    """
    body = model.body
    with uniform_when_empty(body.encoder, "self_attn", allowed) as mask:
        memory: Tensor = body.encoder(body.source_positions(body.source_embedding(source)), mask)
    return memory


def decode(model: Seq2Seq, target: Tensor, memory: Tensor, allowed: Tensor, memory_allowed: Tensor) -> Tensor:
    """Return the decoder's output by this convention.

    Shape: target (batch, target_len) ids, allowed (batch, 1, 1 or target_len, target_len), memory_allowed (batch, 1, 1
        or target_len, source_len) -> (batch, target_len, d_model).
    """
    body = model.body
    x = body.target_positions(body.target_embedding(target))
    with (
        uniform_when_empty(body.decoder, "self_attn", allowed) as mask,
        uniform_when_empty(body.decoder, "cross_attn", memory_allowed) as memory_mask,
    ):
        hidden: Tensor = body.decoder(x, memory, mask, memory_mask)
    return hidden
