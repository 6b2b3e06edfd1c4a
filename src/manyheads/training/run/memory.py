"""The state of a recurrent model between training steps, one per micro-batch; part of every checkpoint.

Every rank has the states of its own lanes. In checkpoints they are gathered, because they are small compared with
weights and moments. So a checkpoint does not depend on the number of ranks that write or read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.data.partition import share
from manyheads.distributed.group import Group
from manyheads.errors import CheckpointError

__all__ = ["Memory"]


class Memory:
    """The states after the last step, by micro-batch; empty for models without memory."""

    def __init__(self) -> None:
        self._states: dict[int, Any] = {}
        self._rows: dict[int, int] = {}  # number of lanes of each micro-batch, over all ranks

    def of(self, micro: int, rows: int | None = None) -> Any:
        """Return the state from which micro-batch `micro` continues; None at the beginning.

        Args: rows: of the micro-batch over all ranks. A state of other lanes is not continued: in a run with
            `data.length_schedule` the number of lanes changes with the length. None: not compared.
        """
        known = self._rows.get(micro)
        return None if None not in (rows, known) and rows != known else self._states.get(micro)

    def keep(self, states: Mapping[int, Any], rows: Mapping[int, int] | None = None) -> None:
        """Replace all states.

        Args: rows: lanes of each micro-batch over all ranks, of which the states contain this rank's.
        """
        self._states = {micro: state for micro, state in states.items() if state is not None}
        self._rows = dict(rows or {})

    def forget(self) -> None:
        """Delete the states, at a new epoch or after a step whose states are invalid."""
        self._states, self._rows = {}, {}

    def tensors(self, group: Group | None = None) -> dict[str, Tensor]:
        """Return a checkpoint's tensors, `micro.leaf` -> tensor of all lanes. In a group, a collective operation."""
        if group is not None and not group.is_alone:
            return self._gathered(group)
        return {
            f"{micro}.{number}": leaf.contiguous()
            for micro, state in self._states.items()
            for number, leaf in enumerate(pytree.tree_leaves(state))
        }

    def _gathered(self, group: Group) -> dict[str, Tensor]:
        """Return all ranks' lanes, concatenated. Tensors without a lane axis are equal on all ranks; the first rank's
        is used.
        """
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
        """Load the tensors of a checkpoint.

        Args:
            template: a state of the same structure; None for a model without memory.
            group: the group whose ranks take contiguous parts of the lanes.

        Raises: CheckpointError: the tensors do not match that structure.
        """
        by_micro: dict[int, dict[int, Tensor]] = {}
        for name, tensor in tensors.items():
            micro, _, number = name.partition(".")
            if not (micro.isdecimal() and number.isdecimal()):
                raise CheckpointError(f"The checkpoint's memory contains {name!r}, which is not part of a memory.")
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
                moved = [own[number].to(old.device) for number, old in enumerate(like)]
                self._states[index] = pytree.tree_unflatten(moved, structure)
