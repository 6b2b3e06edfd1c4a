"""labml.ai's annotated multi-head attention: length first, masks (queries, keys, batch) in which 0 means blocked.

    from manyheads.extras.texts.labml import MultiHeadAttention, PrepareForMultiHeadAttention, tracker

`RelativeMultiHeadAttention` and `shift_right` are those of its Transformer-XL.

The same numbers as the text's code. Repaired: a query that may attend to no key gets zeros, where the text gives NaN; a
number of heads that does not divide the width is refused at once, where the text's output layer fails in the first
call; inputs without a length are read as one position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.errors import ShapeError
from manyheads.extras.texts.common import (
    KeepsWeights,
    TextShapeError,
    also,
    check_at_least,
    check_axes,
    check_heads,
    dropout_layer,
    explain,
    refuse_added,
    shape_of,
)

__all__ = [
    "MultiHeadAttention",
    "PrepareForMultiHeadAttention",
    "RelativeMultiHeadAttention",
    "shift_right",
    "tracker",
]


class Tracker:
    """The part of `labml.tracker` that the text uses: the last value under each name is in `last`."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}

    def debug(self, name: str, value: Any) -> None:
        """Keep a value, without its gradient, until the next one of this name."""
        self.last[name] = value.detach() if isinstance(value, Tensor) else value


tracker = Tracker()
"""What every module of this text reports to: `tracker.last["attn"]` has the weights of the last call of any of them."""


