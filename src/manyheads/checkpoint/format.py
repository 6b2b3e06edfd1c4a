"""Checkpoints: folders `step-00001000` of safetensors files, `scalars.json` and a manifest; their list, the best
one, and the deletion of old ones.

If the model is sharded over ranks, `shards/` contains one file per rank instead of the files of weights and moments.
Any number of ranks can read them. This uses torch's distributed checkpointing in the safetensors format
(`HuggingFaceStorageWriter`), which needs no pickle: the header of each file says where its parts belong. The default
format stores this in a pickle, which is never written or read here.

JSON stores Python floats exactly: their repr is the shortest text that is read back as the same double.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from manyheads.errors import CheckpointError, SaveError
from manyheads.files.commit import remove_folder, saving, write_folder, write_text
from manyheads.files.safe_open import read_limited
from manyheads.files.verify import FORMAT_VERSION, verify_folder

SHARDS = "shards"
"""The folder within a checkpoint."""

_MOST_ENTRIES = 1_000_000


def flat(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return `stem/name` -> tensor."""
    return {f"{stem}/{name}": tensor for stem, group in tensors.items() for name, tensor in group.items()}


def write_shards(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write this rank's parts, one file per rank. A collective operation; replicated tensors are written once.

    Args:
        folder: exists, and is the same on every rank (with several machines: on a shared file system).
        tensors: stem -> name -> tensor, DTensors or whole ones.

    Raises: OSError: a rank could not write; on all ranks.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    try:
        with _quietly():
            save({name: _plain(tensor) for name, tensor in flat(tensors).items()}, storage_writer=writer)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, OSError):
            raise OSError(cause.errno, f"{cause.strerror or cause} (rank {rank})") from error
        raise


def _plain(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.detach()
    return found if hasattr(found, "full_tensor") else found.contiguous()


Allocate = Callable[[str, str, torch.Size, torch.dtype], Tensor | None]
"""stem, name, shape, dtype -> where to read it: a DTensor receives this rank's part; None: a new whole tensor."""


def read_shards(
    folder: Path, allocate: Allocate | None = None, *, stem: str | None = None
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of such a folder, by stem and name; any number of ranks may have written it. Not collective.

    Args: allocate: see `Allocate`; None: whole tensors. stem: read its tensors only; None: all.

    Raises: CheckpointError: the parts do not cover their tensors, or cannot be read.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    _check_headers(folder)
    reader = HuggingFaceStorageReader(str(folder))
    found: dict[str, dict[str, Tensor]] = {}
    state: dict[str, Any] = {}
    try:
        for key, about in reader.read_metadata().state_dict_metadata.items():
            kind, _, name = key.partition("/")
            if stem not in (None, kind):
                continue
            shape, dtype = about.size, about.properties.dtype  # type: ignore[union-attr]
            target = None if allocate is None else allocate(kind, name, shape, dtype)
            target = torch.empty(shape, dtype=dtype) if target is None else target
            state[key] = found.setdefault(kind, {})[name] = target
        with _quietly():
            load(state, storage_reader=reader, no_dist=True)
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError, AssertionError) as error:
        raise CheckpointError(f"{folder} cannot be read: {str(error).split(chr(10))[0][:300]}.") from error
    return found


def _check_headers(folder: Path) -> None:
    """Check that the parts of every tensor cover it without gaps and overlaps; torch does not check this."""
    from safetensors import SafetensorError, safe_open

    covered: dict[str, int] = {}
    ends: dict[str, list[int]] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as reader:
                about = json.loads((reader.metadata() or {}).get("DCP_SHARDING_INFO", "null"))
                for key in reader.keys():  # noqa: SIM118  (not a mapping)
                    shape = reader.get_slice(key).get_shape()
                    offset = about[key]["saved_offsets"]
                    size = math.prod(shape)
                    if size and (key, tuple(offset)) in seen:
                        raise CheckpointError(f"{folder} is damaged: two parts of {key!r} begin at {offset}.")
                    seen.add((key, tuple(offset)))
                    covered[key] = covered.get(key, 0) + size
                    last = [start + length for start, length in zip(offset, shape, strict=True)]
                    ends[key] = [max(pair) for pair in zip(ends.get(key, last), last, strict=True)]
                    if len(seen) > _MOST_ENTRIES:
                        raise CheckpointError(f"{folder} is refused: it has over {_MOST_ENTRIES:,} parts.")
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from error
    for key, shape in ends.items():
        if covered[key] != math.prod(shape):
            raise CheckpointError(
                f"{folder} is damaged: the parts of {key!r} hold {covered[key]:,} of {math.prod(shape):,} numbers."
            )


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the log messages and warnings of torch's checkpointing."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write the bytes of `safetensors.torch.save`, one tensor after the other, without a copy of all in memory.

    Returns: their SHA-256, in hexadecimal.
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
    beginning = len(shown).to_bytes(8, "little") + shown
    digest = hashlib.sha256(beginning)
    with path.open("wb") as file:
        file.write(beginning)
        for name in names:
            data = tensors[name].detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data
            digest.update(data)
            file.write(data)
    return digest.hexdigest()


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

    def write(folder: Path) -> dict[str, str]:
        if write_parts is not None:
            (folder / SHARDS).mkdir()
            write_parts(folder / SHARDS)
        return _fill(folder, step, tensors, scalars)

    final = checkpoints_dir / checkpoint_name(step)
    write_folder(final, write, needed_bytes=needed_bytes(tensors) + parts_bytes)
    return final


def _fill(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], scalars: Mapping[str, Any]
) -> dict[str, str]:
    digests = {}
    for stem, group in tensors.items():
        if not _STEM.fullmatch(stem):
            raise ValueError(f"{stem!r} is not a file stem")
        name = f"{stem}.safetensors"
        digests[name] = write_tensors(folder / name, group)
    record = {"format_version": FORMAT_VERSION, "step": step, "scalars": dict(scalars)}
    (folder / SCALARS).write_bytes((json.dumps(record, indent=1, allow_nan=False) + "\n").encode())
    return digests


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


