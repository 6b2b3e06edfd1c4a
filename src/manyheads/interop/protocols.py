"""What a loader of another implementation's weights looks like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

__all__ = ["Exporter", "Loader", "Wrapper"]


class Wrapper(Protocol):
    """One of our modules with a peer's weights in it, which answers in the peer's terms.

    module: ours, in evaluation mode.
    """

    @property
    def module(self) -> nn.Module: ...

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replay what the peer did.

        Args: inputs: the `in.*` and `rot.*` tensors of a fixture under their full names, in the peer's layout and
            mask polarity; others are ignored.
        Returns: every `out.*` (or `exact.*`) and `grad.*` of the fixture, under their full names.
        Raises: RequestError: an input is missing or has no meaning here.
        """
        ...


class Loader(Protocol):
    """A module of this package: a peer's weights in, and out where the peer can hold them (`to_peer`)."""

    def matches(self, meta: Mapping[str, Any]) -> bool:
        """Whether a fixture's JSON describes this peer, by its `kind`, or by its `peer` where there is no kind."""
        ...

    def from_peer(self, config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> Wrapper:
        """Our module with the peer's weights.

        Args:
            config: what the peer was built with, as in a fixture's JSON.
            state_dict: the peer's parameters and buffers under its own names.

        Raises: ConfigError: an option we do not know. ModelFileError: names or shapes that do not fit.
        """
        ...


class Exporter(Loader, Protocol):
    """A loader whose peer can hold our models."""

    def to_peer(self, module: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The inverse of `from_peer`: the config, and the state dict under the peer's names.

        Raises: ConfigError: the peer has no such thing as one of the options.
        """
        ...
