"""benchmarks/complexity.py: what is measured grows as the papers' tables say."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

BenchmarkModule = Callable[[str], ModuleType]
LENGTH = 128


@pytest.fixture
def complexity(benchmark_module: BenchmarkModule) -> ModuleType:
    return benchmark_module("complexity")


@pytest.mark.parametrize(
    ("name", "flops", "peak"), [("scaled dot product", 4.0, 3.72), ("LSH, r rounds, chunks of c", 2.0, 2.0)]
)
def test_attention_grows_with_the_length(complexity: ModuleType, name: str, flops: float, peak: float) -> None:
    one, two = (complexity.attention(name, length) for length in (LENGTH, 2 * LENGTH))
    assert two.flops / one.flops == pytest.approx(flops, rel=0.02)
    assert two.peak / one.peak == pytest.approx(peak, rel=0.05)


def test_memory_of_reversible_layers_does_not_grow_with_their_number(complexity: ModuleType) -> None:
    one, two = (complexity.model("Reformer", LENGTH, layers) for layers in (2, 4))
    assert two.flops / one.flops == pytest.approx(2.0, rel=0.1)
    assert two.peak / one.peak < 1.02


@pytest.mark.slow
def test_every_row_is_measured(complexity: ModuleType) -> None:
    assert len(complexity.attention_table(LENGTH)) == 2 + len(complexity.ATTENTIONS)
    assert len(complexity.model_table(LENGTH)) == 2 + len(complexity.MODELS)
    efficient = [complexity.attention("memory-efficient", length) for length in (LENGTH, 2 * LENGTH)]
    assert efficient[1].peak / efficient[0].peak < 2.2
    plain = [complexity.model("Transformer", LENGTH, layers) for layers in (2, 4)]
    assert plain[1].peak / plain[0].peak > 1.5


def test_products_are_counted(complexity: ModuleType) -> None:
    """Once each: a product of matrices, of batches, one that is added, and SDPA's two."""
    one, several = torch.randn(3, 4), torch.randn(2, 3, 4)
    with complexity.Flops() as counter:
        one @ one.T
        several @ several.transpose(1, 2)
        torch.zeros(2, 3, 3).baddbmm_(several, several.transpose(1, 2))
    assert counter.total == 2 * 3 * 4 * 3 * (1 + 2 + 2)
    q = torch.randn(1, 2, 8, 4)
    with complexity.Flops() as counter:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert counter.total == 2 * (2 * 2 * 8 * 8 * 4)
