"""Tensors are written one by one, with the bytes of safetensors' own writer."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from manyheads.checkpoint.format import write_tensors

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
