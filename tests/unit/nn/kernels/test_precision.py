"""What `auto` chooses: by the measured rates, or by the environment variable that replaces them."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from manyheads.errors import ConfigError
from manyheads.nn.kernels import measuring, precision
from manyheads.nn.kernels.precision import LEAST_SPEED_UP, OVERRIDE, PrecisionMeasurement, measure_precision

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No override, and nothing kept from an earlier measurement."""
    monkeypatch.delenv(OVERRIDE, raising=False)
    precision._measure.cache_clear()
    yield
    precision._measure.cache_clear()


@pytest.mark.parametrize(
    ("factor", "choice"), [(0.01, "fp32"), (1.0, "fp32"), (1.29, "fp32"), (LEAST_SPEED_UP, "bf16"), (8.0, "bf16")]
)
def test_bf16_is_chosen_from_the_least_speed_up_on(factor: float, choice: str) -> None:
    assert PrecisionMeasurement(100.0, 100.0 * factor).choice == choice


def test_both_precisions_are_measured_and_threads_are_as_before() -> None:
    threads = torch.get_num_threads()
    found = measure_precision(CPU)
    assert found.fp32_gflops is not None
    assert found.fp32_gflops > 0
    assert found.bf16_gflops is not None
    assert found.bf16_gflops > 0
    assert found.bf16_factor == found.bf16_gflops / found.fp32_gflops
    assert found.choice == ("bf16" if found.bf16_factor >= LEAST_SPEED_UP else "fp32")
    assert torch.get_num_threads() == threads
    assert measure_precision(CPU) is found  # kept for the process


def _with_products(
    monkeypatch: pytest.MonkeyPatch, gflops: dict[torch.dtype, float], launch_seconds: float = 0.0
) -> list[tuple[int, int]]:
    """Let products take the time of these rates, by a clock of their own. Returns: the sizes that were measured."""
    clock = SimpleNamespace(now=0.0)
    sizes: list[tuple[int, int]] = []

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not gflops[x.dtype]:
            raise RuntimeError("no such product")
        (rows, width) = x.shape
        sizes.append((rows, width))
        clock.now += launch_seconds + 2 * rows * width**2 / 1e9 / gflops[x.dtype]
        return x

    monkeypatch.setattr(precision, "linear", multiply)
    for module in (precision, measuring):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return sizes


def test_sizes_grow_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _with_products(monkeypatch, {torch.float32: 100.0, torch.bfloat16: 1.0})
    assert measure_precision(CPU).bf16_factor == pytest.approx(0.01)
    assert set(slow) == {(64, 256)}
    precision._measure.cache_clear()
    fast = _with_products(monkeypatch, {torch.float32: 500.0, torch.bfloat16: 1500.0})
    assert measure_precision(CPU).bf16_factor == pytest.approx(3.0)
    assert fast[-1][0] > 64
    assert sum(2 * rows * width**2 for rows, width in fast) / 1e9 / 500 < 2 * precision.MAX_SECONDS


def test_on_a_gpu_the_launch_of_a_product_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """With small products the ratio of the rates would be about 1, whatever the device can do."""
    rates = {torch.float32: 50_000.0, torch.bfloat16: 700_000.0}
    sizes = _with_products(monkeypatch, rates, launch_seconds=20e-6)
    found = measure_precision(torch.device("meta"))  # any device that is not a CPU
    assert len(set(sizes)) == 1
    assert found.bf16_factor == pytest.approx(14, rel=0.2)
    assert found.choice == "bf16"


def test_a_device_without_bf16_products_takes_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_products(monkeypatch, {torch.float32: 100.0, torch.bfloat16: 0.0})
    found = measure_precision(CPU)
    assert (found.choice, found.has_bf16) == ("fp32", False)


def test_the_least_of_several_times_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that another program interrupted says nothing of the machine."""
    ticks = itertools.accumulate([0.0, 9.0, 0.5, 0.0, 0.001], lambda now, more: now + more)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert precision._seconds(CPU, torch.float32, 2, 2) == pytest.approx(0.001)


@pytest.mark.parametrize("word", ["fp32", "bf16"])
def test_the_environment_variable_decides(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv(OVERRIDE, word)
    found = measure_precision(CPU)
    assert (found.choice, found.bf16_factor, found.has_bf16) == (word, None, True)


def test_an_unknown_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, "fp16")
    with pytest.raises(ConfigError, match=r"MANYHEADS_PRECISION is 'fp16'; set it to fp32 or bf16, or unset it"):
        measure_precision(CPU)
