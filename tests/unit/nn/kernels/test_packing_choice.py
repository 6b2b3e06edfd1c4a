"""Which float32 weights are packed: by measurement, where oneDNN is not faster in general."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from manyheads.nn.kernels import policy
from manyheads.nn.kernels.linear import Packed
from manyheads.nn.kernels.measuring import ROUNDS, least_seconds, mean_gain
from manyheads.nn.linear import Linear

pytestmark = pytest.mark.skipif(not policy.has_packing(), reason="this build of torch has no oneDNN")


@pytest.fixture
def gains(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], float]:
    """What measurements find, by (out_features, in_features), on a processor where oneDNN is not faster in general."""
    found: dict[tuple[int, int], float] = {}
    monkeypatch.setattr(policy, "onednn_is_faster", lambda: False)
    monkeypatch.setattr(policy, "packing_gain", lambda *sizes: found[sizes])
    return found


def test_chosen_by_the_measured_gain(gains: dict[tuple[int, int], float]) -> None:
    gains[8000, 256] = 1.6
    gains[4096, 512] = 1.19
    assert policy.packs(torch.empty(8000, 256))
    assert not policy.packs(torch.empty(20_000, 512))  # measured with fewer rows
    assert not policy.packs(torch.empty(256, 256))  # too small to be measured


def test_only_as_few_rows_as_were_measured(gains: dict[tuple[int, int], float]) -> None:
    gains[4096, 128] = 2.0
    one = Linear(128, 4096)
    packed = Packed(one)
    assert Packed.is_worthwhile(one)
    with torch.no_grad():
        assert packed.serves(torch.randn(128, 128), one)
        assert packed.serves(torch.randn(4, 32, 128), one)
        assert not packed.serves(torch.randn(129, 128), one)
        x = torch.randn(32, 128)
        torch.testing.assert_close(packed.linear(x), F.linear(x, one.weight, one.bias), atol=1e-5, rtol=1e-5)


def test_a_measurement_times_both_in_turn_with_one_thread() -> None:
    threads, order = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        found = least_seconds(
            lambda: order.append(("plain", torch.get_num_threads())),
            lambda: order.append(("fast", torch.get_num_threads())),
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert order == [("plain", 1), ("fast", 1)] * (1 + ROUNDS)
    assert len(found) == 2
    assert min(found) > 0


def test_the_gain_is_a_geometric_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([[8.0, 1.0], [1.0, 2.0]])
    monkeypatch.setattr("manyheads.nn.kernels.measuring.least_seconds", lambda *calls: next(times))
    assert mean_gain((int, int), (int, int)) == 2.0


def test_a_real_measurement() -> None:
    assert policy.packing_gain(64, 64) > 0
