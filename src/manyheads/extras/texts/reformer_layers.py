"""Layers of `reformer`: feed-forward, norms, reversible blocks and positions. Its docstring names the differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from manyheads.extras.texts.common import (
    TextIndexError,
    TextShapeError,
    TextValueError,
    also,
    check_at_least,
    check_rates,
    check_shape,
    explain,
    shape_of,
)
from manyheads.extras.texts.reformer_attention import LSHAttention
from manyheads.nn.kernels.reversible import through_sublayers


class FeedForward(nn.Module):
    """w2 act(w1 x), or w2 (act(a) x b) with a, b = w1 x for `glu`: (..., dim) -> (..., dim)."""

    def __init__(
        self,
        dim: int,
        mult: int = 4,
        dropout: float = 0.0,
        activation: Callable[[], nn.Module] | None = None,
        glu: bool = False,
    ) -> None:
        super().__init__()
        check_at_least(1, dim=dim, mult=mult)
        check_rates(dropout=dropout)
        self.glu = glu
        self.w1 = nn.Linear(dim, dim * mult * (2 if glu else 1))
        self.act = nn.GELU() if activation is None else activation()
        self.dropout = nn.Dropout(dropout)
        self.w2 = nn.Linear(dim * mult, dim)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        check_shape("x", x, ["...", self.w1.in_features])
        inner, gate = self.w1(x).chunk(2, dim=-1) if self.glu else (self.w1(x), 1.0)
        return cast(Tensor, self.w2(self.dropout(self.act(inner) * gate)))


class Chunk(nn.Module):
    """A function of each position, computed for some positions at a time, which needs less memory."""

    def __init__(self, chunks: int, fn: nn.Module, along_dim: int = -1) -> None:
        super().__init__()
        check_at_least(1, chunks=chunks)
        self.dim, self.chunks, self.fn = along_dim, chunks, fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        axes = len(shape_of("x", x, "..., length, width"))
        if not -axes <= self.dim < axes:
            raise also(TextShapeError, IndexError)(
                f"x has the shape {tuple(x.shape)}, which has no axis {self.dim} to cut; give along_dim."
            )
        if self.chunks == 1:
            return cast(Tensor, self.fn(x, **kwargs))
        return torch.cat([self.fn(part, **kwargs) for part in x.chunk(self.chunks, dim=self.dim)], dim=self.dim)


class PreNorm(nn.Module):
    """fn(norm(x))."""

    def __init__(self, norm_class: Callable[[int], nn.Module], dim: int, fn: nn.Module) -> None:
        super().__init__()
        check_at_least(1, dim=dim)
        self.norm, self.fn, self.dim = norm_class(dim), fn, dim

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        check_shape("x", x, ["...", self.dim])
        return cast(Tensor, self.fn(self.norm(x), **kwargs))


class ScaleNorm(nn.Module):
    """g x / |x|, with one trained number g (Nguyen and Salazar 2019, arXiv:1910.05895, sec. 2.2)."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        check_at_least(1, dim=dim)
        self.g, self.eps = nn.Parameter(torch.ones(1)), eps

    def forward(self, x: Tensor) -> Tensor:
        check_shape("x", x, ["...", "width"])
        return F.normalize(x, dim=-1, eps=self.eps) * self.g


class ReZero(nn.Module):
    """g fn(x), with one trained number g that begins at 0 (Bachlechner et al. 2020, arXiv:2003.04887, eq. 1)."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.g, self.fn = nn.Parameter(torch.zeros(1)), fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return cast(Tensor, self.fn(x, **kwargs) * self.g)


class Deterministic(nn.Module):
    """A part of a reversible layer that can repeat a call with the same random numbers."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.recorded: tuple[Tensor, list[int], list[Tensor]] | None = None

    def record_rng(self, *args: Any) -> None:
        """Keep the state of the random generators, of the CPU and of the arguments' devices."""
        self.recorded = (torch.get_rng_state(), *get_device_states(*args))

    def forward(self, *args: Any, record_rng: bool = False, set_rng: bool = False, **kwargs: Any) -> Tensor:
        """Call the part. record_rng: as the call to repeat; set_rng: repeat it."""
        if record_rng:
            self.record_rng(*args)
        if not set_rng or self.recorded is None:
            return cast(Tensor, self.net(*args, **kwargs))
        state, devices, states = self.recorded
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(state)
            set_device_states(devices, states)
            return cast(Tensor, self.net(*args, **kwargs))


