"""A moving average of the weights, which is used for validation and the model folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from manyheads.errors import CheckpointError


class MovingAverage:
    """Exponential moving average of parameters: average <- d * average + (1 - d) * parameter.

    d = min(decay, (1 + step) / (10 + step)), so that even in a short run the random initial weights have little
    influence.

    Args:
        named: the parameters, by name.
        decay: in (0, 1).
    """

    def __init__(self, named: Mapping[str, nn.Parameter], decay: float) -> None:
        self._named = dict(named)
        self._decay = decay
        self.tensors: dict[str, Tensor] = {name: parameter.detach().clone() for name, parameter in named.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages after optimiser step `step` (counted from 1)."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.tensors.values()), list(self._named.values()), 1 - decay)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load saved averages.

        Raises: CheckpointError: names or shapes differ from the model's.
        """
        if tensors.keys() != self.tensors.keys():
            odd = sorted(tensors.keys() ^ self.tensors.keys())[0]
            raise CheckpointError(
                f"The averaged weights of the checkpoint do not match the model: only one of them has {odd!r}."
            )
        for name, tensor in tensors.items():
            if tensor.shape != self.tensors[name].shape:
                raise CheckpointError(
                    f"The averaged weight {name!r} has shape {tuple(tensor.shape)},"
                    f" the model's {tuple(self.tensors[name].shape)}."
                )
            self.tensors[name].copy_(tensor)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averages as the model's weights inside the block, then restore the trained weights bit for bit."""
        trained = {name: parameter.detach().clone() for name, parameter in self._named.items()}
        self._assign(self.tensors)
        try:
            yield
        finally:
            self._assign(trained)

    @torch.no_grad()
    def _assign(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._named.items():
            parameter.copy_(tensors[name])
