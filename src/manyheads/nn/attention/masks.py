"""Masks as descriptions of what may be attended to. Each kind of attention materialises only what it needs.

True = may attend. Descriptions combine with `&`. All kinds of attention return zeros for a query without allowed keys.

    mask = Causal() & Lengths(target_lengths)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyheads.catalogue import shown_as
from manyheads.errors import ShapeError
from manyheads.nn.pytrees import register_state
from manyheads.nn.shapes import Bool, Float, Int, check_axes, check_tensors

_LAYOUT = " Vectors are read as (batch, length, width): where the length comes first, give x.transpose(0, 1)."


class Mask:
    """Base of all descriptions.

    >>> mask = Causal() & Lengths(torch.tensor([3, 2]))
    >>> dense_mask(mask, q_len=3, k_len=3, device=torch.device("cpu")).shape
    torch.Size([2, 1, 3, 3])
    """

    _repr_mimebundle_ = shown_as("mask")

    def __and__(self, other: Mask | None) -> Mask:
        refuse_tensor(other)
        return self if other is None else Both(first=self, second=other)

    def allowed(self, queries: Int[Tensor, " q_len"], keys: Int[Tensor, " k_len"]) -> Bool[Tensor, ...]:
        """Return which keys each query may attend to.

        Args: queries, keys: positions in the sequence; with a cache the first query comes after the cached keys.
        Returns: bool, broadcastable to (batch, heads, q_len, k_len); True = may attend.
        Raises: ShapeError: the mask does not fit these numbers of queries and keys.
        """
        raise TypeError(f"{type(self).__name__} does not say what it allows")

    def bias(self, queries: Int[Tensor, " q_len"], keys: Int[Tensor, " k_len"]) -> Float[Tensor, ...] | None:
        """Return the addend of the scaled scores, in the shape of `allowed`; None: nothing is added."""
        return None


@register_state
@dataclass(frozen=True)
class Causal(Mask):
    """No query sees a later key (Vaswani et al. 2017, sec. 3.2.3).

    >>> Causal().allowed(torch.arange(2), torch.arange(2)).tolist()
    [[[[True, False], [True, True]]]]
    """

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (keys[None, :] <= queries[:, None])[None, None]


@register_state
@dataclass(frozen=True)
class Window(Mask):
    """A query sees `left` keys before it, itself, and `right` keys after it; None: no limit on that side.

    >>> Window(left=1, right=0).allowed(torch.tensor([2]), torch.arange(4)).tolist()
    [[[[False, True, True, False]]]]
    """

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


@register_state
@dataclass(frozen=True)
class Lengths(Mask):
    """The first `lengths` keys of each row are real; the others are padding.

        >>> keys = torch.arange(3)
        >>> Lengths(torch.tensor([2])).allowed(keys, keys).tolist()
        [[[[True, True, False]]]]

    lengths: (batch,), or (batch, q_len) with a length for each query.
    """

    lengths: Tensor

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        check_tensors(lengths=self.lengths)
        if self.lengths.dim() == 1:
            return (keys[None, :] < self.lengths[:, None])[:, None, None, :]
        if self.lengths.dim() != 2 or self.lengths.shape[1] != queries.shape[0]:
            raise ShapeError(
                f"lengths of shape {tuple(self.lengths.shape)} do not fit {queries.shape[0]} queries; give (batch,), or"
                " (batch, q_len) with a length for each query."
                + (_LAYOUT if self.lengths.shape[:1] == queries.shape else "")
            )
        return (keys < self.lengths[:, :, None])[:, None]


@register_state
@dataclass(frozen=True)
class Segments(Mask):
    """Sequences lie one after the other in one row, and a query sees the keys of its own sequence alone.

        >>> starts = torch.tensor([0, 2, 3])
        >>> Segments(starts, starts, longest=2, causal=True).allowed(torch.arange(3), torch.arange(3)).int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]

    query_starts, key_starts: (segments + 1,) int32, where each sequence begins, and the end of the last; some may be
    empty. longest: no sequence has more tokens. causal: a query sees no later key.
    """

    query_starts: Tensor
    key_starts: Tensor
    longest: int
    causal: bool = False

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        of_query, query = _places(self.query_starts, queries)
        of_key, key = _places(self.key_starts, keys)
        seen = of_query[:, None] == of_key[None, :]
        if self.causal:
            seen = seen & (key[None, :] <= query[:, None])
        return seen[None, None]


def _places(starts: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of each position's segment, and its position there."""
    positions = positions.to(starts.dtype)
    numbers = torch.searchsorted(starts, positions, right=True) - 1
    return numbers, positions - starts[numbers]


