"""Parts of tensors in files: read back whole, and refused where one is missing; nothing beside them is opened."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from rank_jobs import Ranks

from manyheads.checkpoint.format import SHARDS, load_checkpoint, read_shards
from manyheads.errors import CheckpointError


class Bad:
    """Unpickled, it leaves a file."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.trap,)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by two ranks."""
    place, ranks = tmp_path_factory.mktemp("parts"), Ranks()
    try:
        answers = ranks.run(
            2, "resharded", kind="xl", run_dir=place / "run", steps=2, parallel="fsdp", whole=place / "whole"
        )
    finally:
        ranks.close()
    return Path(answers[0]["checkpoint"])


def test_the_layout(checkpoint: Path) -> None:
    """torch's writer is young: what it makes of a checkpoint is held here."""
    names = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    parts = {f"{SHARDS}/shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)}
    assert names == parts | {"manifest.json", "memory.safetensors", "scalars.json"}
    loaded = load_checkpoint(checkpoint)
    assert loaded.tensors.keys() == {"model", "optimiser", "ema", "memory"}


def test_a_missing_part_leaves_no_hole(checkpoint: Path, tmp_path: Path) -> None:
    for path in (checkpoint / SHARDS).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = read_shards(tmp_path)
    assert torch.isfinite(whole["model"]["embedding.tables.0"]).all()
    first, second = sorted(tmp_path.iterdir())
    (tmp_path / "shard-00003-model-00001-of-00001.safetensors").write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match="two parts of"):
        read_shards(tmp_path)
    first.write_bytes(first.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_shards(tmp_path)
    first.unlink()
    (tmp_path / "shard-00003-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"hold .* of .* numbers"):
        read_shards(tmp_path)


def test_a_pickle_beside_them_is_not_opened(checkpoint: Path, tmp_path: Path) -> None:
    for path in (checkpoint / SHARDS).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    trap = tmp_path.with_name("was-here")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bad(trap)))
    assert read_shards(tmp_path)
    assert not trap.exists()
