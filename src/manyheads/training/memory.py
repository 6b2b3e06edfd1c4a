"""What a recurrent model remembers from one training step to the next, a state a micro-batch; in every checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.errors import CheckpointError

__all__ = ["Memory"]


class Memory:
    """The states after the last step, by micro-batch; none for models that remember nothing."""

    def __init__(self) -> None:
        self._states: dict[int, Any] = {}

    def of(self, micro: int) -> Any:
        """The state that micro-batch `micro` goes on from; None at the beginning."""
        return self._states.get(micro)

    def keep(self, states: Mapping[int, Any]) -> None:
        """Replace all states."""
        self._states = {micro: state for micro, state in states.items() if state is not None}

    def forget(self) -> None:
        """Begin anew: another epoch, or a step whose states are not to be trusted."""
        self._states = {}

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint: `micro.leaf` -> tensor."""
        return {
            f"{micro}.{number}": leaf.contiguous()
            for micro, state in self._states.items()
            for number, leaf in enumerate(pytree.tree_leaves(state))
        }

    def load(self, tensors: Mapping[str, Tensor], template: Any) -> None:
        """Put the tensors of a checkpoint back.

        Args: template: a state of the same structure; None of a model that remembers nothing.

        Raises: CheckpointError: there are other tensors than that structure has.
        """
        by_micro: dict[int, dict[int, Tensor]] = {}
        for name, tensor in tensors.items():
            micro, _, number = name.partition(".")
            if not (micro.isdecimal() and number.isdecimal()):
                raise CheckpointError(f"The checkpoint's memory holds {name!r}, which is no part of a memory.")
            by_micro.setdefault(int(micro), {})[int(number)] = tensor
        like, structure = pytree.tree_flatten(template)
        like = [] if template is None else like
        self._states = {}
        for index, leaves in by_micro.items():
            if sorted(leaves) != list(range(len(like))):
                raise CheckpointError(
                    f"The checkpoint's memory has {len(leaves)} parts for micro-batch {index}, the model {len(like)}."
                )
            moved = [leaves[place].to(old.device) for place, old in enumerate(like)]
            self._states[index] = pytree.tree_unflatten(moved, structure)
