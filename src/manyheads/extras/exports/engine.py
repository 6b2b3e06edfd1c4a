"""Writing of an export, and the comparison with its model."""

from __future__ import annotations

import importlib
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyheads.errors import ConfigError, MissingExtraError, ModelFileError
from manyheads.extras.exports import EXPORTS, Check, ExportOptions, NotComparedError
from manyheads.files.commit import write_folder
from manyheads.files.output_safety import check_spares_folders
from manyheads.files.verify import list_files
from manyheads.models.pretrained import read_config, write_notice

NUM_SENTENCES = 20


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A finished export.

    num_bytes: size of all files. check: the comparison; None: there was none, and not_checked gives the reason.
    """

    num_bytes: int
    notes: list[str] = field(default_factory=list)
    check: Check | None = None
    not_checked: str = ""


def export_model(model: Path, output: Path, options: ExportOptions, *, check: bool = True) -> Exported:
    """Write a model folder in another format. The files are written and compared aside, then the folder is renamed.

    Args:
        model: a model folder of ours.
        output: the new folder.
        check: load the export in its runtime, if this is installed, and compare it with the model.

    Raises: ConfigError, ModelFileError: output exists, the format cannot hold the model, or the export deviates from
        it too much; MissingExtraError: writing needs a package. SaveError: the folder could not be written. In all
        cases nothing is left behind.
    """
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists already; give another folder for --output.")
    check_spares_folders(output, is_folder=True)
    config = read_config(model)
    module = importlib.import_module(EXPORTS[options.to].module)
    done: dict[str, Any] = {"notes": [], "check": None, "not_checked": "" if check else "--no-check was given"}

    def write(folder: Path) -> None:
        done["notes"] = module.write(model, folder, options)
        write_notice(model, folder)
        if not check:
            return
        try:
            done["check"] = module.deviation(model, folder, sample_sentences(config), options)
        except (MissingExtraError, NotComparedError) as error:
            done["not_checked"] = str(error)
            return
        _refuse_deviation(done["check"], options.to)

    weights = model / "model.safetensors"
    size = weights.stat().st_size if weights.is_file() else 0
    write_folder(output, write, needed_bytes=size, replace=False)
    num_bytes = sum((output / name).stat().st_size for name in list_files(output))
    return Exported(num_bytes=num_bytes, **done)


def sample_sentences(config: Any, count: int = NUM_SENTENCES) -> list[list[int]]:
    """Return the ids of random sources (the same for the same config), 3 to 22 tokens long, without special ids."""
    names = ("source_vocab_size", "vocab_size")
    size = next(value for name in names if (value := getattr(config, name, None)) is not None)
    draw = random.Random(size)  # noqa: S311  (the same sentences each time, no secret)
    first = min(4, size - 1)
    return [[draw.randrange(first, size) for _ in range(3 + place % 20)] for place in range(count)]


def _refuse_deviation(check: Check, name: str) -> None:
    if check.limit is not None and not check.deviation <= check.limit:  # NaN is refused too
        raise ModelFileError(
            f"the {name} export was not written: its {check.what} deviate from the model's by {check.deviation:.1e},"
            f" more than {check.limit:.0e}. With --no-check it is written without a comparison."
        )
