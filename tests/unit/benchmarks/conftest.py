"""The scripts of benchmarks/ are no package: they import one another by name, from their own folder."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from manyheads.nn.kernels import policy

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script by name, imported as its neighbours import it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's counter of FLOPs knows matrix products, and not SDPA's kernel for CPUs."""
    monkeypatch.setattr(policy, "attention_path", lambda *_: "products")
