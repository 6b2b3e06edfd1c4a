"""Weights & Biases, MLflow and Trackio: each gets the lines of metrics.jsonl, and continues its run when ours resumes.

The name by which a program knows the run lies in `loggers.json` of the run folder. Steps after the checkpoint from
which a run resumes are logged again; these programs keep both values of such a step.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from manyheads.config.files import to_json
from manyheads.errors import ConfigError
from manyheads.files.commit import write_text
from manyheads.files.safe_open import read_limited
from manyheads.installation import needing_extra
from manyheads.training.record.log import Logger

if TYPE_CHECKING:
    from manyheads.training.record.report import RunStart, TrainResult

PROJECT = "manyheads"
_MOST_BYTES = 1 << 16
_MOST_AT_ONCE = 100  # parameters in a request to MLflow
_LONGEST = 500  # characters of a parameter of MLflow


class Service(Logger):
    """A logger of a package.

    Attributes: name: in the catalogue, of the package and of the extra with it. remedy: what may help at the start.

    Raises: MissingExtraError: the package is not installed.
    """

    name: ClassVar[str]
    remedy: ClassVar[str]

    def __init__(self) -> None:
        with needing_extra(f"The logger {self.name} needs the package {self.name}", self.name):
            self.package: Any = importlib.import_module(self.name)
        self._is_open = self._ended = False

    def on_start(self, start: RunStart) -> None:
        """Begin a run there, or continue it. Raises: ConfigError: it refuses."""
        file = start.run_dir / "loggers.json"
        known = _known(file)
        earlier = known.get(self.name)
        try:
            identity = self.open(start, earlier)
        except Exception as error:
            reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
            again = f" Without its line in {file} it begins another run." if earlier else ""
            what = f"continue its run {earlier}" if earlier else "begin"
            raise ConfigError(f"The logger {self.name} cannot {what}: {reason}. {self.remedy}{again}") from error
        self._is_open = True
        if identity != earlier:
            write_text(file, to_json({**known, self.name: identity}))

    def on_log(self, record: Mapping[str, Any]) -> None:
        """Send the numbers of a line."""
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
        if finite := {name: value for name, value in numbers.items() if math.isfinite(value)}:
            self.send(finite, record["step"])

    def on_end(self, result: TrainResult) -> None:
        self._ended = True

    def close(self) -> None:
        """End the run there, as failed if ours has not reached its end."""
        if self._is_open:
            self._is_open = False
            self.finish(failed=not self._ended)

    def open(self, start: RunStart, earlier: str | None) -> str:
        """Begin a run, or continue `earlier`. Returns: the name by which it can be continued."""
        raise NotImplementedError

    def send(self, numbers: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def finish(self, *, failed: bool) -> None:
        raise NotImplementedError


def _known(file: Path) -> dict[str, str]:
    """Return the content of loggers.json. Raises: ConfigError: it is damaged."""
    try:
        found = json.loads(read_limited(file, _MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}. Remove it, and loggers begin other runs.") from error
    return found if isinstance(found, dict) else {}


class WandbLogger(Service):
    """Weights & Biases. Its files are in the run folder, or in WANDB_DIR; the project is WANDB_PROJECT."""

    name = "wandb"
    remedy = "Log in with `wandb login`, or keep the numbers here by WANDB_MODE=offline, for a later `wandb sync`."

    def open(self, start: RunStart, earlier: str | None) -> str:
        wandb = self.package
        if wandb.setup().settings.mode == "online" and not wandb.api.api_key:
            raise ConfigError("there is no API key")  # it would ask for one in the terminal
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=start.run_dir.name,
            dir=os.environ.get("WANDB_DIR") or str(start.run_dir),
            config=dict(start.config),
            id=earlier,
            resume="allow" if earlier else None,
            reinit="create_new",
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("*", step_metric="step")  # its own steps cannot go back, as ours do at a resume
        return str(self._run.id)

    def send(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log({**numbers, "step": step})

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowLogger(Service):
    """MLflow. The place is MLFLOW_TRACKING_URI, the experiment MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID."""

    name = "mlflow"
    remedy = "Set MLFLOW_TRACKING_URI to a server that answers, or to a file, as in sqlite:///mlflow.db."

    def open(self, start: RunStart, earlier: str | None) -> str:
        self._client = self.package.MlflowClient()
        if earlier:
            if self._client.get_run(earlier).info.lifecycle_stage == "deleted":
                raise ConfigError("it was deleted; `mlflow runs restore` brings it back")
            self._client.update_run(earlier, status="RUNNING")
            self._id = earlier
            return earlier
        run = self._client.create_run(self._experiment(), run_name=start.run_dir.name)
        self._id = str(run.info.run_id)
        make = self.package.entities.Param
        params = [make(name, str(value)[:_LONGEST]) for name, value in _flat(start.config)]
        for place in range(0, len(params), _MOST_AT_ONCE):
            self._client.log_batch(self._id, params=params[place : place + _MOST_AT_ONCE])
        return self._id

    def _experiment(self) -> str:
        if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def send(self, numbers: Mapping[str, float], step: int) -> None:
        now, make = round(1000 * time.time()), self.package.entities.Metric
        self._client.log_batch(self._id, metrics=[make(name, value, now, step) for name, value in numbers.items()])

    def finish(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


class TrackioLogger(Service):
    """Trackio. Its files are in TRACKIO_DIR, or where TRACKIO_SPACE_ID says; the project is TRACKIO_PROJECT."""

    name = "trackio"
    remedy = "A Space of the hub needs `hf auth login`; without TRACKIO_SPACE_ID the numbers stay on this machine."

    def open(self, start: RunStart, earlier: str | None) -> str:
        name = earlier or f"{start.run_dir.name}-{secrets.token_hex(4)}"  # it knows runs by their names
        with redirect_stdout(sys.stderr):
            self._run = self.package.init(
                project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
                name=name,
                config=dict(_flat(start.config)),
                resume="must" if earlier else "never",
                embed=False,
            )
        return name

    def send(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self, *, failed: bool) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


def _flat(settings: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Return settings by their dotted names."""
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        found += _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else [(f"{before}{name}", value)]
    return found
