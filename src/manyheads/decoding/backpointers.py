"""Storage of the tokens of a search: a tree of backpointers that is read when sentences are finished."""

from __future__ import annotations

import torch
from torch import Tensor

ROOT = -1


class Backpointers:
    """A tree with a node for every kept token and a pointer to its parent; a hypothesis is the number of its last node.

    A step writes only its own tokens, whatever the length of the outputs, and sentences can leave the batch without
    renumbering.
    """

    def __init__(self) -> None:
        self._parents: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._log_probs: list[Tensor] = []
        self._size = 0
        self._read: tuple[list[int], list[int], list[float]] = ([], [], [])

    def add(self, parents: Tensor, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """Append a node for each entry; parents are node numbers or ROOT. Returns the new numbers in the same shape."""
        first, self._size = self._size, self._size + tokens.numel()
        self._parents.append(parents.flatten())
        self._tokens.append(tokens.flatten())
        self._log_probs.append(log_probs.flatten())
        return torch.arange(first, self._size, device=tokens.device).view(tokens.shape)

    def path(self, node: int) -> tuple[list[int], list[float]]:
        """Return the tokens from the root to this node and their log-probabilities."""
        if self._parents:  # nodes that were added since the last call
            self._read[0].extend(torch.cat(self._parents).tolist())
            self._read[1].extend(torch.cat(self._tokens).tolist())
            self._read[2].extend(torch.cat(self._log_probs).tolist())
            for columns in (self._parents, self._tokens, self._log_probs):
                columns.clear()
        parents, tokens, log_probs = self._read
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = parents[node]
        nodes.reverse()
        return [tokens[n] for n in nodes], [log_probs[n] for n in nodes]
