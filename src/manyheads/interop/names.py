"""Conversion of state dicts between two sets of names, by a list of our tensors that form each of the peer's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError, ModelFileError, RequestError

__all__ = ["Pair", "Parts", "export_weights", "import_weights", "pick", "require"]


class Pair(NamedTuple):
    """One tensor of the peer, and our tensors that form it, stacked along the first axis."""

    peer: str
    ours: tuple[str, ...]


class Parts(nn.ModuleDict):
    """Several of our modules that a peer's weights fill together, by name."""


def import_weights(module: nn.Module, state_dict: Mapping[str, Tensor], pairs: Sequence[Pair]) -> None:
    """Copy a peer's weights into our module, in the peer's precision.

    Raises: ModelFileError: a name is missing or unknown, or a shape differs; the first few are listed.
    """
    wanted = {pair.peer for pair in pairs}
    problems = [f"{name} is missing" for name in sorted(wanted - state_dict.keys())]
    problems += [f"{name} is unknown" for name in sorted(state_dict.keys() - wanted)]
    own = dict(module.named_parameters())
    if not problems:
        for peer, ours in pairs:
            rows = sum(own[name].shape[0] for name in ours)
            shape = (rows, *own[ours[0]].shape[1:])
            if tuple(state_dict[peer].shape) != shape:
                problems.append(f"{peer} has shape {tuple(state_dict[peer].shape)}, the config asks for {shape}")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise ModelFileError(f"these weights do not match their config: {'; '.join(problems[:5])}{more}.")
    if pairs:
        module.to(state_dict[pairs[0].peer].dtype)
    with torch.no_grad():
        for peer, ours in pairs:
            first = 0
            for name in ours:
                rows = own[name].shape[0]
                own[name].copy_(state_dict[peer][first : first + rows])
                first += rows


def export_weights(tensors: Mapping[str, Tensor], pairs: Iterable[Pair]) -> dict[str, Tensor]:
    """Return copies of our tensors (parameters or their gradients) under the peer's names."""
    return {peer: torch.cat([tensors[name].detach() for name in ours]) for peer, ours in pairs}


def pick(config: Mapping[str, Any], defaults: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the peer's constructor arguments with its defaults filled in; a default of `...` marks a required one.

    Raises: ConfigError: an unknown argument, or a missing one.
    """
    unknown = sorted(config.keys() - defaults.keys())
    if unknown:
        raise ConfigError(f"{what} has no option {unknown[0]!r}; its options are {sorted(defaults)}.")
    values = {**defaults, **config}
    missing = sorted(name for name, value in values.items() if value is ...)
    if missing:
        raise ConfigError(f"{what} needs the option {missing[0]!r}.")
    return values


def require(inputs: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a required input.

    Raises: RequestError: it is missing.
    """
    if name not in inputs:
        raise RequestError(f"the input {name} is missing; there are {sorted(inputs)}.")
    return inputs[name]