class ReversibleBlock(nn.Module):
    """y1 = x1 + f(x2), y2 = x2 + g(y1), both streams in one tensor: (batch, length, 2 dim) -> the same."""

    def __init__(self, f: nn.Module, g: nn.Module, depth: int | None = None, send_signal: bool = False) -> None:
        super().__init__()
        self.f, self.g, self.depth, self.send_signal = Deterministic(f), Deterministic(g), depth, send_signal

    def forward(
        self, x: Tensor, f_args: Mapping[str, Any] | None = None, g_args: Mapping[str, Any] | None = None
    ) -> Tensor:
        x1, x2 = _streams(x)
        y1 = x1 + self.f(x2, record_rng=self.training, **f_args or {})
        return torch.cat([y1, x2 + self.g(y1, record_rng=self.training, **g_args or {})], dim=2)

    def backward_pass(
        self, y: Tensor, dy: Tensor, f_args: Mapping[str, Any] | None = None, g_args: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs of the last forward pass and their gradient, from its outputs and theirs.

        The gradients of parameters are added to their `grad`. Paper: sec. 3, eq. 8: x2 = y2 - g(y1), x1 = y1 - f(x2).
        """
        check_shape("dy", dy, tuple(y.shape) if isinstance(y, Tensor) else [], "the gradient of y")
        (y1, y2), (dy1, dy2) = _streams(y), _streams(dy)
        gy1, dy1 = _repeated(self.g, y1, dy2, dy1, g_args)
        x2 = y2 - gy1
        fx2, dy2 = _repeated(self.f, x2, dy1, dy2, f_args)
        return torch.cat([y1 - fx2, x2], dim=2).detach(), torch.cat([dy1, dy2], dim=2)


def _repeated(
    part: nn.Module, x: Tensor, grad_out: Tensor, grad_in: Tensor, arguments: Mapping[str, Any] | None
) -> tuple[Tensor, Tensor]:
    """Return a part's output, and grad_in plus the gradient of its input."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        out: Tensor = part(leaf, set_rng=True, **arguments or {})
        torch.autograd.backward(out, grad_out)
    assert leaf.grad is not None
    return out.detach(), grad_in + leaf.grad


class IrreversibleBlock(nn.Module):
    """The same parts under the original's second names."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g


class _WithArguments(nn.Module):
    """A part of a layer as `kernels.reversible.Sublayer`. names: of the shared tensors that the part is given."""

    chunk_len = 0

    def __init__(self, part: nn.Module, arguments: Mapping[str, Any], names: Sequence[str]) -> None:
        super().__init__()
        self.part, self.arguments, self.names = part, arguments, names

    def forward(
        self, x: Tensor, context: Any, shared: tuple[Tensor, ...], kept: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Sublayer`. The backward pass uses the buckets of the forward pass, because its inputs are rounded."""
        hashing = [module for module in self.part.modules() if isinstance(module, LSHAttention)]
        noted: list[Tensor] = []
        replayed = None if kept is None else list(kept)
        for module in hashing:
            module.noted, module.replayed = noted, replayed
        try:
            return self.part(x, **self.arguments, **dict(zip(self.names, shared, strict=False))), tuple(noted)
        finally:
            for module in hashing:
                module.noted = module.replayed = None


def _streams(x: Tensor) -> tuple[Tensor, Tensor]:
    if len(shape_of("x", x, "batch, length, 2 dim")) != 3 or x.shape[2] % 2:
        raise TextShapeError(
            f"x has the shape {tuple(x.shape)}; it must be (batch, length, 2 dim), two streams side by side, for"
            " example torch.cat([x, x], dim=-1)."
        )
    first, second = x.chunk(2, dim=2)
    return first, second


class ReversibleSequence(nn.Module):
    """Reversible layers: the backward pass stores two streams, whatever the number of layers.

    Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 3.
    Args:
        blocks: pairs of modules f and g.
        layer_dropout: probability that training leaves out a layer.
        reverse_thres: sequences up to this length use ordinary backpropagation.
    """

    def __init__(
        self,
        blocks: Iterable[Iterable[nn.Module]],
        layer_dropout: float = 0.0,
        reverse_thres: int = 0,
        send_signal: bool = False,
    ) -> None:
        super().__init__()
        check_rates(layer_dropout=layer_dropout)
        self.layer_dropout, self.reverse_thres = layer_dropout, reverse_thres
        pairs = [tuple(pair) for pair in blocks]
        if any(len(pair) != 2 for pair in pairs):
            raise TextValueError(
                f"blocks have {', '.join(str(len(pair)) for pair in pairs)} modules; give a pair (f, g) for each layer."
            )
        self.blocks = nn.ModuleList(ReversibleBlock(f, g, depth, send_signal) for depth, (f, g) in enumerate(pairs))
        self.irrev_blocks = nn.ModuleList(IrreversibleBlock(f, g) for f, g in pairs)

    def forward(self, x: Tensor, arg_route: tuple[bool, bool] = (True, False), **kwargs: Any) -> Tensor:
        """(batch, length, 2 dim) -> the same. arg_route: whether f and g are given the keyword arguments."""
        streams, blocks = _streams(x), cast(list[ReversibleBlock], list(self.blocks))
        if self.training and self.layer_dropout > 0:
            stays = torch.rand(len(blocks)) >= self.layer_dropout
            blocks = [block for block, keep in zip(blocks, stays, strict=True) if keep] or blocks[:1]
        # Tensors such as the keys of an encoder have gradients, too.
        shared = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in kwargs.items() if name not in shared}
        given = [(others, list(shared)) if goes else ({}, []) for goes in arg_route]
        parts = [
            _WithArguments(part, *arguments)
            for block in blocks
            for part, arguments in zip((block.f, block.g), given, strict=True)
        ]
        reversible = x.shape[1] > self.reverse_thres
        return torch.cat(through_sublayers(parts, *streams, None, tuple(shared.values()), reversible=reversible), dim=2)


