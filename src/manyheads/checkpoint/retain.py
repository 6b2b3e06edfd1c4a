"""Which checkpoints there are, which one is the newest intact one, which is the best, and which may go."""

from __future__ import annotations

from pathlib import Path

from manyheads.checkpoint.commit import remove_folder, write_text
from manyheads.checkpoint.faults import saving
from manyheads.checkpoint.format import step_of
from manyheads.checkpoint.verify import verify_folder
from manyheads.errors import CheckpointError

__all__ = [
    "LEAST_KEPT",
    "apply_retention",
    "find_latest",
    "list_checkpoints",
    "read_pointer",
    "set_aside_newer",
    "write_pointer",
]

LEAST_KEPT = 2


def list_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """All checkpoint folders, oldest first; temporary ones are not among them."""
    if not checkpoints_dir.is_dir():
        return []
    found = [
        (step, path) for path in checkpoints_dir.iterdir() if (step := step_of(path)) is not None and path.is_dir()
    ]
    return [path for _, path in sorted(found)]


def write_pointer(checkpoints_dir: Path, pointer: str, target: Path) -> None:
    """Let the text file `pointer` (`latest`, `best`) name a checkpoint; replaced in one step.

    Raises: SaveError: it could not be written.
    """
    write_text(checkpoints_dir / pointer, target.name + "\n")


def read_pointer(checkpoints_dir: Path, pointer: str) -> Path | None:
    """The checkpoint that `pointer` names; None if there is no such pointer or no such checkpoint."""
    try:
        name = (checkpoints_dir / pointer).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    target = checkpoints_dir / Path(name).name
    return target if step_of(target) is not None and target.is_dir() else None


def find_latest(checkpoints_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that passes verification.

    The pointer `latest` is not asked: a crash between the checkpoint's commit and the pointer's leaves it too old.

    Returns: the folder, or None if there is none, and one sentence for each newer one that had to be skipped.
    """
    warnings = []
    for path in reversed(list_checkpoints(checkpoints_dir)):
        try:
            verify_folder(path)
        except CheckpointError as error:
            warnings.append(f"Skipped checkpoint {path.name}: {error}")
        else:
            return path, warnings
    return None, warnings


def apply_retention(checkpoints_dir: Path, keep: int) -> list[Path]:
    """Delete all but the newest `keep` checkpoints (never fewer than 2) and the best one.

    Returns: what was deleted.
    Raises: SaveError: a folder could not be deleted.
    """
    best = read_pointer(checkpoints_dir, "best")
    doomed = [path for path in list_checkpoints(checkpoints_dir)[: -max(keep, LEAST_KEPT)] if path != best]
    for path in doomed:
        remove_folder(path)
    return doomed


def set_aside_newer(checkpoints_dir: Path, step: int) -> list[Path]:
    """Rename checkpoints after `step` to `step-N.aside`: a run that goes on from `step` must never resume from them.

    Returns: the new names.
    Raises: SaveError: a folder could not be renamed.
    """
    moved = []
    for path in list_checkpoints(checkpoints_dir):
        if (step_of(path) or 0) > step:
            aside = path.with_name(path.name + ".aside")
            if aside.exists():
                remove_folder(aside)
            with saving(path, 0):
                path.rename(aside)
            moved.append(aside)
    return moved
