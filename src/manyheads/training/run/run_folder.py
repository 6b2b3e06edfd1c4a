"""The folder of a run: the paths in it, and a lock so that two runs never share one."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from manyheads.checkpoint.format import list_checkpoints
from manyheads.config.files import to_json, to_yaml
from manyheads.errors import ConfigError
from manyheads.files.commit import make_folder, saving, sync, write_text
from manyheads.files.output_safety import check_spares_folders, locked
from manyheads.files.safe_open import RefusedFileError, check_no_link, check_writable_file

if TYPE_CHECKING:
    from manyheads.training.settings import RunConfig


class RunFolder:
    """Paths of a run.

    Args: path: the run's folder; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / ".lock"
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.train_log = path / "train.log"
        self.metrics = path / "metrics.jsonl"
        self.timing = path / "timing.jsonl"
        self.table = path / "metrics.csv"
        self.loggers = path / "loggers.json"
        self.samples = path / "samples"
        self.comparison = path / "comparison.json"
        self.plots = path / "plots"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.data = path / "data"
        self._of_a_run = (
            *(self.config, self.environment, self.train_log, self.metrics, self.timing, self.comparison),
            *(self.table, self.loggers, self.samples, self.plots, self.tensorboard, self.checkpoints, self.model),
        )

    def check(self) -> None:
        """Refuse a folder in which a run would write through a symbolic link, or to a pipe or a device.

        The folder may be of external origin. The folder itself may be a link, because the user chose it. Files that are
        written under a temporary name and renamed are not checked: the rename replaces a link and does not change its
        target.

        Raises: ConfigError: with the name of the first such entry. SaveError: the folder cannot be read.
        """
        try:
            str(self.path).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the name of the run folder {str(self.path)!r} is not UTF-8, which TensorBoard needs; choose another."
            ) from error
        in_place = (self.lock, self.train_log, self.metrics, self.timing, self.table)
        folders = (self.samples, self.plots, self.tensorboard, self.checkpoints, self.data)
        with saving(self.path, 0):
            try:
                for path in in_place:
                    check_writable_file(path)
                for path in (*folders, *sorted(self.path.glob("previous-*.partial"))):
                    check_no_link(path)
            except RefusedFileError as error:
                raise ConfigError(
                    f"{error.filename} is refused, since a run writes to it: {error} (the run folder itself may be a"
                    " link)."
                ) from error

    def create(self) -> None:
        """Create the folder.

        Raises: SaveError: it cannot be created. ConfigError: its name is a file's, or it would be in the folder of a
            model; see `check`.
        """
        check_spares_folders(self.checkpoints, is_folder=True)
        check_spares_folders(self.environment)
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"run_dir is {self.path}, which is a file; a run needs a folder. Choose another run_dir.")
        with saving(self.path, 0):
            make_folder(self.path)
            if os.access(self.path.absolute().parent, os.R_OK):
                sync(self.path.absolute().parent)  # a killed process may have created the folder without syncing
            self.check()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process; the system releases the lock when the process ends for any reason.

        Raises: ConfigError: another process has the lock. SaveError: the lock file cannot be written.
        """
        with locked(self.lock, self._in_use):
            yield

    def _in_use(self, owner: str) -> ConfigError:
        return ConfigError(
            f"The run folder {self.path} is in use by process {owner}; choose another run_dir, or end that process"
            " first."
        )

    def describe(self, config: RunConfig) -> None:
        """Write config.yaml and environment.json."""
        write_text(self.config, to_yaml(config))
        write_text(self.environment, to_json(environment()))

    def last_words(self) -> str:
        """Return the message for a run that is stopped at once: what is saved of it."""
        saved = list_checkpoints(self.checkpoints)
        if not saved:
            return "\nmanyheads: stopped at once; nothing is saved yet, so the same command begins again.\n"
        return f"\nmanyheads: stopped at once; saved is {saved[-1]}, from which the same command continues.\n"

    def has_run(self) -> bool:
        """Return whether there are files of an earlier run."""
        return self.metrics.exists() or self.checkpoints.exists() or self.model.exists()

    def set_aside(self) -> Path:
        """Move an earlier run's files into `previous-N`, so that they are not mixed with those of a new run.

        Prepared data stays, and so do files of the user, which no run writes. A crash in between leaves
        `previous-N.partial`, which `finish_setting_aside` completes.

        Raises: SaveError: a file could not be moved.
        """
        number = 1
        while os.path.lexists(self.path / f"previous-{number}"):
            number += 1
        partial = self.path / f"previous-{number}.partial"
        with saving(partial, 0):
            make_folder(partial)
            for entry in (*self._of_a_run, *sorted(self.path.glob("nonfinite-step-*.json"))):
                if os.path.lexists(entry):
                    entry.rename(partial / entry.name)
            for folder in (partial, self.path):
                sync(folder)
            target = partial.with_suffix("")
            partial.rename(target)
            sync(self.path)
        return target

    def finish_setting_aside(self) -> Path | None:
        """Complete an interrupted `set_aside`, because the remaining files would look like a run. Returns: as
        `set_aside`.

        Raises: SaveError: a file could not be moved.
        """
        return self.set_aside() if any(self.path.glob("previous-*.partial")) else None


def environment() -> dict[str, Any]:
    """Return versions and machine, on which a run also depends. No user names or environment variables."""
    packages = ("manyheads", "torch", "numpy", "safetensors", "tokenizers", "sacrebleu")
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "packages": found,
    }
