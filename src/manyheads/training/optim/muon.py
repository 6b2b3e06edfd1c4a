"""Muon for the matrices of linear layers and AdamW for all other parameters, as one optimiser.

Paper: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks". The momentum of each matrix is
orthogonalised before the update, so that its small directions have the same weight as its large ones. Differs from
`torch.optim.Muon` only in speed: matrices of one shape are processed together (28 of 256 x 256 and 12 of 1024 x 256 on
two cores: 23 ms instead of 54).

With sharded matrices, momenta are sharded too. The iteration needs whole matrices, so each is gathered, and every rank
processes all of them, as with replicated matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.distributed.shards import part_of, whole

__all__ = ["MuonWithAdam", "orthogonalise"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial that moves all singular values towards 1
_STEPS = 5


def orthogonalise(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the nearest matrices with all singular values near 1 (between about 0.7 and 1.2), by Newton-Schulz.

    Args: dtype: type of the iteration and its result; None: that of the matrices. bfloat16 is precise enough, and
        faster if the device has such products.
    Shape: (count, rows, columns) -> the same.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    x = (x if dtype is None else x.to(dtype)).contiguous()
    for _ in range(_STEPS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


class MuonWithAdam(torch.optim.Optimizer):
    """Muon for some matrices and an Adam optimiser for the rest, with one list of groups and one state.

    Args:
        matrices: two-dimensional parameters, for Muon.
        rest: an optimiser over the other parameters.
        rate_scale: Muon's learning rate as a multiple of the schedule's; stored in its groups.
        momentum: decay of the momentum; the update uses Nesterov's form.
        weight_decay: weight decay of `matrices`.
        without_decay: more two-dimensional parameters for Muon, without weight decay.
        dtype: type of the orthogonalisation; None: that of the matrices.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        rest: torch.optim.Optimizer,
        *,
        rate_scale: float,
        momentum: float,
        weight_decay: float,
        without_decay: Iterable[nn.Parameter] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        alike: dict[tuple[torch.Size, float], list[nn.Parameter]] = {}
        for parameters, decay in ((matrices, weight_decay), (without_decay, 0.0)):
            for matrix in parameters:
                alike.setdefault((matrix.shape, decay), []).append(matrix)
        common = {"rate_scale": rate_scale, "momentum": momentum, "lr": rate_scale}
        self._rest = rest
        self._dtype = dtype
        self._muon_groups: list[dict[str, Any]] = [
            {"params": same, "weight_decay": decay, **common} for (_, decay), same in alike.items()
        ]
        groups = [*self._muon_groups, *rest.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups  # shares the dicts of `rest`, so that a rate set here applies there
        rest.state = self.state
        self.matrices = frozenset(id(matrix) for same in alike.values() for matrix in same)

    @torch.no_grad()
    def step(self, closure: Callable[[], float | Tensor] | None = None) -> Any:
        """Update both. Raises: TypeError: a closure is given, which is not supported."""
        if closure is not None:
            raise TypeError("MuonWithAdam takes no closure.")
        for group in self._muon_groups:
            self._step_together(group)
        self._rest.step()

    def _step_together(self, group: dict[str, Any]) -> None:
        """Apply Muon's update to all matrices of one shape."""
        matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
        if not matrices:
            return
        ahead = []
        for matrix in matrices:
            state = self.state[matrix]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            momentum = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
            ahead.append(matrix.grad.lerp(momentum, group["momentum"]))
        rows, columns = matrices[0].shape
        rate = group["lr"] * max(1.0, rows / columns) ** 0.5
        updates = orthogonalise(torch.stack([whole(one) for one in ahead]), self._dtype)
        for matrix, update in zip(matrices, updates, strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            matrix.add_(part_of(update.to(matrix.dtype), matrix), alpha=-rate)
