"""Token embeddings and position encodings. Without positions attention does not know the order of the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import ConfigError, ShapeError
from manyheads.nn.shapes import Float, Int, check_axes, check_sizes, explained


class TokenEmbedding(nn.Embedding):
    """A table of vectors, which are scaled so that position encodings are not much larger than they are.

    Paper: Vaswani et al. 2017, sec. 3.4: the weights are multiplied by sqrt(d_model).
    Args:
        vocab_size: rows.
        d_model: width.
        scale: multiply by sqrt(d_model).

    The table is initialised with N(0, 1 / d_model), so the output has variance 1 with the scale, and the initial logits
    of a head that shares the table have variance near 1.
    """

    def __init__(self, vocab_size: int, d_model: int, *, scale: bool = True) -> None:
        check_sizes(vocab_size=vocab_size, d_model=d_model)
        self.scale = math.sqrt(d_model) if scale else 1.0
        super().__init__(vocab_size, d_model)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    @property
    def token_table(self) -> Tensor:
        """The weights, (ids, width): by this name the input and the output of every model are found."""
        return self.weight

    def facts(self) -> tuple[str, ...]:
        """Return what drawings show of the module: its name, and lines with its sizes."""
        scale = f", times √{self.embedding_dim:,}" if self.scale != 1.0 else ""
        return "Embedding", f"{self.num_embeddings:,} tokens x {self.embedding_dim:,}{scale}"

    def equation(self) -> tuple[str, str]:
        """Return the name and the equation of the output, for tables of a model's tensors."""
        return "embedded", "√d_model · E[ids]" if self.scale != 1.0 else "E[ids]"

    @explained
    def forward(self, ids: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length d_model"]:
        return super().forward(ids) * self.scale


class FeatureEmbedding(nn.Embedding):
    """The sum of the vectors of each position's features, such as the subwords and endings of a word.

        >>> FeatureEmbedding(100, 16)(torch.randint(100, (2, 5, 3))).shape
        torch.Size([2, 5, 16])

    Args:
        num_features: rows.
        d_model: width.
        none: the id that stands for no feature; None: every id is one.
        dropout: probability that a feature is not read in training; for tables in which 0 is no feature.
    """

    def __init__(self, num_features: int, d_model: int, *, none: int | None = 0, dropout: float = 0.0) -> None:
        check_sizes(num_features=num_features, d_model=d_model)
        super().__init__(num_features, d_model)
        self.none = none
        self.dropout = dropout

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.05)

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        return "Sum of features", f"{self.num_embeddings:,} features x {self.embedding_dim:,}"

    def equation(self) -> tuple[str, str]:
        """See `TokenEmbedding.equation`."""
        return "sum of features", "Σ E[f], f the features of a position"

    @explained
    def forward(self, ids: Int[Tensor, "batch length features"]) -> Float[Tensor, "batch length d_model"]:
        if self.training and self.dropout:
            ids = ids * (torch.rand(ids.shape, device=ids.device) >= self.dropout)
        summed = F.embedding_bag(ids.flatten(0, 1), self.weight, mode="sum", padding_idx=self.none)
        return summed.view(*ids.shape[:2], self.embedding_dim)