LEAST_KEPT = 2
_MOST_POINTER_BYTES = 4096
_POINTER = re.compile(rb"(step-\d{8,})\n")


def list_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """Return all checkpoint folders, oldest first, without temporary ones.

    Raises: CheckpointError: the folder cannot be listed (which is not the same as empty).
    """
    return [path for path in _list_named(checkpoints_dir) if path.is_dir()]


def _list_named(checkpoints_dir: Path) -> list[Path]:
    """Return everything that has a checkpoint's name, oldest first."""
    try:
        named = [(step, path) for path in checkpoints_dir.iterdir() if (step := step_of(path)) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{checkpoints_dir} cannot be read: {error.strerror or error}.") from error
    return [path for _, path in sorted(named)]


def write_pointer(checkpoints_dir: Path, pointer: str, target: Path) -> None:
    """Write the name of a checkpoint to the text file `pointer` (`latest`, `best`), atomically.

    Raises: SaveError: it could not be written.
    """
    write_text(checkpoints_dir / pointer, target.name + "\n")


def read_pointer(checkpoints_dir: Path, pointer: str) -> Path | None:
    """Return the checkpoint that `pointer` names; None if the pointer or the checkpoint does not exist."""
    target = _named_by(checkpoints_dir, pointer)
    return target if target is not None and target.is_dir() else None


def _named_by(checkpoints_dir: Path, pointer: str) -> Path | None:
    """Return the path that `pointer` names, whether or not it exists; None if the pointer is missing or invalid."""
    try:
        text = read_limited(checkpoints_dir / pointer, _MOST_POINTER_BYTES)
    except OSError:
        return None
    match = _POINTER.fullmatch(text)
    return checkpoints_dir / match[1].decode() if match else None


def _step(path: Path) -> int:
    return step_of(path) or 0


def find_latest(checkpoints_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that passes verification.

    The pointer `latest` does not decide this: after a crash between the commits of checkpoint and pointer it is too
    old. But if it names a newer checkpoint than all that exist, that one was lost.

    Returns: the folder, or None without an intact one, and one sentence for each newer checkpoint that was skipped.
    Raises: CheckpointError: the folder cannot be listed.
    """
    warnings: list[str] = []
    named = _list_named(checkpoints_dir)
    latest = _named_by(checkpoints_dir, "latest")
    if latest is not None and latest not in named and (not named or _step(latest) > _step(named[-1])):
        warnings.append(f"Skipped checkpoint {latest.name}: the pointer latest names it, but it is gone.")
    for path in reversed(named):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            warnings.append(f"Skipped checkpoint {path.name}: {error}")
        else:
            return path, warnings
    return None, warnings


def apply_retention(checkpoints_dir: Path, keep: int) -> list[Path]:
    """Delete all but the newest `keep` checkpoints (never fewer than 2) and the best one.

    If the pointer `best` is invalid, nothing is deleted, because any checkpoint could be the best one.

    Returns: the deleted folders.
    Raises: SaveError: the folders could not be listed, or one could not be deleted.
    """
    best = _named_by(checkpoints_dir, "best")
    if best is None and (checkpoints_dir / "best").exists():
        return []
    try:
        found = list_checkpoints(checkpoints_dir)
    except CheckpointError as error:
        raise SaveError(str(error)) from error
    doomed = [path for path in found[: -max(keep, LEAST_KEPT)] if path != best]
    for path in doomed:
        remove_folder(path)
    return doomed


def set_aside_newer(checkpoints_dir: Path, step: int) -> list[Path]:
    """Rename checkpoints after `step` to `step-N.aside`: a run that continues from `step` must never resume from them.

    Returns: the new names.
    Raises: SaveError: a folder could not be renamed.
    """
    moved = []
    for path in list_checkpoints(checkpoints_dir):
        if _step(path) > step:
            aside = path.with_name(path.name + ".aside")
            if aside.exists():
                remove_folder(aside)
            with saving(path, 0):
                path.rename(aside)
            moved.append(aside)
    return moved
