"""Masks as descriptions: what may be attended is said, and each kind of attention materialises only what it needs.

True = may attend. Descriptions combine with `&`. A query that may attend to nothing gets zeros, everywhere.

    mask = Causal() & Lengths(target_lengths)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyheads.errors import ShapeError

__all__ = ["Both", "Causal", "Dense", "KeyPadding", "Lengths", "Mask", "Window", "dense_mask"]


class Mask:
    """Base of all descriptions."""

    def __and__(self, other: Mask | None) -> Mask:
        return self if other is None else Both(first=self, second=other)

    def allowed(self, queries: Int[Tensor, " q_len"], keys: Int[Tensor, " k_len"]) -> Bool[Tensor, ...]:
        """Which key each query may attend to.

        Args: queries, keys: positions in the sequence; with a cache the first query stands after the cached keys.
        Shape: every axis of the result may be 1, to be broadcast.
        """
        raise TypeError(f"{type(self).__name__} does not say what it allows")


@dataclass(frozen=True)
class Causal(Mask):
    """No query sees a later key (Vaswani et al. 2017, sec. 3.2.3)."""

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (keys[None, :] <= queries[:, None])[None, None]


@dataclass(frozen=True)
class Window(Mask):
    """A query sees `left` keys before it, itself, and `right` keys after it; None is no limit on that side."""

    left: int | None
    right: int | None

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = queries[:, None] - keys[None, :]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            seen = seen & (distance <= self.left)
        if self.right is not None:
            seen = seen & (distance >= -self.right)
        return seen[None, None]


@dataclass(frozen=True)
class Lengths(Mask):
    """Keys before each row's length are real, those after it padding. lengths: (batch,)"""

    lengths: Tensor

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (keys[None, :] < self.lengths[:, None])[:, None, None, :]


@dataclass(frozen=True)
class KeyPadding(Mask):
    """Keys where `keep` (batch, k_len) is True are real; padding may stand anywhere."""

    keep: Tensor

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        if self.keep.shape[-1] != keys.shape[0]:
            raise ShapeError(
                f"a key padding mask covers {self.keep.shape[-1]} keys but there are {keys.shape[0]};"
                " give one entry a key, cached keys included."
            )
        return self.keep.bool()[:, None, None, :]


@dataclass(frozen=True)
class Dense(Mask):
    """Any pattern, written out: (q_len, k_len), (batch, q_len, k_len) or (batch, heads, q_len, k_len)."""

    pattern: Tensor

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        pattern = self.pattern.bool()
        if pattern.dim() == 2:
            pattern = pattern[None, None]
        elif pattern.dim() == 3:
            pattern = pattern[:, None]
        for axis, wanted in ((-2, queries.shape[0]), (-1, keys.shape[0])):
            if pattern.shape[axis] not in (1, wanted):
                raise ShapeError(
                    f"a dense mask of shape {tuple(self.pattern.shape)} does not fit {queries.shape[0]} queries and"
                    f" {keys.shape[0]} keys; its last two axes must be (q_len, k_len), or 1 to be broadcast."
                )
        return pattern


@dataclass(frozen=True)
class Both(Mask):
    """What `first` and `second` both allow."""

    first: Mask
    second: Mask

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.first.allowed(queries, keys) & self.second.allowed(queries, keys)


def dense_mask(
    mask: Mask | None, q_len: int, k_len: int, device: torch.device, first_query: int = 0
) -> Bool[Tensor, "#batch #heads #q_len #k_len"] | None:
    """The pattern written out, or None if everything may be attended.

    Args: first_query: position of the first query among the keys; with a cache, the number of cached keys.
    """
    if mask is None:
        return None
    queries = torch.arange(first_query, first_query + q_len, device=device)
    return mask.allowed(queries, torch.arange(k_len, device=device))
