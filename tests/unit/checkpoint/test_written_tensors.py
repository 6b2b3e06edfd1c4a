"""Tensors are written one by one, with the bytes of safetensors' own writer."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from manyheads.checkpoint.format import save_checkpoint, write_tensors
from manyheads.files import verify

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 7)], ids=str)
def test_bytes_are_those_of_safetensors(shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {f"{name}.{dtype}": (torch.randn(shape) * 9).to(dtype) for name in ("b", "a", "ü ß") for dtype in TYPES}
    write_tensors(tmp_path / "a.safetensors", tensors)
    assert (tmp_path / "a.safetensors").read_bytes() == safetensors.torch.save(tensors, metadata={"format": "pt"})


def test_views_and_parameters(tmp_path: Path) -> None:
    whole = torch.nn.Parameter(torch.arange(24.0).view(4, 6))
    tensors = {"turned": whole.t(), "part": whole[1:, ::2], "one": whole[0, 0]}
    write_tensors(tmp_path / "a.safetensors", tensors)
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(found[name], one) for name, one in tensors.items())


def test_nothing(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {})
    assert (tmp_path / "a.safetensors").read_bytes() == safetensors.torch.save({}, metadata={"format": "pt"})


def test_what_was_written_is_not_read_again_for_its_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = verify.file_sha256
    monkeypatch.setattr(verify, "file_sha256", lambda path: read.append(path.name) or real(path))
    tensors = {"model": {"w": torch.randn(5, 7)}, "optimiser": {"m": torch.randn(3).bfloat16(), "n": torch.ones(())}}
    saved = save_checkpoint(tmp_path, 3, tensors, {})
    assert read == ["scalars.json"]
    verify.verify_folder(saved)
    assert read[1:] == ["model.safetensors", "optimiser.safetensors", "scalars.json"]