def _check_length(x: Tensor, axis: int) -> None:
    if len(shape_of("x", x, "batch, length, ...")) <= axis:
        raise also(TextShapeError, IndexError)(
            f"x has the shape {tuple(x.shape)}; its axis {axis} must be the length, as in (batch, length, dim)."
        )


class AbsolutePositionalEmbedding(nn.Module):
    """A trained vector for each position: (batch, length, ...) -> (length, dim)."""

    def __init__(self, dim: int, max_seq_len: int) -> None:
        super().__init__()
        check_at_least(1, dim=dim, max_seq_len=max_seq_len)
        self.emb = nn.Embedding(max_seq_len, dim)

    def forward(self, x: Tensor) -> Tensor:
        _check_length(x, 1)
        if x.shape[1] > self.emb.num_embeddings:
            raise TextIndexError(
                f"the length is {x.shape[1]}, but max_seq_len is {self.emb.num_embeddings}; cut the sequence, or make"
                " the model with a larger max_seq_len."
            )
        return cast(Tensor, self.emb(torch.arange(x.shape[1], device=x.device)))


class AxialPositionalEmbedding(nn.Module):
    """Trained vectors of rows and columns of a grid: (batch, length, dim) -> (1, length, dim).

    Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 4 (by Ho et al. 2019, arXiv:1912.12180).
    Args: axial_shape: the grid, whose sizes multiply to the longest input. axial_dims: widths of the vectors, which
        are then one after another and sum to dim; None: each has dim, and they are added.
    """

    def __init__(self, dim: int, axial_shape: Sequence[int], axial_dims: Sequence[int] | None = None) -> None:
        super().__init__()
        check_at_least(1, dim=dim, **{f"axial_shape[{place}]": size for place, size in enumerate(axial_shape)})
        widths = (dim,) * len(axial_shape) if axial_dims is None else tuple(axial_dims)
        if len(widths) != len(axial_shape) or (axial_dims is not None and sum(widths) != dim):
            raise TextValueError(
                f"axial_dims are {widths}; they must be {len(axial_shape)}, one for each axis of {tuple(axial_shape)},"
                f" and sum to dim {dim}.",
                fields=["axial_dims"],
            )
        self.shape, self.summed, self.max_seq_len = tuple(axial_shape), axial_dims is None, math.prod(axial_shape)
        axes = range(len(self.shape))
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(1, *(self.shape[axis] if axis == own else 1 for axis in axes), width))
            for own, width in enumerate(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        _check_length(x, 1)
        if x.shape[1] > self.max_seq_len:
            raise also(TextIndexError, AssertionError)(
                f"the length is {x.shape[1]}, but axial_shape {self.shape} has {self.max_seq_len} positions; cut the"
                " sequence, or give a larger grid."
            )
        parts = [weight.expand(1, *self.shape, -1).flatten(1, -2) for weight in self.weights]
        table = torch.stack(parts).sum(0) if self.summed else torch.cat(parts, dim=-1)
        return table[:, : x.shape[1]].to(x)


class FixedPositionalEmbedding(nn.Module):
    """Sines, then cosines, of positions: (batch, length, ...) -> (1, length, dim)."""

    inv_freq: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim)))

    def forward(self, x: Tensor, seq_dim: int = 1) -> Tensor:
        _check_length(x, seq_dim)
        angles = torch.arange(x.shape[seq_dim], device=x.device).type_as(self.inv_freq)[:, None] * self.inv_freq
        return torch.cat([angles.sin(), angles.cos()], dim=-1)[None].type_as(x)


class Always(nn.Module):
    """Returns one value, for the original's module names."""

    def __init__(self, val: Any) -> None:
        super().__init__()
        self.val = val

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.val


class MatrixMultiply(nn.Module):
    """x times a matrix, transposed and with rows of unit length on request: logits by the embedding's vectors."""

    def __init__(self, tensor: Tensor, transpose: bool = False, normalize: bool = False) -> None:
        super().__init__()
        self.tensor, self.transpose, self.normalize = tensor, transpose, normalize

    def forward(self, x: Tensor) -> Tensor:
        matrix = F.normalize(self.tensor, dim=-1) if self.normalize else self.tensor
        return x @ (matrix.t() if self.transpose else matrix)


explain(globals())
