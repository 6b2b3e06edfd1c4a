"""The figures in docs/scaling.md are those that benchmarks/scaling.py computes, and these are what they say."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks" / "scaling.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_holds_what_is_computed(scaling: ModuleType) -> None:
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    lines = [line for line in scaling.page() if line]
    assert len(lines) > 12
    for line in lines:
        assert line in text


def test_estimates_follow_from_the_counts(scaling: ModuleType) -> None:
    big = scaling.wmt14_big()
    assert big.weights == pytest.approx(213e6, rel=0.01)  # Vaswani et al. 2017, table 3
    one, eight = (scaling.estimate(big, scaling.A100, ranks, "ddp") for ranks in (1, 8))
    assert eight.compute_seconds == pytest.approx(one.compute_seconds / 8)
    assert (one.sent_bytes, eight.sent_bytes) == (0, pytest.approx(2 * 7 / 8 * 4 * big.weights))
    parts = scaling.estimate(big, scaling.A100, 8, "fsdp")
    assert parts.state_bytes == pytest.approx(4 * big.weights * (4 / 8 + 1))
    assert parts.sent_bytes == pytest.approx(1.5 * eight.sent_bytes)
    assert scaling.billion_xl().tokens * scaling.billion_xl().steps == pytest.approx(4e9, rel=1e-4)
