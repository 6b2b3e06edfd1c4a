"""The checks of shapes see what is wrong, also in a call after many that were right."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import shape_checks
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor, nn

from manyheads.nn.kernels.linear import product
from manyheads.nn.layers import Linear


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    shape_checks.forget()
    yield
    shape_checks.forget()


def checked(function: Callable[..., Any]) -> Any:
    return shape_checks.jaxtyped(function, typechecker=beartype)


def test_the_package_is_checked() -> None:
    assert product(torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)
    for _ in range(2):
        with pytest.raises(TypeCheckError, match=r"product"):
            product(torch.ones(2, 3), torch.ones(5, 4))
        with pytest.raises(TypeCheckError, match=r"product"):
            product(torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 4))
    with pytest.raises(TypeCheckError):
        Linear(3, 4)([1.0, 2.0, 3.0])


def test_a_call_of_another_kind_is_checked() -> None:
    calls: list[tuple[Any, ...]] = []

    @checked
    def halved(x: Float[Tensor, "batch width"], keep: bool, most: int) -> Float[Tensor, "batch width"]:
        calls.append((keep, most))
        return x if keep else x[:, : min(most, x.shape[1] // 2)]

    for _ in range(3):
        halved(torch.ones(2, 4), True, 1)
    assert len(calls) == 3
    for _ in range(2):  # what is wrong is refused each time
        with pytest.raises(TypeCheckError):
            halved(torch.ones(2, 4), False, 1)
        with pytest.raises(TypeCheckError):
            halved(torch.ones(4), True, 1)
        with pytest.raises(TypeCheckError):
            halved(torch.ones(2, 4).long(), True, 1)
        with pytest.raises(TypeCheckError):
            halved(torch.ones(2, 4), "yes", 1)
    halved(torch.ones(2, 0), False, 1)  # nothing to take away


def test_modules_of_other_sizes_are_of_another_kind() -> None:
    class Narrower(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.map = nn.Linear(4, width)

        @checked
        def forward(self, x: Float[Tensor, "batch width"]) -> Float[Tensor, "batch width"]:
            return self.map(x)  # type: ignore[no-any-return]

    for _ in range(2):
        assert Narrower(4)(torch.ones(2, 4)).shape == (2, 4)
    with pytest.raises(TypeCheckError):
        Narrower(3)(torch.ones(2, 4))


def test_a_call_of_the_same_kind_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = shape_checks._jaxtyped

    def counted(function: Any, **options: Any) -> Any:
        inner = real(function, **options)

        def call(*arguments: Any) -> Any:
            made.append(arguments)
            return inner(*arguments)

        return call

    monkeypatch.setattr(shape_checks, "_jaxtyped", counted)

    @checked
    def double(x: Float[Tensor, " length"]) -> Tensor:
        return 2 * x

    for size in (2, 3, 2, 3, 2):
        double(torch.ones(size))
    assert len(made) == 2
    shape_checks.forget()
    double(torch.ones(2))
    assert len(made) == 3


def test_fields_of_a_dataclass_are_checked():
    @checked
    @dataclass
    class Pair:
        left: Float[Tensor, "batch width"]
        right: Float[Tensor, "batch width"]

    for _ in range(2):
        assert Pair(torch.ones(2, 4), torch.ones(2, 4)).left.shape == (2, 4)
        with pytest.raises(TypeCheckError):
            Pair(torch.ones(2, 4), torch.ones(3, 4))


def test_so_many_kinds_of_calls_are_checked():
    @checked
    def same(x: Float[Tensor, " length"], y: Any) -> Float[Tensor, " length"]:
        return torch.cat([x, y])[: len(x) + len(y)]

    for size in range(shape_checks.MOST_KINDS - 1):
        same(torch.ones(size), torch.ones(0))
    with pytest.raises(TypeCheckError):
        same(torch.ones(2), torch.ones(1))
    same(torch.ones(shape_checks.MOST_KINDS), torch.ones(0))
    same(torch.ones(2), torch.ones(1))  # not checked any more
