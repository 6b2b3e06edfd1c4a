"""Attention with relative positions, so that hidden states can be reused as memory.

Paper: Dai et al. 2019, arXiv:1901.02860, sec. 3.3. `nn/kernels/relative.py` computes the scores. Its first product,
(q + u) . k, is terms (a) and (c) of the paper; its second, (q + v) . r, is terms (b) and (d).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import ConfigError, ShapeError
from manyheads.nn.attention.masks import Mask, refuse_tensor
from manyheads.nn.attention.multi_head import (
    WEIGHING,
    TensorLine,
    biased_projections,
    heads_fact,
    merge_heads,
    output_tensor,
    projected_tensors,
    split_heads,
    width_of_heads,
)
from manyheads.nn.kernels.dropout import dropout
from manyheads.nn.kernels.linear import Packed, linears
from manyheads.nn.kernels.relative import relative_attention, relative_weights
from manyheads.nn.layers import Linear
from manyheads.nn.positions import ExactTable, sinusoidal_table
from manyheads.nn.shapes import Float, Int, check_rates, check_sizes, explained

if TYPE_CHECKING:
    from manyheads.nn.attention.relative_bias import RelativeBias


class DistanceEncoding(ExactTable):
    """Sinusoidal encodings of integer distances, in float32 for every compute dtype.

    Distances stay integers: in bfloat16, 601 distances would be rounded to only 407 different numbers.
    Paper: Dai et al. 2019, sec. 3.3. Symbols: R = the result; all sines come before all cosines, as in the official
        code.
    Args: d_model: width of an encoding.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, "halves")

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        return "Distances", "sinusoids of i - j"

    def equation(self) -> tuple[str, str]:
        """See `TokenEmbedding.equation`."""
        return "encoded distances R", "sin, then cos of (i - j) / 10000^(2k/d)"

    def forward(self, distances: Int[Tensor, "*shape"], longest: int) -> Float[Tensor, "*shape d_model"]:
        """Return the encoding of each distance.

        Args: distances: at least 0; longest: an upper bound of them, so that their values need not be read.
        """
        return F.embedding(distances, self.rows_from_zero(longest + 1))


