"""A checkpoint: a folder `step-00001000` of safetensors files, `scalars.json` and a manifest.

If the model is sharded over ranks, `shards/` contains one file per rank instead of the files of weights and moments.

JSON stores Python floats exactly: their repr is the shortest text that is read back as the same double.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from manyheads.checkpoint.sharded import SHARDS, Allocate, read_shards
from manyheads.errors import CheckpointError
from manyheads.files.commit import write_folder
from manyheads.files.safe_open import read_limited
from manyheads.files.verify import FORMAT_VERSION, verify_folder

SCALARS = "scalars.json"
MOST_SCALARS_BYTES = 16 << 20
"""Settings and counters take a few kilobytes."""
_NAME = re.compile(r"step-(\d{8,})")
_STEM = re.compile(r"[a-z][a-z0-9_-]*")
_SLACK_BYTES = 1 << 20  # headers, JSON and the file system's own blocks


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: `tensors[stem][name]` from `stem.safetensors`, and the scalars."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    scalars: dict[str, Any]
    path: Path


def checkpoint_name(step: int) -> str:
    """Return the folder's name: `step-00001000`."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint folder's name; None for another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def needed_bytes(tensors: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Return the approximate size of a checkpoint of these tensors on disk."""
    return _SLACK_BYTES + sum(tensor.nbytes for group in tensors.values() for tensor in group.values())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the bytes of `safetensors.torch.save`, one tensor after the other, without a copy of all in memory.

    (`safetensors.torch.save_file` writes another file, which only the owner may read, and renames it.)
    """
    # The header of empty tensors of the same names has their order and the names of their types.
    empty = safetensors.torch.save(
        {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}, metadata={"format": "pt"}
    )
    header = json.loads(empty[8 : 8 + int.from_bytes(empty[:8], "little")])
    names, end = [name for name in header if name != "__metadata__"], 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        header[name] |= {"shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    shown = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    shown += b" " * (-len(shown) % 8)
    with path.open("wb") as file:
        file.write(len(shown).to_bytes(8, "little") + shown)
        for name in names:
            file.write(tensors[name].detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)


def save_checkpoint(
    checkpoints_dir: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    scalars: Mapping[str, Any],
    *,
    write_parts: Callable[[Path], None] | None = None,
    parts_bytes: int = 0,
) -> Path:
    """Write `checkpoints_dir/step-XXXXXXXX` atomically and durably.

    Args:
        checkpoints_dir: created if missing.
        step: number of optimiser steps done.
        tensors: file stem -> name -> tensor; names within a file must not share memory.
        scalars: anything that JSON can hold, without NaN and infinity.
        write_parts: if several ranks write further tensors: makes all of them write their parts into the folder that it
            is given (see `sharded.write_shards`); called on the main rank only.
        parts_bytes: approximate size of these parts.

    Returns: the folder.
    Raises: SaveError: see `write_folder`.
    """

    def write(folder: Path) -> None:
        if write_parts is not None:
            (folder / SHARDS).mkdir()
            write_parts(folder / SHARDS)
        _fill(folder, step, tensors, scalars)

    final = checkpoints_dir / checkpoint_name(step)
    write_folder(final, write, needed_bytes=needed_bytes(tensors) + parts_bytes)
    return final


def _fill(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], scalars: Mapping[str, Any]) -> None:
    for stem, group in tensors.items():
        if not _STEM.fullmatch(stem):
            raise ValueError(f"{stem!r} is not a file stem")
        write_tensors(folder / f"{stem}.safetensors", group)
    record = {"format_version": FORMAT_VERSION, "step": step, "scalars": dict(scalars)}
    (folder / SCALARS).write_bytes((json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


def load_checkpoint(path: Path, *, verify: bool = True, allocate: Allocate | None = None) -> Checkpoint:
    """Read a checkpoint folder into CPU memory.

    Args:
        path: the folder.
        verify: compare every file with the manifest first (about 0.7 GB/s).
        allocate: the destinations of tensors in shards (see `sharded.read_shards`); None: whole tensors.

    Raises: CheckpointError: it is missing, incomplete, damaged, of another format version, or a copy of another step.
    """
    if verify:
        verify_folder(path)
    step, scalars = read_scalars(path)
    try:
        files = sorted(file for file in path.glob("*.safetensors") if file.name[0] != ".")
        tensors = {file.stem: safetensors.torch.load_file(file) for file in files}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if (path / SHARDS).is_dir():
        tensors |= read_shards(path / SHARDS, allocate)
    return Checkpoint(step, tensors, scalars, path)


def verify_checkpoint(path: Path) -> None:
    """Check a checkpoint folder without reading tensors.

    Raises: CheckpointError: see `load_checkpoint`.
    """
    verify_folder(path)
    read_scalars(path)


def read_scalars(path: Path) -> tuple[int, dict[str, Any]]:
    """Return step and scalars of a checkpoint folder, without verifying its files.

    Raises: CheckpointError: they cannot be read, have another format version, or another step than the folder's name.
    """
    try:
        record = json.loads(read_limited(path / SCALARS, MOST_SCALARS_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / SCALARS} cannot be read: {error}.") from error
    if not isinstance(record, dict) or record.keys() != {"format_version", "step", "scalars"}:
        raise CheckpointError(f"{path} is damaged: {SCALARS} must hold format_version, step and scalars.")
    if record["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {record['format_version']!r}, this program reads {FORMAT_VERSION};"
            " use the manyheads that wrote it."
        )
    step, scalars = record["step"], record["scalars"]
    if type(step) is not int or not isinstance(scalars, dict):
        raise CheckpointError(f"{path} is damaged: in {SCALARS} step must be an integer and scalars an object.")
    if step_of(path) not in (None, step):
        raise CheckpointError(f"{path} holds step {step}, not that of its name; it is a copy of another checkpoint.")
    return step, scalars
