"""Linear maps in 8 bits: their error, their rows, and where they are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import manyheads.decoding.device
from manyheads.decoding.device import choose_precision, pack
from manyheads.decoding.model_runner import ModelRunner
from manyheads.errors import ConfigError, RequestError
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.kernels import int8, policy
from manyheads.nn.kernels.int8 import OVERRIDE, Int8Measurement, PackedInt8, has_int8, measure_int8
from manyheads.nn.layers import Linear

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not has_int8(), reason="this processor or build of torch has no FBGEMM")


@pytest.fixture
def quantises_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights are large enough."""
    monkeypatch.setattr(policy, "LEAST_INT8_WEIGHT", 1)


def error_bound(x: Tensor, weight: Tensor) -> Tensor:
    """The most that rounding to half a step of 1/127 and 1/63 of the largest number can change a product."""
    step_x = x.abs().amax(-1, keepdim=True) / 127
    step_w = weight.abs().amax(-1) / 63
    sums = x.abs().sum(-1, keepdim=True) * step_w / 2 + step_x / 2 * weight.abs().sum(-1)
    return sums + step_x * step_w / 4 * x.shape[-1]


@settings(max_examples=25)
@given(
    st.sampled_from([(1, 1), (3, 24), (2, 5, 40), (33, 64)]),
    st.sampled_from([1, 8, 40, 129]),
    st.booleans(),
    st.integers(0, 1000),
    st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_within_the_error_of_rounding(shape: tuple[int, ...], out: int, bias: bool, seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    one = Linear(shape[-1], out, bias=bias)
    x = scale * torch.randn(shape)
    with torch.no_grad():
        found = PackedInt8(one).multiply(x)
        wide = F.linear(x.double(), one.weight.double(), None if one.bias is None else one.bias.double())
    assert found.shape == wide.shape
    assert ((found - wide).abs() <= error_bound(x, one.weight) * 1.001 + 1e-6 * wide.abs() + 1e-12).all()


def test_the_largest_numbers_do_not_overflow() -> None:
    """Two products of 255 and 127 would not fit into the 16 bits in which FBGEMM adds them without VNNI."""
    one = Linear(512, 16, bias=False)
    with torch.no_grad():
        one.weight.fill_(3.0)
        found = PackedInt8(one).multiply(torch.full((4, 512), 5.0))
    torch.testing.assert_close(found, torch.full((4, 16), 512 * 15.0))


def test_a_row_does_not_depend_on_its_batch() -> None:
    one = Linear(64, 48)
    x = torch.randn(7, 64) * torch.tensor([1e-5, 1, 1e5, 3, 0, 2, 1])[:, None]
    with torch.no_grad():
        packed = PackedInt8(one)
        whole = packed.multiply(x)
        for place in range(len(x)):
            assert torch.equal(packed.multiply(x[place : place + 1])[0], whole[place])
        assert torch.equal(whole[4], one.bias.detach())  # a row of zeros


def test_nan_stays_nan() -> None:
    x = torch.ones(2, 8)
    x[0, 3] = torch.nan
    with torch.no_grad():
        found = PackedInt8(Linear(8, 8)).multiply(x)
    assert found[0].isnan().all()
    assert not found[1].isnan().any()


def test_used_for_inference_only_and_not_after_a_change(quantises_all: None) -> None:
    one, x = Linear(24, 40), torch.randn(3, 24)
    plain = one(x)
    pack(one, "int8")
    assert torch.equal(one(x), plain), "with gradients the weight itself is used"
    with torch.inference_mode():
        assert torch.equal(one(x), one.packed.multiply(x))
        assert not torch.equal(one(x), plain)
        with torch.autocast("cpu", torch.bfloat16):
            assert one(x).dtype is torch.bfloat16
    with torch.no_grad():
        one.weight.mul_(2)
    with torch.inference_mode():
        assert torch.equal(one(x), F.linear(x, one.weight, one.bias))


def test_maps_of_one_input_are_one_product(quantises_all: None) -> None:
    attention = MultiHeadAttention(32, 4)
    pack(attention, "int8")
    assert isinstance(attention.packed, PackedInt8)
    x = torch.randn(2, 5, 32)
    with torch.inference_mode():
        parts = attention.packed.linear(x).chunk(3, dim=-1)
        for part, one in zip(parts, (attention.q_proj, attention.k_proj, attention.v_proj), strict=True):
            torch.testing.assert_close(part, one.packed.linear(x))


def test_small_models_are_refused() -> None:
    with pytest.raises(RequestError, match="no linear layer of 131,072 weights or more; in smaller ones int8 is not"):
        pack(torch.nn.Sequential(Linear(8, 8)), "int8")


@pytest.mark.parametrize(("factor", "refused"), [(0.5, True), (1.0, True), (1.01, False), (3.0, False)])
def test_refused_where_it_is_not_faster(monkeypatch: pytest.MonkeyPatch, factor: float, refused: bool) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)
    monkeypatch.setattr(int8, "_measured_factor", lambda: factor)
    assert measure_int8().factor == factor
    if refused:
        with pytest.raises(RequestError, match=f"run at {factor:.2g} times the rate of fp32 ones; use fp32"):
            choose_precision("int8", CPU)
    else:
        assert choose_precision("int8", CPU) == "int8"


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "_measured_factor", lambda: pytest.fail("it is not measured"))
    monkeypatch.setenv(OVERRIDE, "on")
    assert measure_int8() == Int8Measurement(None, None)
    monkeypatch.setenv(OVERRIDE, "off")
    with pytest.raises(RequestError, match="MANYHEADS_INT8 is off; use fp32, bf16 or auto"):
        choose_precision("int8", CPU)
    monkeypatch.setenv(OVERRIDE, "maybe")
    with pytest.raises(ConfigError, match="MANYHEADS_INT8 is 'maybe'; set it to on or off"):
        measure_int8()


def test_refused_without_fbgemm_and_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "has_int8", lambda: False)
    with pytest.raises(RequestError, match="has no int8 products"):
        choose_precision("int8", CPU)
    with pytest.raises(RequestError, match="runs on a CPU, but the device is cuda; use fp32 or auto"):
        choose_precision("int8", torch.device("cuda"))


def test_a_measurement_is_a_ratio_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)
    int8._measured_factor.cache_clear()
    assert int8._measured_factor() > 0
    assert int8._measured_factor() == int8._measured_factor()


def test_auto_is_never_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        manyheads.decoding.device, "measure_precision", lambda device: SimpleNamespace(choice="fp32", has_bf16=True)
    )
    monkeypatch.setattr(manyheads.decoding.device, "measure_int8", lambda: pytest.fail("int8 is not asked about"))
    assert choose_precision("auto", CPU) == "fp32"


def test_a_model_that_is_moved_stays_in_8_bits(quantises_all: None) -> None:
    model = torch.nn.Sequential(Linear(8, 8))
    runner = ModelRunner(model, CPU, "int8")
    runner.to("cpu")
    assert runner.precision == "int8"
    assert isinstance(model[0].packed, PackedInt8)