def sinusoidal_table(
    positions: Float[Tensor, " length"],
    d_model: int,
    layout: Literal["interleaved", "halves"] = "interleaved",
    base: float = 10_000.0,
) -> Float[Tensor, "length d_model"]:
    """Sines and cosines of geometrically spaced frequencies.

        >>> sinusoidal_table(torch.arange(60.0), d_model=32).shape
        torch.Size([60, 32])

    Paper: Vaswani et al. 2017, sec. 3.5: PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the
        same.
    Args:
        positions: any real numbers, also larger than those in training.
        d_model: width; an odd one ends with a sine.
        layout: `interleaved` as in the paper, or `halves`: all sines, then all cosines (Marian and Transformer-XL).
        base: in place of 10000.

    Returns: float32 for every compute type, because in bfloat16 neighbouring positions would be equal.
    Raises: ConfigError: d_model is below 1, or the layout is unknown.
    """
    check_axes("positions", positions, "length")
    check_sizes(d_model=d_model)
    if layout not in ("interleaved", "halves"):
        raise ConfigError(f"layout is {layout!r}; it must be 'interleaved' or 'halves'.")
    # Computed in float64: at position 10,000 a float32 product would be wrong in the fourth digit. MPS has no float64.
    place = torch.device("cpu") if positions.device.type == "mps" else positions.device
    angle = _angles(positions.to(place), d_model, base)
    sine, cosine = angle.sin(), angle.cos()[:, : d_model // 2]
    if layout == "halves":
        table = torch.cat([sine, cosine], dim=1)
    else:
        table = angle.new_empty(positions.shape[0], d_model)
        table[:, 0::2], table[:, 1::2] = sine, cosine
    return table.to(torch.float32).to(positions.device)


def _angles(positions: Tensor, d_model: int, base: float) -> Tensor:
    """Return pos / base^(2i / d_model) in float64: (length, ceil(d_model / 2))."""
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=positions.device)
    return positions.to(torch.float64)[:, None] * torch.exp(even * (-math.log(base) / d_model))


def _end(first_position: int | Tensor, length: int, most: int | None, limit: int | None = None) -> int:
    """Return how many positions are needed, or an upper bound that is not over the limit.

    Args: most: an upper bound of the first positions, which are then not read: a GPU would have to be waited for.
    """
    if isinstance(first_position, int):
        return first_position + length
    if most is not None and (limit is None or most + length <= limit):
        return most + length
    return (int(first_position.max()) if len(first_position) else 0) + length


def _rows(table: Tensor, first_position: int | Tensor, length: int) -> Tensor:
    """Return the table's rows from that position on: (length, d_model), or (batch, length, d_model)."""
    if isinstance(first_position, int):
        return table[first_position : first_position + length]
    return table[first_position[:, None] + torch.arange(length, device=table.device)]


class ExactTable(nn.Module):
    """A float32 table that is computed, not trained. A cast of the model, such as `module.bfloat16()`, leaves it exact.

    It is a cache, not a limit: `rows_from_zero` makes it longer, and it is never saved. On the meta device, where a
    model stands before its weights are loaded, there is nothing to compute yet.

    Paper: Vaswani et al. 2017, sec. 3.5. Shape: table (positions, d_model). Args: layout: see `sinusoidal_table`.
    """

    table: Tensor

    def __init__(self, d_model: int, layout: Literal["interleaved", "halves"]) -> None:
        super().__init__()
        self.d_model = d_model
        self.layout: Literal["interleaved", "halves"] = layout
        is_meta = torch.get_default_device().type == "meta"
        self.register_buffer("table", torch.empty(0, d_model) if is_meta else self._computed(512), persistent=False)

    def _computed(self, count: int, device: torch.device | None = None) -> Tensor:
        return sinusoidal_table(torch.arange(float(count), device=device), self.d_model, self.layout)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExactTable:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.table.dtype != torch.float32:
            self.table = self._computed(len(self.table), self.table.device)
        return self

    def rows_from_zero(self, count: int) -> Tensor:
        """Return the encodings of at least `count` positions, from 0 on: (positions, d_model), float32."""
        if count > self.table.shape[0]:
            self.table = self._computed(max(512, 1 << (count - 1).bit_length()), self.table.device)
        return self.table


