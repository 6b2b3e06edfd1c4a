"""Muon for the matrices of maps, AdamW for everything else, as one optimiser.

Paper: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks": the momentum of each matrix is
made orthogonal (by a Newton-Schulz iteration in bfloat16) before it is applied, so that no direction is drowned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MuonWithAdam"]


class MuonWithAdam(torch.optim.Optimizer):
    """`torch.optim.Muon` and an Adam side by side, with one list of groups and one state.

    Args:
        matrices: two-dimensional parameters, for Muon.
        rest: an optimiser over the other parameters.
        rate_scale: Muon's learning rate as a multiple of the schedule's; each of its groups carries it.
        momentum: Muon's, with Nesterov's look ahead.
        weight_decay: of the matrices.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        rest: torch.optim.Optimizer,
        *,
        rate_scale: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        self._muon = torch.optim.Muon(list(matrices), lr=rate_scale, momentum=momentum, weight_decay=weight_decay)
        self._rest = rest
        for group in self._muon.param_groups:
            group["rate_scale"] = rate_scale
        groups = [*self._muon.param_groups, *rest.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups  # the very dicts of both, so that a rate set here is set there
        self._muon.state = rest.state = self.state
        self.matrices = frozenset(id(parameter) for group in self._muon.param_groups for parameter in group["params"])

    def step(self, closure: Callable[[], float | Tensor] | None = None) -> Any:
        """One update of both. Raises: TypeError: a closure is given; there is none in our loop."""
        if closure is not None:
            raise TypeError("MuonWithAdam takes no closure.")
        self._muon.step()  # type: ignore[no-untyped-call]
        self._rest.step()
