"""`manyheads sample-model DIR`: writes the translator that is part of the package, a copy of its folder."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.command_line.parsing import command, program
from manyheads.cli.process import echo
from manyheads.config.options import CommandPage, argument
from manyheads.errors import CheckpointError, ModelFileError, SaveError
from manyheads.files.commit import saving, write_folder
from manyheads.files.verify import MANIFEST, verify_folder

FOLDER = Path(__file__).parent / "model"
HOW_TO_TRAIN = "make sample-model"


def packaged_model() -> Path:
    """Return the model's folder, checked.

    Raises: ModelFileError: this copy of the package has no such model, or it is damaged.
    """
    if not (FOLDER / MANIFEST).is_file():
        raise ModelFileError(
            f"this copy of manyheads has no sample model ({FOLDER} is missing); in a clone of manyheads,"
            f" `{HOW_TO_TRAIN}` trains it, in about 30 minutes on two cores."
        )
    try:
        verify_folder(FOLDER, strict=False)
    except CheckpointError as error:
        raise ModelFileError(f"{error} Install manyheads again.") from error
    return FOLDER


def copy_model(target: Path) -> bool:
    """Copy the model into a folder. Returns: False if the same model was there already.

    Raises: ModelFileError: see `packaged_model`. SaveError: the folder holds something else, or cannot be written.
    """
    files = {path.name: path.read_bytes() for path in sorted(packaged_model().iterdir()) if path.is_file()}
    with saving(target, sum(map(len, files.values()))):
        if target.is_dir() and any(target.iterdir()):
            there = {path.name for path in target.iterdir()}
            same = there >= {*files} and all(_is_file_of(target / name, content) for name, content in files.items())
            if not same:
                raise SaveError(
                    f"{target} exists already and is not this model, so it is not replaced; name another folder."
                )
            return False
        if os.path.lexists(target) and not target.is_dir():
            kind = "a link to nothing" if target.is_symlink() and not target.exists() else "a file"
            raise SaveError(f"{target} is {kind}, so no model can be written there; name another folder.")
        if target.is_dir():
            _remove_empty(target)

    def write(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)

    write_folder(target, write, manifest=False, needed_bytes=sum(map(len, files.values())), replace=False)
    return True


def _remove_empty(folder: Path) -> None:
    """Make way for a folder that is written in one step. Raises: SaveError: this one cannot be removed."""
    try:
        if folder.samefile(Path.cwd()):
            raise OSError("it is the working folder")
        folder.rmdir()
    except OSError as error:  # a mount point, a link
        raise SaveError(
            f"{folder} is empty and cannot be replaced by the model's folder: {error.strerror or error}; name a new"
            f" folder in it, such as {folder / 'en-de'}."
        ) from None


def _is_file_of(path: Path, content: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


@dataclass(frozen=True, kw_only=True)
class SampleModelOptions:
    """Options of `manyheads sample-model`."""

    folder: str = argument("Folder for the model; it is created if it does not exist.", metavar="DIR")


PAGE = CommandPage(
    SampleModelOptions,
    """Write a trained English-German translator, which comes with the package; nothing is downloaded. It is small, and
good for everyday sentences of 4 to 20 words only. README.md in the folder states its data, licence and scores. A
folder with something else in it is not replaced.""",
    (
        "manyheads sample-model models/en-de",
        "manyheads sample-model /tmp/translator",
    ),
)


@command(PAGE, "sample-model")
def run(options: SampleModelOptions) -> int:
    """Write the model. Returns: the exit code."""
    folder = Path(options.folder)
    is_new = copy_model(folder)
    echo(f"{folder}: English to German{'' if is_new else '  (was there already)'}")
    echo(f"\nnext: echo 'I am hungry.' | {program()} translate {shlex.quote(str(folder))}")
    return 0