class SinusoidalPositions(ExactTable):
    """Adds `sinusoidal_table` to its input, for sequences of any length.

        >>> SinusoidalPositions(16)(torch.zeros(2, 5, 16)).shape
        torch.Size([2, 5, 16])

    Args: d_model: width; layout: see `sinusoidal_table`.
    """

    def __init__(self, d_model: int, *, layout: Literal["interleaved", "halves"] = "interleaved") -> None:
        super().__init__(d_model, layout)

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        return "Sinusoidal positions", *([] if self.layout == "interleaved" else ["all sines first"])

    def equation(self) -> tuple[str, str]:
        """See `TokenEmbedding.equation`."""
        order = "interleaved" if self.layout == "interleaved" else "sines first"
        formula = "PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos"
        return "with positions", f"x + PE; {formula}, {order}"

    @explained
    def forward(
        self,
        x: Float[Tensor, "batch length d_model"],
        first_position: int | Int[Tensor, " batch"] = 0,
        most: int | None = None,
    ) -> Float[Tensor, "batch length d_model"]:
        """Return x plus the encodings of first_position, first_position + 1, ...; summed in float32, in x's type.

        Args: most: see `rows`.
        """
        check_axes("x", x, "batch, length, d_model", self.d_model)
        return (x + self.rows(first_position, x.shape[1], most)).to(x.dtype)

    def rows(self, first_position: int | Tensor, length: int, most: int | None = None) -> Tensor:
        """Return the encodings of `length` positions: (length, d_model) float32, or with a leading batch axis for
        several starts. Args: most: an upper bound of the first positions; None: they are read.
        """
        return _rows(self.rows_from_zero(_end(first_position, length, most)), first_position, length)


class RotaryPositions(ExactTable):
    """Rotates queries and keys by angles that grow with the position, so that scores depend on distances alone.

        >>> query = torch.randn(2, 4, 5, 16)
        >>> RotaryPositions(16)(query, first_position=3).shape
        torch.Size([2, 4, 5, 16])

    Paper: Su et al. 2021, arXiv:2104.09864, eq. 15 and 34. Differs: features i and i + head_dim / 2 are a pair, as in
        Llama and GPT-NeoX, where the paper has 2i and 2i + 1: the same up to the order of a head's features.
    Args:
        head_dim: width of queries and keys in a head, even.
        base: the slowest pair's wavelength is about 2 pi x base positions.
        scaling: for texts longer than those of training. `linear`: positions are divided by factor (Chen et al. 2023,
            arXiv:2306.15595, eq. 4). `ntk`: base is multiplied by factor^(head_dim / (head_dim - 2)), so that the
            slowest pair turns factor times as slowly, and the fastest as before (Peng et al. 2023, arXiv:2309.00071,
            sec. 3.1).
        factor: see scaling.

    State dict: nothing. Raises: ConfigError: head_dim is odd, or the scaling is unknown.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10_000.0,
        scaling: Literal["none", "linear", "ntk"] = "none",
        factor: float = 1.0,
    ) -> None:
        if head_dim < 2 or head_dim % 2:
            raise ConfigError(f"head_dim is {head_dim}; rotary positions turn pairs of features, so it must be even.")
        if scaling not in ("none", "linear", "ntk"):
            raise ConfigError(f"scaling is {scaling!r}; it must be 'none', 'linear' or 'ntk'.")
        # One pair turns by 1 at each position, whatever the base.
        widened = factor ** (head_dim / (head_dim - 2)) if scaling == "ntk" and head_dim > 2 else 1.0
        self.base, self.slower = base * widened, factor if scaling == "linear" else 1.0
        super().__init__(head_dim, "halves")

    @classmethod
    def of(cls, config: Any, head_dim: int) -> RotaryPositions | None:
        """Return those of a config with `rotary_base`, `rotary_scaling` and `rotary_factor`; None: other positions."""
        if config.positions != "rotary":
            return None
        return cls(head_dim, base=config.rotary_base, scaling=config.rotary_scaling, factor=config.rotary_factor)

    def _computed(self, count: int, device: torch.device | None = None) -> Tensor:
        positions = torch.arange(float(count), device=device) / self.slower
        return sinusoidal_table(positions, self.d_model, "halves", self.base)

    @explained
    def forward(
        self,
        x: Float[Tensor, "batch heads length head_dim"],
        first_position: int | Int[Tensor, " batch"] = 0,
    ) -> Float[Tensor, "batch heads length head_dim"]:
        """Return queries or keys at first_position, first_position + 1, ..., rotated."""
        check_axes("x", x, "batch, heads, length, head_dim", self.d_model)
        return rotate(x, self.rows(first_position, x.shape[2], x.dtype))

    def rows(
        self,
        first_position: int | Tensor,
        length: int,
        dtype: torch.dtype = torch.float32,
        most: int | None = None,
    ) -> Tensor:
        """Return the sines, then the cosines of `length` positions, as `SinusoidalPositions.rows`: what `rotate` takes.

        Args: dtype: of what will be rotated; for float64 the rows are computed exactly, otherwise they are float32.
            most: as there.
        """
        if dtype == torch.float64:
            steps = torch.arange(length, device=self.table.device)
            first = first_position[:, None] if isinstance(first_position, Tensor) else first_position
            places = (first + steps).to(torch.float64) / self.slower
            angle = _angles(places.flatten(), self.d_model, self.base).view(*places.shape, -1)
            return torch.cat([angle.sin(), angle.cos()], dim=-1)
        return _rows(self.rows_from_zero(_end(first_position, length, most)), first_position, length)


def rotate(
    x: Float[Tensor, "batch heads length head_dim"], rows: Float[Tensor, "*batch length head_dim"]
) -> Float[Tensor, "batch heads length head_dim"]:
    """Return x with its pairs of features turned; in x's type. rows: of `RotaryPositions.rows`."""
    sine, cosine = (rows if rows.dim() == 2 else rows[:, None]).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


