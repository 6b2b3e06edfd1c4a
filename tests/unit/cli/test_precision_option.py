"""`--precision` of commands that load a model: fp32 by default, `auto` measured, bf16 warned of where it is slow."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import manyheads.decoding.model_runner
import manyheads.nn.kernels.precision
from manyheads.decoding.model_runner import inference
from manyheads.decoding.options import DeviceOptions
from manyheads.errors import ConfigError, RequestError
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.precision import OVERRIDE, PrecisionMeasurement


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine multiplies in bf16 at a hundredth of the rate of fp32."""

    def slow(device: torch.device) -> PrecisionMeasurement:
        return PrecisionMeasurement(100.0, 1.0)

    monkeypatch.setattr(manyheads.nn.kernels.precision, "measure_precision", slow)
    monkeypatch.setattr(manyheads.decoding.model_runner, "measure_precision", slow)


def test_fp32_is_the_default_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, "nonsense")  # which would be refused if it were read
    assert DeviceOptions().fixed_precision() == "fp32"


@pytest.mark.parametrize("word", ["fp32", "bf16"])
def test_auto_is_what_is_faster(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv(OVERRIDE, word)
    assert DeviceOptions(device="cpu", precision="auto").fixed_precision() == word


def test_bf16_is_warned_of_where_it_is_slow(measures: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert DeviceOptions(device="cpu", precision="bf16").fixed_precision() == "bf16"
    assert "0.01 times the rate of fp32 ones; --precision fp32 or auto is faster" in capsys.readouterr().err
    assert DeviceOptions(device="cpu", precision="auto").fixed_precision() == "fp32"
    assert capsys.readouterr().err == ""


def test_several_processes_must_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would measure by itself, and their parts of a file would differ."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="give fp32 or bf16"):
        DeviceOptions(device="cpu", precision="auto").fixed_precision()


def test_a_device_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        manyheads.decoding.model_runner, "measure_precision", lambda device: PrecisionMeasurement(100.0, 0.0)
    )
    with pytest.raises(RequestError, match="cpu has no bf16 matrix products; use fp32 or auto"):
        DeviceOptions(device="cpu", precision="bf16").fixed_precision()


def test_tf32_is_refused_where_there_is_none() -> None:
    lack = "tf32, which only NVIDIA GPUs of compute capability 8.0 or higher have, and cpu is none; use fp32"
    with pytest.raises(RequestError, match=f"precision is {lack}"):
        DeviceOptions(device="cpu", precision="tf32").fixed_precision()


def test_tf32_holds_until_the_last_block_of_all_threads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's setting is of the process: the first of two blocks to end must not end it for the other, nor keep it."""
    monkeypatch.setattr(policy, "tf32_lack", lambda device: None)
    assert DeviceOptions(device="cpu", precision="tf32").fixed_precision() == "tf32"
    assert DeviceOptions(device="cpu", precision="fp32").fixed_precision() == "fp32"
    before = torch.get_float32_matmul_precision()
    assert before == "highest"
    first, second = (inference(torch.device("cpu"), "tf32") for _ in range(2))
    with ThreadPoolExecutor(1) as other:
        first.__enter__()
        other.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        assert torch.get_float32_matmul_precision() == "high"
        other.submit(second.__exit__, None, None, None).result()
    assert torch.get_float32_matmul_precision() == before
    with inference(torch.device("cpu"), "fp32"):
        assert torch.get_float32_matmul_precision() == before
