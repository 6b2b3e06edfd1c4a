"""What a recurrent model remembers from one training step to the next, a state a micro-batch; in every checkpoint.

Every rank has the states of its own lanes. In files they are gathered: a memory is small beside weights and moments,
and so a checkpoint is the same whatever the number of ranks that wrote it, or that read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.data.shares import share
from manyheads.distributed.group import Group
from manyheads.errors import CheckpointError

__all__ = ["Memory"]


class Memory:
    """The states after the last step, by micro-batch; none for models that remember nothing."""

    def __init__(self) -> None:
        self._states: dict[int, Any] = {}
        self._rows: dict[int, int] = {}  # lanes of each micro-batch, over all ranks

    def of(self, micro: int) -> Any:
        """The state that micro-batch `micro` goes on from; None at the beginning."""
        return self._states.get(micro)

    def keep(self, states: Mapping[int, Any], rows: Mapping[int, int] | None = None) -> None:
        """Replace all states.

        Args: rows: lanes of each micro-batch over all ranks, of which the states hold this rank's.
        """
        self._states = {micro: state for micro, state in states.items() if state is not None}
        self._rows = dict(rows or {})

    def forget(self) -> None:
        """Begin anew: another epoch, or a step whose states are not to be trusted."""
        self._states, self._rows = {}, {}

    def tensors(self, group: Group | None = None) -> dict[str, Tensor]:
        """For a checkpoint: `micro.leaf` -> tensor, of all lanes. A collective operation in a group."""
        if group is not None and not group.is_alone:
            return self._gathered(group)
        return {
            f"{micro}.{number}": leaf.contiguous()
            for micro, state in self._states.items()
            for number, leaf in enumerate(pytree.tree_leaves(state))
        }

    def _gathered(self, group: Group) -> dict[str, Tensor]:
        """All ranks' lanes in a row. What has no axis of lanes is the same on all, and the first rank's is taken."""
        found = {}
        for micro, rows in sorted(self._rows.items()):
            leaves = pytree.tree_leaves(self._states[micro]) if micro in self._states else None
            told = group.exchange(None if leaves is None else [leaf.dim() for leaf in leaves])
            axes: list[int] = next((one for one in told if one is not None), [])
            for number, count in enumerate(axes):
                leaf = None if leaves is None else leaves[number].contiguous()
                if count:
                    found[f"{micro}.{number}"] = group.joined(leaf, rows=rows)
                else:
                    first = leaf[None] if leaf is not None and group.is_main else None
                    found[f"{micro}.{number}"] = group.joined(first, rows=1)[0]
        return found

    def load(self, tensors: Mapping[str, Tensor], template: Any, group: Group | None = None) -> None:
        """Put the tensors of a checkpoint back.

        Args:
            template: a state of the same structure; None of a model that remembers nothing.
            group: whose ranks take contiguous parts of the lanes.

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
        self.forget()
        for index, leaves in by_micro.items():
            if sorted(leaves) != list(range(len(like))):
                raise CheckpointError(
                    f"The checkpoint's memory has {len(leaves)} parts for micro-batch {index}, the model {len(like)}."
                )
            self._rows[index] = rows = max((leaf.shape[0] for leaf in leaves.values() if leaf.dim()), default=0)
            mine = slice(0, rows) if group is None else share(rows, group.rank, group.world)
            if mine.start < mine.stop:
                own = {number: leaf[mine].clone() if leaf.dim() else leaf for number, leaf in leaves.items()}
                moved = [own[place].to(old.device) for place, old in enumerate(like)]
                self._states[index] = pytree.tree_unflatten(moved, structure)