class RelativeAttention(nn.Module):
    """Multi-head self-attention by content and distance, over a memory and the positions after it.

        >>> attention = RelativeAttention(d_model=16, num_heads=4)
        >>> hidden, memory = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
        >>> out, weights = attention(hidden, memory, need_weights=True)
        >>> out.shape, weights.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 4, 5, 8]))
        >>> whole = attention(torch.cat([memory, hidden], dim=1))  # only distances matter
        >>> torch.allclose(whole[:, 3:], out, atol=1e-5)
        True

    Paper: Dai et al. 2019, sec. 3.3. Symbols: W_q, W_k,E, W_v = q_proj, k_proj, v_proj; W_k,R = position_proj; u, v =
        content_bias, position_bias. With relative_bias, a number for each near distance is added to the scores (Raffel
        et al. 2020, sec. 2.1).
    Args:
        d_model: width of input and output.
        num_heads: number of heads.
        head_dim: width of a head; None: d_model / num_heads. num_heads x head_dim may differ from d_model.
        dropout: rate on the attention weights, in training.
        bias: False: no projection has a bias, as in the paper; True: all four have one; or the names of those that do.
        relative_bias: for causal attention.
        fused: by Triton kernels on an NVIDIA GPU, which have a first derivative only; what they cannot compute is
            refused. An attribute, too. See `fused_relative_attention`.

    To share u and v between layers, assign the parameters of one layer to the others.
    Raises: ConfigError: a size is below 1; head_dim is None and num_heads does not divide d_model; bias contains
        another name; or relative_bias is for another number of heads.
    """

    causal = True
    """True if no query sees a later key, whatever the mask."""
    packed: Packed | None = None
    fused = False

    without_decay: tuple[str, ...] = ("content_bias", "position_bias")
    kind = "relative attention"
    inputs: tuple[str, ...] = ("Q", "K", "r", "V")
    sees_whole = True

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        dropout: float = 0.0,
        bias: bool | Collection[str] = False,
        relative_bias: RelativeBias | None = None,
        fused: bool = False,
    ) -> None:
        super().__init__()
        head_dim = width_of_heads(d_model, num_heads) if head_dim is None else head_dim
        check_sizes(d_model=d_model, num_heads=num_heads, head_dim=head_dim)
        check_rates(dropout=dropout)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.dropout_rate = dropout
        inner, biased = num_heads * head_dim, biased_projections(bias)
        self.q_proj = Linear(d_model, inner, bias="q_proj" in biased)
        self.k_proj = Linear(d_model, inner, bias="k_proj" in biased)
        self.v_proj = Linear(d_model, inner, bias="v_proj" in biased)
        self.out_proj = Linear(inner, d_model, bias="out_proj" in biased)
        self.content_bias = nn.Parameter(torch.empty(num_heads, head_dim))
        self._make_position_parameters(d_model)
        if relative_bias is not None:
            relative_bias.check_heads(num_heads)
        self.relative_bias = relative_bias
        self.fused = fused
        self.weights_hook: Callable[[Tensor], None] | None = None
        self.reset_parameters()

    def _make_position_parameters(self, d_model: int) -> None:
        self.position_proj = Linear(d_model, self.num_heads * self.head_dim, bias=False)
        self.position_bias: nn.Parameter | None = nn.Parameter(torch.empty(self.num_heads, self.head_dim))

    def packed_maps(self) -> tuple[nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        bias = [] if self.relative_bias is None else ["a trained number for each distance"]
        return self.kind, heads_fact(self), self._distances_fact(), *bias

    def _distances_fact(self) -> str:
        return "distances: sinusoids"

    _distances_equation = "r = R W_R, in heads"
    _scores_equation = "((q + u)·k + (q + v)·r) / √d_k"

    def tensors(self, output: Tensor, seen: Tensor | None, is_cross: bool = False) -> Iterator[TensorLine]:
        """See `MultiHeadAttention.tensors`."""
        assert seen is not None
        lines = list(projected_tensors(self, output, seen, is_cross=is_cross))
        yield from lines
        yield "distances", lines[1][1][1:], self._distances_equation
        bias = "" if self.relative_bias is None else " + b(j - i)"
        yield "weights", tuple(seen.shape), f"A = softmax({self._scores_equation}{bias})"
        yield output_tensor(self, output)

    def operations(self) -> Iterator[tuple[str, str]]:
        """See `MultiHeadAttention.operations`."""
        yield "MatMul", "(Q + u) Kᵀ, by content"
        yield "MatMul, shift, add", "(Q + v) rᵀ, by distance i - j"
        yield "Scale", f"1 / √{self.head_dim}"
        if self.relative_bias is not None:
            yield "Add distances", "+ a trained number for each head and j - i"
        yield from WEIGHING

    def reset_parameters(self) -> None:
        """Initialise weights with N(0, 0.02), as in the official code, which has no biases, and biases with zero; for
        the relative bias see `RelativeBias`.
        """
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)
        if self.relative_bias is not None:
            self.relative_bias.reset_parameters()
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def encoded_distances(self, q_len: int, k_len: int, like: Tensor) -> Tensor:
        """Return the argument of `project_positions` for queries at the last positions of the keys.

        Args: like: a tensor with the device and dtype of the result.
        Returns: encodings (k_len, d_model), farthest distance first; (k_len + q_len - 1, d_model) unless causal.
        """
        distances = _distances(q_len, k_len, self.causal, like.device)
        return sinusoidal_table(distances.float(), self.q_proj.in_features, "halves").to(like.dtype)

    def project_positions(self, distances: Float[Tensor, "k_len d_model"]) -> tuple[Tensor, Tensor | None]:
        """Return r for every distance, the same for all rows of the batch.

        Args: distances: encodings, farthest distance first.
        Returns: (heads, k_len, head_dim), and a trained score per distance (heads, k_len), before the division by
            sqrt(head_dim); the score is None without a relative bias.
        """
        positions = self.position_proj(distances).unflatten(-1, (self.num_heads, self.head_dim)).transpose(0, 1)
        if self.relative_bias is None:
            return positions, None
        return positions, self.relative_bias.of_keys(distances.shape[0]) * math.sqrt(self.head_dim)

    def project_query(self, x: Tensor) -> Tensor:
        """Project queries: (batch, q_len, d_model) -> (batch, heads, q_len, head_dim)."""
        return split_heads(self.q_proj(x), self.num_heads)

    def project_memory(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Project keys and values: (batch, q_len, d_model) -> (batch, heads, k_len, head_dim) each.

        Args: memory: hidden states before x, (batch, memory_len, d_model).
        """
        k, v = linears(x if memory is None else torch.cat([memory, x], dim=1), self.k_proj, self.v_proj)
        return split_heads(k, self.num_heads), split_heads(v, self.num_heads)

    def project_together(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project q, k and v of the same x: (batch, q_len, d_model) -> (batch, heads, q_len, head_dim) each."""
        parts = linears(x, *self.packed_maps(), packed=self.packed)
        q, k, v = (split_heads(part, self.num_heads) for part in parts)
        return q, k, v

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        distance_bias: Tensor | None,
        mask: Mask | None,
    ) -> Float[Tensor, "batch q_len d_model"]:
        """Attend with projected heads, merge the heads and apply the output projection; see `relative_attention`."""
        if self.weights_hook is not None:
            return self.attend_openly(q, k, v, positions, distance_bias, mask)[0]
        rate = self.dropout_rate if self.training else 0.0
        parts = (positions, self.content_bias, self.position_bias, distance_bias)
        heads = relative_attention(q, k, v, *parts, mask, rate, self.causal, self.fused)
        out: Tensor = self.out_proj(merge_heads(heads))
        return out

    def attend_openly(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        distance_bias: Tensor | None,
        mask: Mask | None,
    ) -> tuple[Float[Tensor, "batch q_len d_model"], Float[Tensor, "batch heads q_len k_len"]]:
        """Return the result of `attend`, and the weights before dropout."""
        weights = relative_weights(
            q, k, positions, self.content_bias, self.position_bias, distance_bias, mask, self.causal
        )
        if self.weights_hook is not None:
            self.weights_hook(weights)
        rate = self.dropout_rate if self.training else 0.0
        heads = torch.matmul(dropout(weights, rate), v)
        out: Tensor = self.out_proj(merge_heads(heads))
        return out, weights

    @explained
    def forward(
        self,
        x: Float[Tensor, "*batch q_len d_model"],
        memory: Float[Tensor, "*batch memory_len d_model"] | None = None,
        distances: Tensor | None = None,
        mask: Mask | None = None,
        *,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from every position of x to the memory and to x.

        Args:
            x: (batch, q_len, d_model), or one sequence without a batch axis, (q_len, d_model).
            memory: hidden states before x, (batch, memory_len, d_model); normalised if x is.
            distances: the argument of `project_positions`, one row per distance; None: `encoded_distances` of them.
            mask: further restrictions over the keys, which are memory and x.
            need_weights: also return the attention weights before dropout.

        Returns: (batch, q_len, d_model), and with `need_weights` (batch, heads, q_len, k_len); without a batch axis if
            x has none.
        Raises: ShapeError: x has neither two nor three axes, or another width than d_model; the mask is a tensor.
        """
        if x.dim() == 2:
            before = None if memory is None else memory[None]
            answer = self.forward(x[None], before, distances, mask, need_weights=True)
            return (answer[0][0], answer[1][0]) if need_weights else answer[0][0]
        if x.dim() != 3:
            raise ShapeError(f"x of shape {tuple(x.shape)} must be (batch, q_len, d_model), or (q_len, d_model).")
        if x.shape[2] != self.q_proj.in_features:
            raise ShapeError(
                f"x has shape {tuple(x.shape)}, so its width is {x.shape[2]}, but this attention was made for d_model"
                f" {self.q_proj.in_features}; change the input, or make it with d_model={x.shape[2]}."
            )
        refuse_tensor(mask)
        k, v = self.project_memory(x, memory)
        if distances is None:
            distances = self.encoded_distances(x.shape[1], k.shape[2], x)
        given = (self.project_query(x), k, v, *self.project_positions(distances), mask)
        return self.attend_openly(*given) if need_weights else self.attend(*given)


def _distances(q_len: int, k_len: int, causal: bool, device: torch.device) -> Int[Tensor, " num_distances"]:
    """Return the distances from k_len - 1 down to 0 if causal, otherwise down to -(q_len - 1)."""
    return torch.arange(k_len - 1, -1 if causal else -q_len, -1, device=device)


class LearnedRelativeAttention(RelativeAttention):
    """Relative attention with a trained key and a trained score for every distance and head.

        >>> attention = LearnedRelativeAttention(16, 4, max_len=64, num_future=63)
        >>> attention(torch.randn(2, 5, 16)).shape  # every position sees all others
        torch.Size([2, 5, 16])

    Paper: Shaw et al. 2018, arXiv:1803.02155, in the form of the official Transformer-XL's attention type 1.
    Args:
        max_len: number of distances from 0 with vectors of their own; larger distances use the last vector.
        num_future: number of distances below 0, of keys after the query, with vectors of their own; lower distances use
            the first vector. 0: no query sees a later key.
        others: see `RelativeAttention`.

    Shape: distance_embedding (num_future + max_len, heads, head_dim), distance_bias (num_future + max_len, heads), in
        order of distance from -num_future.
    Raises: ConfigError: as `RelativeAttention`; max_len is below 1, or num_future below 0.
    """

    without_decay: tuple[str, ...] = ("content_bias", "distance_embedding", "distance_bias")

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        max_len: int,
        num_future: int = 0,
        dropout: float = 0.0,
        bias: bool | Collection[str] = False,
    ) -> None:
        if max_len < 1 or num_future < 0:
            raise ConfigError(f"max_len is {max_len} and num_future {num_future}; they must be at least 1 and 0.")
        self.max_len, self.num_future, self.causal = max_len, num_future, num_future == 0
        super().__init__(d_model, num_heads, head_dim, dropout=dropout, bias=bias)

    def _make_position_parameters(self, d_model: int) -> None:
        self.position_bias = None
        distances = self.num_future + self.max_len
        self.distance_embedding = nn.Parameter(torch.empty(distances, self.num_heads, self.head_dim))
        self.distance_bias = nn.Parameter(torch.empty(distances, self.num_heads))

    inputs = ("Q", "K", "V")
    _distances_equation = "a trained row per distance i - j"
    _scores_equation = "((q + u)·k + q·r + b) / √d_k"

    def _distances_fact(self) -> str:
        return f"a trained vector for each of {self.max_len:,} distances"

    def operations(self) -> Iterator[tuple[str, str]]:
        """See `MultiHeadAttention.operations`."""
        yield "MatMul", "(Q + u) Kᵀ"
        yield "Add distances", "Q r + b, trained for each i - j"
        yield "Scale", f"1 / √{self.head_dim}"
        yield from WEIGHING

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.distance_bias)

    def encoded_distances(self, q_len: int, k_len: int, like: Tensor) -> Tensor:
        return _distances(q_len, k_len, self.causal, like.device)

    def project_positions(self, distances: Int[Tensor, " num_distances"]) -> tuple[Tensor, Tensor | None]:
        """Return the rows of both tables. distances: integer distances, farthest first."""
        rows = distances.clamp(-self.num_future, self.max_len - 1) + self.num_future
        return self.distance_embedding[rows].transpose(0, 1), self.distance_bias[rows].t()