@register_state
@dataclass(frozen=True)
class KeyPadding(Mask):
    """Keys where `keep` (batch, k_len) is True are real; padding may be anywhere.

    >>> KeyPadding(torch.tensor([[False, True]])).allowed(torch.arange(2), torch.arange(2)).shape
    torch.Size([1, 1, 1, 2])
    """

    keep: Tensor

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        check_axes("keep", self.keep, "batch, k_len")
        if self.keep.shape[-1] != keys.shape[0]:
            raise ShapeError(
                f"a key padding mask covers {self.keep.shape[-1]} keys but there are {keys.shape[0]};"
                " give one entry per key, cached keys included."
                + (_LAYOUT if self.keep.shape[0] == keys.shape[0] else "")
            )
        return self.keep.bool()[:, None, None, :]


@register_state
@dataclass(frozen=True)
class Dense(Mask):
    """Any pattern as a tensor: (q_len, k_len), (batch, q_len, k_len) or (batch, heads, q_len, k_len).

    >>> Dense(torch.eye(3)).allowed(torch.arange(3), torch.arange(3)).shape
    torch.Size([1, 1, 3, 3])
    """

    pattern: Tensor

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return _four_axes("pattern", self.pattern, queries, keys).bool()


@register_state
@dataclass(frozen=True)
class NeverEmpty(Dense):
    """A pattern in which every query may attend to at least one key; nothing checks it."""


@register_state
@dataclass(frozen=True)
class Bias(Mask):
    """Numbers added to the scaled scores, such as ALiBi's; -inf forbids. Relative and LSH attention refuse them.

        >>> from manyheads.nn import MultiHeadAttention
        >>> distance = torch.arange(5) - torch.arange(5)[:, None]
        >>> mask = Causal() & Bias(distance[None, None] * torch.tensor([0.5, 0.25]).view(1, 2, 1, 1))
        >>> MultiHeadAttention(8, num_heads=2)(torch.randn(3, 5, 8), mask=mask)[0].shape
        torch.Size([3, 5, 8])

    values: (q_len, k_len), (batch, q_len, k_len) or (batch, heads, q_len, k_len), of a floating type.
    """

    values: Tensor

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return ~torch.isneginf(_four_axes("values", self.values, queries, keys))

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        return _four_axes("values", self.values, queries, keys)


@register_state
@dataclass(frozen=True)
class ByDistance(Mask):
    """Numbers added to the scores by the distance from the query to the key; all pairs are allowed.

        >>> mask = ByDistance(torch.tensor([[-2.0, -1.0, 0.0]]), before=2)
        >>> mask.bias(torch.tensor([3]), torch.arange(4)).tolist()
        [[[[-2.0, -2.0, -1.0, 0.0]]]]

    values: (heads, distances). before: column of the query's own position. Keys farther away than the first or the last
        column have that column.
    """

    values: Tensor
    before: int

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=keys.device)

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        column = (keys[None, :] - queries[:, None] + self.before).clamp(0, self.values.shape[1] - 1)
        return self.values[:, column][None]


@register_state
@dataclass(frozen=True)
class Both(Mask):
    """A mask that allows the pairs that both `first` and `second` allow."""

    first: Mask
    second: Mask

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.first.allowed(queries, keys) & self.second.allowed(queries, keys)

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        first, second = self.first.bias(queries, keys), self.second.bias(queries, keys)
        return second if first is None else first if second is None else first + second