class PrepareForMultiHeadAttention(nn.Module):
    """A linear map, and a split into heads.

    >>> PrepareForMultiHeadAttention(512, heads=8, d_k=64, bias=True)(torch.zeros(10, 2, 512)).shape
    torch.Size([10, 2, 8, 64])
    """

    def __init__(self, d_model: int, heads: int, d_k: int, bias: bool) -> None:
        super().__init__()
        check_at_least(1, d_model=d_model, heads=heads, d_k=d_k)
        self.linear = nn.Linear(d_model, heads * d_k, bias=bias)
        self.heads = heads
        self.d_k = d_k

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (length, batch, d_model) -> (length, batch, heads, d_k), or both without the length."""
        if shape_of("the input", x, "length, batch, d_model")[-1:] != (self.linear.in_features,):
            raise also(ShapeError, RuntimeError)(
                f"the input has shape {tuple(x.shape)}, but its last axis must be d_model {self.linear.in_features}."
            )
        return self.linear(x).unflatten(-1, (self.heads, self.d_k))  # type: ignore[no-any-return]


class MultiHeadAttention(KeepsWeights):
    """Multi-head attention; `attn` (queries, keys, batch, heads) has the weights of the last call after dropout.

        >>> mha = MultiHeadAttention(heads=8, d_model=512).eval()
        >>> query, key = torch.randn(10, 2, 512), torch.randn(7, 2, 512)
        >>> mha(query=query, key=key, value=key, mask=torch.ones(10, 7, 2).tril()).shape, mha.attn.shape
        (torch.Size([10, 2, 512]), torch.Size([10, 7, 2, 8]))

    A subclass can override `get_scores` and `prepare_mask`.
    """

    kept = "attn"

    def __init__(self, heads: int, d_model: int, dropout_prob: float = 0.1, bias: bool = True) -> None:
        super().__init__()
        check_heads(d_model, heads, ("d_model", "heads"), RuntimeError, ZeroDivisionError, TypeError)
        self.d_k = d_model // heads
        self.heads = heads
        self.query = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=bias)
        self.key = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=bias)
        self.value = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=True)
        self.softmax = nn.Softmax(dim=1)
        self.output = nn.Linear(d_model, d_model)
        self.dropout = dropout_layer(dropout_prob, "dropout_prob")
        self.scale = 1 / math.sqrt(self.d_k)

    def get_scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the scores before the scale.

        Shape: (queries, batch, heads, d_k), (keys, batch, heads, d_k) -> (queries, keys, batch, heads).
        """
        check_axes("query", query, "queries, batch, heads, d_k", ValueError, RuntimeError)
        check_axes("key", key, "keys, batch, heads, d_k", ValueError, RuntimeError)
        return torch.einsum("ibhd,jbhd->ijbh", query, key)

    def prepare_mask(self, mask: Tensor, query_shape: Sequence[int], key_shape: Sequence[int]) -> Tensor:
        """Check a mask (queries or 1, keys, batch or 1) and add an axis for the heads.

        Args: query_shape, key_shape: (length, batch, d_model).
        """
        check_axes("mask", mask, "queries, keys, batch", AssertionError, IndexError)
        refuse_added(mask)
        wanted = (query_shape[0], key_shape[0], query_shape[1])
        if not _fits(mask, wanted):
            turn = ""
            if _fits(mask.permute(1, 2, 0), wanted):
                turn = "; this one seems to be (batch, queries, keys): give mask.permute(1, 2, 0)"
            elif _fits(mask, (query_shape[1], key_shape[1], query_shape[0])):
                turn = "; the query seems to be (batch, length, d_model): give x.transpose(0, 1)"
            raise also(ShapeError, AssertionError)(
                f"the mask has shape {tuple(mask.shape)}; it must be (queries or 1, keys, batch or 1), here {wanted},"
                f" for a query of shape {tuple(query_shape)} and a key of shape {tuple(key_shape)}, (length, batch,"
                f" d_model){turn}."
            )
        return mask.unsqueeze(-1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return (queries, batch, d_model).

        Args:
            query, key, value: (length, batch, d_model); (batch, d_model) is one position.
            mask: see `prepare_mask`.
        """
        shape_of("query", query, "length, batch, d_model")
        is_one_position = query.dim() == 2
        query, key, value = (x[None] if isinstance(x, Tensor) and x.dim() == 2 else x for x in (query, key, value))
        self._check(query, key, value)
        prepared = None if mask is None else self.prepare_mask(mask, list(query.shape), list(key.shape))
        q, k, v = self.query(query), self.key(key), self.value(value)
        scores = self.get_scores(q, k) * self.scale
        attn = self._softmax(scores, prepared)
        tracker.debug("attn", attn)
        attn = self.dropout(attn)
        x = torch.einsum("ijbh,jbhd->ibhd", attn, v).flatten(2)
        self.attn = attn.detach()
        out: Tensor = self.output(x)
        return out[0] if is_one_position else out

    def _softmax(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Return the weights: the softmax over the keys, axis 1."""
        if mask is None:
            return self.softmax(scores)  # type: ignore[no-any-return]
        blocked = mask == 0
        # With a finite number a query without allowed keys has equal weights, which become zeros, and no NaN.
        weights: Tensor = self.softmax(scores.masked_fill(blocked, torch.finfo(scores.dtype).min))
        return weights.masked_fill(blocked, 0.0)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, x in {"query": query, "key": key, "value": value}.items():
            check_axes(name, x, "length, batch, d_model", ValueError, RuntimeError)
        shapes = f"query, key and value have shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        if not query.shape[1] == key.shape[1] == value.shape[1]:
            raise also(ShapeError, RuntimeError)(
                f"{shapes}, read as (length, batch, d_model): they must have one batch size, the second axis; where the"
                " batch comes first, give x.transpose(0, 1)."
            )
        if key.shape[0] != value.shape[0]:
            raise also(ShapeError, RuntimeError)(f"{shapes}; each key needs one value, along the first axis.")


def shift_right(x: Tensor) -> Tensor:
    """Move row i of the first axis by i places along the second one; what enters on the left means nothing.

        >>> shift_right(torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]))
        tensor([[1, 2, 3],
                [0, 4, 5],
                [6, 0, 7]])

    Shape: (rows, columns, ...) in and out.
    """
    if len(shape_of("x", x, "rows, columns, ...")) < 2:
        raise also(ShapeError, IndexError, RuntimeError)(
            f"x has shape {tuple(x.shape)}; it must have two axes or more."
        )
    longer_rows = torch.cat([x, torch.zeros_like(x[:, :1])], dim=1)
    return longer_rows.flatten(0, 1)[: x.shape[0] * x.shape[1]].reshape(x.shape)


class RelativeMultiHeadAttention(MultiHeadAttention):
    """Attention with a trained vector and score for each distance, like `nn.LearnedRelativeMultiHeadAttention`.

    Row P - d of the tables belongs to a key d places before the query; the last query is where the last key is.
    """

    def __init__(self, heads: int, d_model: int, dropout_prob: float = 0.1) -> None:
        super().__init__(heads, d_model, dropout_prob, bias=False)
        self.P = 2**12
        self.key_pos_embeddings = nn.Parameter(torch.zeros(2 * self.P, heads, self.d_k))
        self.key_pos_bias = nn.Parameter(torch.zeros(2 * self.P, heads))
        self.query_pos_bias = nn.Parameter(torch.zeros(heads, self.d_k))

    def get_scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the scores before the scale: by content, and by distance.

        Shape: (queries, batch, heads, d_k), (keys, batch, heads, d_k) -> (queries, keys, batch, heads).
        Raises: TextShapeError: there are more than P queries or keys.
        """
        content = super().get_scores(query, key) + torch.einsum("hd,jbhd->jbh", self.query_pos_bias, key)
        if max(query.shape[0], key.shape[0]) > self.P:
            raise TextShapeError(
                f"there are {query.shape[0]} queries and {key.shape[0]} keys, but vectors for {self.P} distances;"
                " shorten the sequences."
            )
        rows = slice(self.P - key.shape[0], self.P + query.shape[0])
        by_row = torch.einsum("ibhd,rhd->irbh", query, self.key_pos_embeddings[rows])
        by_distance = shift_right(by_row + self.key_pos_bias[rows][:, None])
        return content + by_distance[:, -key.shape[0] :]


def _fits(mask: Tensor, sizes: tuple[int, int, int]) -> bool:
    return mask.shape[1] == sizes[1] and mask.shape[0] in (1, sizes[0]) and mask.shape[2] in (1, sizes[2])


explain(globals())
