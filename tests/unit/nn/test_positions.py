"""Sinusoidal and learned positions."""

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.overrides import TorchFunctionMode

from manyheads.errors import ConfigError, ShapeError
from manyheads.nn.attention.relative import DistanceEncoding
from manyheads.nn.positions import AxialPositions, ExactTable, LearnedPositions, SinusoidalPositions, sinusoidal_table


def spelled_out(position: float, d_model: int, layout: str) -> list[float]:
    """Vaswani et al. 2017, sec. 3.5, number by number."""
    sines = [math.sin(position / 10_000 ** (2 * i / d_model)) for i in range((d_model + 1) // 2)]
    cosines = [math.cos(position / 10_000 ** (2 * i / d_model)) for i in range(d_model // 2)]
    if layout == "halves":
        return sines + cosines
    return [(sines if i % 2 == 0 else cosines)[i // 2] for i in range(d_model)]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 33), st.integers(0, 100_000), st.sampled_from(["interleaved", "halves"]))
def test_the_papers_formula_for_any_width_and_position(d_model: int, position: int, layout: Any) -> None:
    """Odd widths too, and the first frequency is 1 (a printed matrix skips it)."""
    row = sinusoidal_table(torch.tensor([float(position)]), d_model, layout)
    assert row.dtype == torch.float32
    torch.testing.assert_close(row[0], torch.tensor(spelled_out(position, d_model, layout)), atol=1e-6, rtol=0.0)


class OnMps(TorchFunctionMode):
    """Tensors are on MPS, which has no float64, until they are moved to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.on_cpu: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        is_moved = any(one is other for one in given for other in self.on_cpu)
        if func == Tensor.device.__get__:
            return torch.device("cpu" if is_moved else "mps")
        places = [one.type for one in given if isinstance(one, torch.device)]
        is_moved = places == ["cpu"] if places else is_moved
        assert is_moved or not any(one is torch.float64 for one in given), "MPS has no float64"
        args, named = ([self._here(one) for one in some] for some in (args, (kwargs or {}).values()))
        out = func(*args, **dict(zip(kwargs or (), named, strict=True)))
        if isinstance(out, Tensor):
            out = out.clone() if any(out is one for one in args) else out
            self.on_cpu += [out] if is_moved else []
        return out

    def _here(self, one: Any) -> Any:
        return torch.device("cpu") if isinstance(one, torch.device) else one


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_a_device_without_float64(layout: Any) -> None:
    wanted = sinusoidal_table(torch.arange(600.0), 6, layout)
    with OnMps():
        found = inspect.unwrap(sinusoidal_table)(torch.arange(600.0), 6, layout)
        place = found.device
    assert place.type == "mps"
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("length", [1, 511, 512, 513, 6000])
def test_any_length(length: int) -> None:
    """Past 512, where the cache first ends, and past 5,000, where the printed code ends."""
    positions = SinusoidalPositions(6)
    wanted = sinusoidal_table(torch.arange(float(length)), 6)
    assert torch.equal(positions(torch.zeros(1, length, 6))[0], wanted)
    assert torch.equal(positions(torch.zeros(1, 1, 6), length - 1)[0, 0], wanted[-1])
    assert positions.state_dict() == {}


@pytest.mark.parametrize("way", ["autocast", "converted"])
def test_bfloat16_keeps_positions_apart(way: str) -> None:
    """Angles built in bfloat16 have 407 distinct values for 601 positions; the table stays float32 instead."""
    positions = SinusoidalPositions(16)
    if way == "converted":
        positions = positions.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
        positions(torch.zeros(1, 500, 16))  # within the first table, so that nothing is computed anew for its length
    assert positions.table.dtype == torch.float32
    assert torch.equal(positions.table[:500], sinusoidal_table(torch.arange(500.0), 16))
    out = positions(torch.zeros(1, 601, 16, dtype=torch.bfloat16 if way == "converted" else torch.float32))
    assert out.dtype == (torch.bfloat16 if way == "converted" else torch.float32)
    assert len(torch.unique(out[0].float(), dim=0)) == 601


def test_learned_positions() -> None:
    positions = LearnedPositions(4, max_len=6)
    x = torch.randn(2, 3, 4)
    assert torch.equal(positions(x, 2), x + positions.weight[2:5])
    assert positions(torch.zeros(1, 6, 4)).shape == (1, 6, 4)
    with pytest.raises(ShapeError, match="7 tokens is longer than the 6"):
        positions(x, 4)


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="d_model is 0"):
        sinusoidal_table(torch.arange(3.0), 0)
    with pytest.raises(ConfigError, match="'spiral'"):
        inspect.unwrap(sinusoidal_table)(torch.arange(3.0), 4, "spiral")


@pytest.mark.parametrize(
    ("shape", "dims"), [((4, 8), (2, 4)), ((8, 4), (3, 3)), ((5,), (6,)), ((2, 3, 4), (1, 2, 3)), ((1, 7), (5, 1))]
)
def test_axial_positions(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    """Position by position: the coordinates of a grid whose last axis runs fastest; for any length that fits."""
    positions, most = AxialPositions(shape, dims), math.prod(shape)
    assert [name for name, _ in positions.named_parameters()] == [f"weights.{i}" for i in range(len(shape))]
    tables = [weight.detach().reshape(size, -1) for weight, size in zip(positions.weights, shape, strict=True)]
    wanted = []
    for point in itertools.product(*(range(size) for size in shape)):
        wanted.append(torch.cat([table[i] for table, i in zip(tables, point, strict=True)]))
    for length in {1, 2, most - 1, most}:
        assert torch.equal(positions(torch.zeros(2, length, 6))[1], torch.stack(wanted[:length]))
    assert torch.equal(positions(torch.zeros(1, 2, 6), most - 2)[0], torch.stack(wanted[-2:]))
    with pytest.raises(ShapeError, match=f"a sequence of {most + 1} tokens is longer than the {most} axial"):
        positions(torch.zeros(1, 2, 6), most - 1)


def test_axial_positions_that_do_not_occur_have_no_gradient() -> None:
    """In training any length up to the product is as good as another."""
    positions = AxialPositions((4, 8), (2, 4))
    positions(torch.zeros(1, 11, 6)).sum().backward()
    rows, columns = positions.weights
    assert rows.grad.view(4, 2)[:, 0].tolist() == [8, 3, 0, 0]
    assert columns.grad.view(8, 4)[:, 0].tolist() == [2, 2, 2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("shape", "dims"), [((), ()), ((4,), (2, 4)), ((4, 0), (2, 4)), ((4, 8), (6, 0))], ids=str)
def test_axes_that_do_not_fit(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="give one width for each axis"):
        AxialPositions(shape, dims)


@pytest.mark.parametrize(
    "positions",
    [SinusoidalPositions(6), LearnedPositions(6, max_len=40), AxialPositions((5, 8), (2, 4))],
    ids=lambda one: type(one).__name__,
)
def test_rows_may_begin_at_places_of_their_own(positions: Any) -> None:
    x = torch.randn(3, 4, 6)
    firsts = [0, 7, 36]
    found = positions(x, torch.tensor(firsts))
    for row, first in enumerate(firsts):
        torch.testing.assert_close(found[row : row + 1], positions(x[row : row + 1], first))
    if not isinstance(positions, SinusoidalPositions):
        with pytest.raises(ShapeError, match="of 41 tokens"):
            positions(x, torch.tensor([0, 37, 1]))


@pytest.mark.parametrize("kind", [SinusoidalPositions, DistanceEncoding])
def test_a_cast_and_back_leaves_the_table_exact(kind: Callable[[int], ExactTable]) -> None:
    module = kind(16)
    before = module.table.clone()
    assert torch.equal(module.bfloat16().float().table, before)
    assert torch.equal(module.half().table, before)
