"""The mean of several checkpoints' weights (Vaswani et al. 2017, sec. 6.1: the last 5 or 20)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyheads.checkpoint.format import step_of
from manyheads.checkpoint.retain import list_checkpoints
from manyheads.checkpoint.sharded import SHARDS, read_shards
from manyheads.errors import CheckpointError, ConfigError
from manyheads.files.verify import verify_folder


def select_checkpoints(checkpoints_dir: Path, *, last: int = 0, steps: Sequence[int] = ()) -> list[Path]:
    """Return the newest `last` checkpoints, or those of the given steps, oldest first.

    Raises:
        ConfigError: both or neither is given.
        CheckpointError: there are fewer, or a step is missing; the message lists the existing steps.
    """
    if bool(last) == bool(steps) or last < 0:
        raise ConfigError(
            f"Choose either the last k checkpoints (k >= 1) or some steps; got last {last} and steps {list(steps)}."
        )
    found = list_checkpoints(checkpoints_dir)
    there = ", ".join(str(step_of(path)) for path in found) or "none"
    if last:
        if len(found) < last:
            raise CheckpointError(
                f"{checkpoints_dir} has {len(found)} checkpoints (steps {there}), {last} were asked for."
            )
        return found[-last:]
    by_step = {step_of(path): path for path in found}
    missing = [step for step in steps if step not in by_step]
    if missing:
        raise CheckpointError(f"{checkpoints_dir} has no checkpoint of step {missing[0]}; it has steps {there}.")
    return [by_step[step] for step in sorted(set(steps))]


class _Sharded:
    """The tensors of a checkpoint that several ranks wrote, with the methods of a safetensors file.

    Raises: CheckpointError: they cannot be read.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self._tensors = read_shards(folder / SHARDS, stem=stem).get(stem, {})

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def _open(folder: Path, stem: str, stack: ExitStack) -> Any:
    if (folder / SHARDS).is_dir():
        return _Sharded(folder, stem)
    return stack.enter_context(safe_open(folder / f"{stem}.safetensors", framework="pt"))


def has_tensors(folder: Path, stem: str) -> bool:
    """Return whether a checkpoint has `stem.safetensors`, or such tensors in shards."""
    return (folder / f"{stem}.safetensors").is_file() or (
        (folder / SHARDS).is_dir() and bool(_Sharded(folder, stem).keys())
    )


def average_tensors(folders: Sequence[Path], *, stem: str = "model", verify: bool = True) -> dict[str, Tensor]:
    """Average `stem.safetensors` over folders, one tensor at a time; shards are read as a whole.

    Args:
        folders: checkpoints or model folders with the same tensors.
        stem: the name of the file, without its ending.
        verify: check each folder against its manifest first.

    Returns: name -> mean, summed in float64, in the first file's dtype; integers and booleans must be equal.
    Raises: CheckpointError: a folder is damaged, or names, shapes, dtypes or integer values differ.
    """
    if not folders:
        raise ConfigError("There are no checkpoints to average.")
    for folder in folders:
        if verify:
            verify_folder(folder)
    with ExitStack() as stack:
        try:
            files = [_open(folder, stem, stack) for folder in folders]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"A file to average cannot be read: {error}.") from error
        names = set(files[0].keys())
        for folder, file in zip(folders, files, strict=True):
            odd = sorted(names ^ set(file.keys()))
            if odd:
                raise CheckpointError(f"{folder} and {folders[0]} differ: only one of them has {odd[0]!r}.")
        return {name: _mean(name, folders, files) for name in sorted(names)}


def _mean(name: str, folders: Sequence[Path], files: Sequence[Any]) -> Tensor:
    first: Tensor = files[0].get_tensor(name)
    exact = not first.is_floating_point()
    total = first if exact else first.to(torch.float64)
    for folder, file in zip(folders[1:], files[1:], strict=True):
        other: Tensor = file.get_tensor(name)
        if other.shape != first.shape or other.dtype != first.dtype:
            raise CheckpointError(
                f"{folder} and {folders[0]} differ in {name!r}: {tuple(other.shape)} {other.dtype}"
                f" and {tuple(first.shape)} {first.dtype}."
            )
        if exact and not torch.equal(other, first):
            raise CheckpointError(
                f"{folder} and {folders[0]} differ in {name!r}, which holds integers and has no mean."
            )
        if not exact:
            total = total + other.to(torch.float64)
    return first if exact else (total / len(folders)).to(first.dtype)
