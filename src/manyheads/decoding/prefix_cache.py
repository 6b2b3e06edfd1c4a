"""States of a language model after the beginnings of earlier prompts, so that a long prompt is not read twice.

A state is a function of the tokens that were read, in parts of equal length, and of the context settings. It is stored
at the end of each full part, under a hash of all tokens so far.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


class PrefixCache:
    """The most recently used states, up to a size.

    Args:
        max_bytes: size of all states together.
        part_len: tokens of a part; prompts are always read in such parts from their beginning.
    """

    def __init__(self, max_bytes: int, part_len: int) -> None:
        self.max_bytes = max_bytes
        self.part_len = part_len
        self._states: OrderedDict[tuple[str, bytes], tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Size of the stored states."""
        return self._bytes

    def longest(self, ids: Sequence[int], context: str) -> int:
        """Return how many tokens at the beginning of a prompt need not be read. The last token must always be read.

        Args: context: of the model's context settings, for example their representation.
        """
        return max((end for end, key in self._keys(ids, context) if key in self._states), default=0)

    def take(self, ids: Sequence[int], context: str) -> tuple[int, Any]:
        """Return the number of tokens of the longest stored beginning, and a copy of its state; (0, None): none.

        Args: as for `longest`.
        """
        for end, key in reversed(list(self._keys(ids, context))):
            with self._lock:
                found = self._states.get(key)
                if found is not None:
                    self._states.move_to_end(key)
                    return end, found[0].clone()
        return 0, None

    def put(self, ids: Sequence[int], context: str, state: Any) -> None:
        """Store a copy of the state after these tokens, whose number is a multiple of `part_len`.

        A state that is larger than the cache is not stored; otherwise the least recently used states are deleted to
        make space.
        """
        size = sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
        key = (context, hashlib.sha256(array("q", ids).tobytes()).digest())
        with self._lock:
            if size > self.max_bytes or key in self._states:
                return
            self._states[key] = state.clone(), size
            self._bytes += size
            while self._bytes > self.max_bytes:
                _, (_, dropped) = self._states.popitem(last=False)
                self._bytes -= dropped

    def _keys(self, ids: Sequence[int], context: str) -> Iterator[tuple[int, tuple[str, bytes]]]:
        """Yield the end and the key of each full part that leaves at least one token to read."""
        digest = hashlib.sha256()
        for end in range(self.part_len, len(ids), self.part_len):
            digest.update(array("q", ids[end - self.part_len : end]).tobytes())
            yield end, (context, digest.digest())