class LearnedPositions(nn.Module):
    """Adds a trained vector per position (Gehring et al. 2017), up to `max_len` of them.

        >>> LearnedPositions(16, max_len=8)(torch.zeros(2, 5, 16)).shape
        torch.Size([2, 5, 16])

    Raises: ShapeError: a sequence is longer than max_len.
    """

    without_decay: tuple[str, ...] = ("weight",)

    def __init__(self, d_model: int, *, max_len: int) -> None:
        super().__init__()
        check_sizes(d_model=d_model, max_len=max_len)
        self.max_len = max_len
        self.weight = nn.Parameter(torch.empty(max_len, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        return "Trained positions", f"{self.max_len:,} positions"

    def equation(self) -> tuple[str, str]:
        """See `TokenEmbedding.equation`."""
        return "with positions", "x + P[pos]"

    @explained
    def forward(
        self,
        x: Float[Tensor, "batch length d_model"],
        first_position: int | Int[Tensor, " batch"] = 0,
        most: int | None = None,
    ) -> Float[Tensor, "batch length d_model"]:
        check_axes("x", x, "batch, length, d_model", self.weight.shape[1])
        return x + self.rows(first_position, x.shape[1], most)

    def rows(self, first_position: int | Tensor, length: int, most: int | None = None) -> Tensor:
        """Return the same as `SinusoidalPositions.rows`, in the weights' type.

        Raises: ShapeError: a position is not below max_len.
        """
        end = _end(first_position, length, most, self.max_len)
        if end > self.max_len:
            raise ShapeError(
                f"a sequence of {end} tokens is longer than the {self.max_len} learned positions of this model;"
                " shorten the input, or train with sinusoidal positions, which have no limit."
            )
        return _rows(self.weight, first_position, length)


class AxialPositions(nn.Module):
    """Adds trained vectors of a position's coordinates in a grid: one for its row and one for its column, concatenated.

        >>> AxialPositions(shape=(8, 16), dims=(4, 12))(torch.zeros(2, 100, 16)).shape
        torch.Size([2, 100, 16])

    Paper: Kitaev et al. 2020, arXiv:2001.04451, appendix of the code (trax); Ho et al. 2019, arXiv:1912.12180.
    Position p of a grid (a, b) is in row p // b and column p % b; with more axes the last changes fastest.
    Args:
        shape: the grid's sizes, any number of axes; their product is the maximum sequence length.
        dims: width of each axis's vectors; they sum to the model's.

    State dict: `weights.i` of shape (1, ..., shape[i], ..., 1, dims[i]), which broadcasts over the grid.
    Raises: ConfigError: not one width per axis, or a number below 1. ShapeError: a sequence is longer than the grid.
    """

    without_decay: tuple[str, ...] = ("weights",)

    def __init__(self, shape: Sequence[int], dims: Sequence[int]) -> None:
        super().__init__()
        if not shape or len(shape) != len(dims) or min(*shape, *dims) < 1:
            raise ConfigError(
                f"axial shape {list(shape)} and dims {list(dims)} do not match; give one width for each axis, all at"
                " least 1."
            )
        self.shape, self.dims = tuple(shape), tuple(dims)
        self.max_len = math.prod(self.shape)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(*(size if i == axis else 1 for i in range(len(shape))), dims[axis]))
            for axis, size in enumerate(shape)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every axis with N(0, 0.02), so that all have the same scale."""
        for weight in self.weights:
            nn.init.normal_(weight, std=0.02)

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        return "Axial positions", f"grid {' x '.join(map(str, self.shape))}, widths {' + '.join(map(str, self.dims))}"

    def equation(self) -> tuple[str, str]:
        """See `TokenEmbedding.equation`."""
        # Position p of a grid (a, b) is in row p // b and column p % b.
        parts, below = [], 1
        for number, size in reversed(list(enumerate(self.shape, start=1))):
            place = "pos" if below == 1 else f"⌊pos / {below}⌋"
            parts.append(f"P{'₀₁₂₃₄₅₆₇₈₉'[number % 10]}[{place}{f' mod {size}' if number > 1 else ''}]")
            below *= size
        return "with positions", f"x + [{', '.join(reversed(parts))}], side by side"

    @explained
    def forward(
        self,
        x: Float[Tensor, "batch length d_model"],
        first_position: int | Int[Tensor, " batch"] = 0,
        most: int | None = None,
    ) -> Float[Tensor, "batch length d_model"]:
        """Return x plus the vectors of first_position, first_position + 1, ...; each row may have its own first
        position.

        Only the required positions are looked up, so a short sequence computes and trains only those of each axis.
        Args: most: an upper bound of the first positions; None: they are read.
        """
        check_axes("x", x, "batch, length, d_model", sum(self.dims))
        steps = torch.arange(x.shape[1], device=x.device)
        positions = first_position[:, None] + steps if isinstance(first_position, Tensor) else first_position + steps
        end = _end(first_position, x.shape[1], most, self.max_len)
        if end > self.max_len:
            raise ShapeError(
                f"a sequence of {end:,} tokens is longer than the {self.max_len:,} axial positions of this model"
                f" ({' x '.join(map(str, self.shape))}); shorten the input, or train with a larger axial_shape, or with"
                " sinusoidal positions, which have no limit."
            )
        parts, stride = [], self.max_len
        for weight, size in zip(self.weights, self.shape, strict=True):
            stride //= size
            parts.append(weight.view(size, -1)[torch.div(positions, stride, rounding_mode="floor") % size])
        return x + torch.cat(parts, dim=-1)


class NoPositions(nn.Module):
    """Adds nothing, for models whose attention knows distances. Args: d_model: width."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    def forward(
        self, x: Float[Tensor, "batch length d_model"], first_position: int | Int[Tensor, " batch"] = 0
    ) -> Float[Tensor, "batch length d_model"]:
        return x

    def rows(self, first_position: int | Tensor, length: int, most: int | None = None) -> Tensor:
        """Return zeros in the shape of `SinusoidalPositions.rows` for one start, on the CPU."""
        return torch.zeros(length, self.d_model, device="cpu")


def positions_of_kind(kind: str, d_model: int, max_len: int) -> LearnedPositions | NoPositions | SinusoidalPositions:
    """Return `learned`, `sinusoidal` or `sinusoidal_halves` positions, or `none`; attention has `rotary` ones itself.

    Args: max_len: of learned ones.
    """
    if kind in ("none", "rotary"):
        return NoPositions(d_model)
    if kind == "learned":
        return LearnedPositions(d_model, max_len=max_len)
    return SinusoidalPositions(d_model, layout="halves" if kind == "sinusoidal_halves" else "interleaved")
