"""Where the tokens of a search are kept: a tree of back-pointers, read once at the end."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ROOT", "Trail"]

ROOT = -1


class Trail:
    """Every token ever kept is a node with a parent; a hypothesis is the number of its last node.

    So a step writes its own tokens only, however long the outputs are, and sentences may leave the batch without
    renumbering.
    """

    def __init__(self) -> None:
        self._parents: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._log_probs: list[Tensor] = []
        self._size = 0
        self._read: tuple[list[int], list[int], list[float]] | None = None

    def add(self, parents: Tensor, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """Append a node for each entry; parents are node numbers or ROOT. Returns the new numbers, shaped alike."""
        first, self._size = self._size, self._size + tokens.numel()
        self._parents.append(parents.flatten())
        self._tokens.append(tokens.flatten())
        self._log_probs.append(log_probs.flatten())
        return torch.arange(first, self._size, device=tokens.device).view(tokens.shape)

    def path(self, node: int) -> tuple[list[int], list[float]]:
        """Tokens from the root to this node, and their log-probabilities. Call it when all nodes are in."""
        if self._read is None:
            empty = not self._parents
            columns = [[] if empty else torch.cat(c).tolist() for c in (self._parents, self._tokens, self._log_probs)]
            self._read = (columns[0], columns[1], columns[2])
        parents, tokens, log_probs = self._read
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = parents[node]
        nodes.reverse()
        return [tokens[n] for n in nodes], [log_probs[n] for n in nodes]
