"""What measurements of speed decide in inference: which float32 weights are packed, where oneDNN is not faster in
general, and how beams attend. They decide nothing in a run.
"""

import pytest
import torch
import torch.nn.functional as F

from manyheads.nn.kernels import policy
from manyheads.nn.kernels.linear import Packed
from manyheads.nn.kernels.measuring import ROUNDS, least_seconds, packing_gain, products_gain
from manyheads.nn.layers import Linear
from manyheads.tasks.translation.settings import copy
from manyheads.training.run.device import computing

pytestmark = pytest.mark.skipif(not policy.has_packing(), reason="this build of torch has no oneDNN")


@pytest.fixture
def gain(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the measurement finds, on a processor where oneDNN is not faster in general."""
    found = [1.5]
    monkeypatch.setattr(policy, "onednn_is_faster", lambda: False)
    monkeypatch.setattr(policy, "packing_gain", lambda: found[0])
    return found


def test_chosen_by_the_measured_gain(gain: list[float]) -> None:
    large, small, wide = torch.empty(8000, 256), torch.empty(256, 256), torch.empty(256, 1024)
    assert policy.packs(large)
    assert policy.packs(small, small, small)  # one product of the three projections
    assert not policy.packs(small)
    assert not policy.packs(wide)
    gain[0] = 1.1
    assert not policy.packs(large)


def test_only_few_rows(gain: list[float]) -> None:
    one = Linear(128, 4096)
    packed = Packed(one)
    assert Packed.is_worthwhile(one)
    with torch.no_grad():
        assert packed.serves(torch.randn(128, 128), one)
        assert packed.serves(torch.randn(4, 32, 128), one)
        assert not packed.serves(torch.randn(129, 128), one)
        x = torch.randn(32, 128)
        torch.testing.assert_close(packed.linear(x), F.linear(x, one.weight, one.bias), atol=1e-5, rtol=1e-5)


def test_beams_attend_by_products_where_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [2.0]
    monkeypatch.setattr(policy, "onednn_is_faster", lambda: False)
    monkeypatch.setattr(policy, "products_gain", lambda: found[0])

    def path(queries: int, dtype: torch.dtype = torch.float32) -> str:
        query, key = (torch.empty(32, 4, length, 64, dtype=dtype) for length in (queries, 32))
        return policy.attention_path(query, key, key, 0.0)

    assert path(4) == "products"
    assert path(1) == path(9) == path(4, torch.bfloat16) == "sdpa"
    found[0] = 1.1
    assert path(4) == "sdpa"


def test_no_measurement_decides_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes may measure otherwise, and the validations of a resumed run would differ in the last bit."""
    monkeypatch.setattr(policy, "onednn_is_faster", lambda: False)
    monkeypatch.setattr(policy, "products_gain", lambda: 2.0)
    monkeypatch.setattr(policy, "packing_gain", lambda: 2.0)
    query, weight = torch.empty(32, 4, 4, 64), torch.empty(8000, 256)

    def chosen() -> tuple[str, bool]:
        return policy.attention_path(query, query, query, 0.0), policy.packs(weight)

    assert chosen() == ("products", True)
    with computing(copy(), torch.device("cpu")):
        assert chosen() == ("sdpa", False)
    assert chosen() == ("products", True)


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


def test_real_measurements() -> None:
    assert packing_gain() > 0
    assert products_gain() > 0
