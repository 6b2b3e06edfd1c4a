"""Listing of checkpoints, the newest intact one, the best one, and deletion of old ones."""

from __future__ import annotations

import re
from pathlib import Path

from manyheads.checkpoint.format import step_of, verify_checkpoint
from manyheads.errors import CheckpointError, SaveError
from manyheads.files.commit import remove_folder, saving, write_text
from manyheads.files.safe_open import read_limited

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
