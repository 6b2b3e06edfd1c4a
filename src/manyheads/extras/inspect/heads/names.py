"""Names of attention heads: `encoder.0.self:1` is head 1 of the self-attention in the encoder's layer 0.

Layers and heads are counted from 0, as in the names of parameters. A config says which heads its model has
(`PrunableConfig`). Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from manyheads.errors import RequestError

if TYPE_CHECKING:
    from manyheads.models.size_checks import HeadKind

_NAMES: dict[HeadKind, str] = {"encoder": "encoder.{}.self", "decoder": "decoder.{}.self", "cross": "decoder.{}.cross"}


class PrunableConfig(Protocol):
    """A config of an architecture whose layers may have different numbers of heads."""

    @property
    def architecture(self) -> str:
        """Its name in ARCHITECTURES."""

    def heads_by_layer(self) -> dict[HeadKind, tuple[int, ...]]:
        """Return the number of heads of every attention layer, by kind; no entry for a kind that it does not have."""

    def with_heads(self, counts: Mapping[HeadKind, tuple[int, ...]]) -> Any:
        """Return a config with these numbers of heads, and heads as wide as before."""


class Head(NamedTuple):
    """One attention head.

    >>> str(Head("cross", layer=2, number=1)), Head("cross", 2, 1).layer_name
    ('decoder.2.cross:1', 'decoder.2.cross')
    """

    kind: HeadKind
    layer: int
    number: int

    @property
    def layer_name(self) -> str:
        """The name of all heads of its layer."""
        return _NAMES[self.kind].format(self.layer)

    def __str__(self) -> str:
        return f"{self.layer_name}:{self.number}"


def prunable(config: object, name: str = "this model") -> PrunableConfig:
    """Return the config, if heads of its architecture can be masked and removed.

    Raises: RequestError: they cannot.
    """
    if not hasattr(config, "heads_by_layer"):
        architecture = getattr(config, "architecture", type(config).__name__)
        raise RequestError(
            f"{name} is a {architecture}, whose heads can be neither masked nor pruned; this works with a transformer"
            " and a transformer-xl."
        )
    return cast(PrunableConfig, config)


def all_heads(config: PrunableConfig) -> list[Head]:
    """Return all heads that the model has: encoder, decoder, cross-attention, each layer by layer."""
    return [
        Head(kind, layer, number)
        for kind, counts in config.heads_by_layer().items()
        for layer, count in enumerate(counts)
        for number in range(count)
    ]


def kept_heads(config: PrunableConfig, removed: Iterable[Head]) -> dict[HeadKind, list[list[int]]]:
    """Return for every attention layer the numbers of the heads that stay."""
    gone = set(removed)
    return {
        kind: [[n for n in range(count) if Head(kind, layer, n) not in gone] for layer, count in enumerate(counts)]
        for kind, counts in config.heads_by_layer().items()
    }


def parse_heads(names: Iterable[str], config: PrunableConfig) -> list[Head]:
    """Return the named heads, without repetitions, in the order of `all_heads`.

    Args: names: `encoder.0.self:1,3` are heads 1 and 3 of that layer, `decoder.2.cross` all heads of it.

    Raises: RequestError: a head does not exist.
    """
    known = all_heads(config)
    layers = {head.layer_name for head in known}
    wanted: set[str] = set()
    for name in names:
        layer, colon, numbers = name.partition(":")
        asked = [f"{layer}:{number.strip()}" for number in numbers.split(",")] if colon else [name]
        if layer not in layers:
            raise RequestError(f"there is no head {name!r}; {_described(config)}")
        for one in asked:
            found = {str(head) for head in known if one in (str(head), head.layer_name)}
            if not found:
                raise RequestError(f"there is no head {one!r}; {_described(config)}")
            wanted |= found
    return [head for head in known if str(head) in wanted]


def _described(config: PrunableConfig) -> str:
    """Return all layers with their heads, in one sentence."""
    runs: list[str] = []
    for kind, counts in config.heads_by_layer().items():
        for layer, count in enumerate(counts):
            name = _NAMES[kind].format(layer)
            runs.append(f"{name}:0" + (f" to {count - 1}" if count > 1 else ""))
    shown = runs if len(runs) <= 6 else [*runs[:3], "...", *runs[-2:]]
    return f"layers and heads count from 0, and the model has {', '.join(shown)}."
