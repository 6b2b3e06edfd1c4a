"""The interface of a loader of another implementation's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

__all__ = ["Exporter", "Loader", "Wrapper"]


class Wrapper(Protocol):
    """One of our modules with a peer's weights, with the peer's inputs and outputs.

    module: ours, in evaluation mode.
    """

    @property
    def module(self) -> nn.Module: ...

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Reproduce the peer's computation.

        Args: inputs: the `in.*` and `rot.*` tensors of a fixture under their full names, in the peer's layout and mask
            convention; others are ignored.
        Returns: every `out.*` (or `exact.*`) and `grad.*` of the fixture, under their full names.
        Raises: RequestError: an input is missing or not supported.
        """
        ...


class Loader(Protocol):
    """A module of this package that imports a peer's weights, and may export them (`to_peer`)."""

    def matches(self, meta: Mapping[str, Any]) -> bool:
        """Return whether a fixture's JSON describes this peer, by its `kind`, or by its `peer` if there is no kind."""
        ...

    def from_peer(self, config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> Wrapper:
        """Return our module with the peer's weights.

        Args:
            config: the peer's constructor arguments, as in a fixture's JSON.
            state_dict: the peer's parameters and buffers under its own names.

        Raises: ConfigError: an unknown option. ModelFileError: names or shapes that do not match.
        """
        ...


class Exporter(Loader, Protocol):
    """A loader that can also export."""

    def to_peer(self, module: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The inverse of `from_peer`: the config, and the state dict under the peer's names.

        Raises: ConfigError: the peer does not support one of the options.
        """
        ...