def _four_axes(name: str, pattern: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return a pattern of two to four axes as (batch or 1, heads or 1, q_len or 1, k_len or 1).

    Raises: ShapeError: its last two axes are not (q_len, k_len) or 1. TensorTypeError: it is no tensor.
    """
    check_tensors(**{name: pattern})
    given = tuple(pattern.shape)
    if pattern.dim() == 2:
        pattern = pattern[None, None]
    elif pattern.dim() == 3:
        pattern = pattern[:, None]
    for axis, wanted in ((-2, queries.shape[0]), (-1, keys.shape[0])):
        if pattern.dim() != 4 or pattern.shape[axis] not in (1, wanted):
            raise ShapeError(
                f"a dense mask of shape {given} does not fit {queries.shape[0]} queries and {keys.shape[0]} keys; its"
                " last two axes must be (q_len, k_len), or 1 to be broadcast; before them it may have (batch), or"
                " (batch, heads)." + (_LAYOUT if len(given) == 2 or given[:1] == queries.shape else "")
            )
    return pattern


def refuse_tensor(mask: Any) -> None:
    """Raises: ShapeError: the mask is a bare tensor, which does not say whether True allows or blocks.
    TensorTypeError: it is neither a mask nor a tensor.
    """
    if mask is not None and not isinstance(mask, Mask):
        check_tensors(mask=mask)
        raise ShapeError(
            f"a mask is a description, not a tensor (here of shape {tuple(mask.shape)}). Convert it with"
            " manyheads.extras.peers.conventions: from_allowed(mask, sizes) if True may be attended to,"
            " from_blocked(mask, sizes) if True may not (torch's attn_mask and key_padding_mask), from_additive(mask,"
            " sizes) if it is added to the scores, from_valid_lens(mask) if it holds numbers of valid keys,"
            " from_sequence_first(mask) if it is (q_len, k_len, batch)."
        )


def check_rows(given: int, batch: int, what: str = "the mask") -> None:
    """Raises: ShapeError: what has `given` rows, neither one nor one for each sentence of the batch."""
    if given not in (1, batch):
        raise ShapeError(f"{what} has {given} rows for a batch of {batch}; give one for each sentence.{_LAYOUT}")


def dense_mask(
    mask: Mask | None, q_len: int, k_len: int, device: torch.device, first_query: int = 0, batch: int | None = None
) -> Bool[Tensor, "#batch #heads #q_len #k_len"] | None:
    """Return the allowed pairs as a tensor; None if every query may attend to every key.

    Args:
        first_query: position of the first query among the keys; with a cache, the number of cached keys.
        batch: sentences, for which a mask must have as many rows, or one; None: any number.

    Raises: ShapeError: the mask contains a `Bias`, which the caller cannot add to its scores; see `dense_bias`.
    """
    allowed, bias = dense_bias(mask, q_len, k_len, device, first_query, batch)
    if bias is not None:
        raise ShapeError(
            "this kind of attention cannot add a Bias to its scores, but the mask contains one; use a mask of True and"
            " False (Dense), or MultiHeadAttention."
        )
    return allowed


def dense_bias(
    mask: Mask | None, q_len: int, k_len: int, device: torch.device, first_query: int = 0, batch: int | None = None
) -> tuple[Bool[Tensor, "#batch #heads #q_len #k_len"] | None, Float[Tensor, "#batch #heads #q_len #k_len"] | None]:
    """Return the allowed pairs as `dense_mask` does, and the addend of the scores, which is 0 for forbidden pairs."""
    refuse_tensor(mask)
    if mask is None:
        return None, None
    keys = torch.arange(k_len, device=device)
    queries = (
        keys if (q_len, first_query) == (k_len, 0) else torch.arange(first_query, first_query + q_len, device=device)
    )
    allowed, bias = mask.allowed(queries, keys), mask.bias(queries, keys)
    if batch is not None:
        check_rows(allowed.shape[0], batch)
    return allowed, None if bias is None else bias.masked_fill(~allowed, 0.0)


def zero_padding(
    x: Float[Tensor, "batch heads length width"], lengths: Int[Tensor, " batch"] | None
) -> Float[Tensor, "batch heads length width"]:
    """Return x with zeros at positions beyond the length of their row; None: x itself."""
    if lengths is None:
        return x
    real = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
    return x * real[:, None, :, None].to(x.dtype)
