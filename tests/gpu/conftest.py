"""Tests for GPUs. They import torch, pytest, `manyheads.nn` and the models, and nothing else.

Every test runs on the CPU as well, so that it is itself tested where there is no GPU.
"""

from collections.abc import Iterator

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device on this machine"))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    """float32 products in float32 and not in TF32, and the same random numbers for every test."""
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
