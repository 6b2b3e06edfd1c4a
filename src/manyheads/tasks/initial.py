"""The settings of a run that begins from a model: its sizes and digest, and defaults for training it further."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from manyheads.catalogue import ARCHITECTURES, MODEL_TASKS, PRESETS
from manyheads.config.build import build
from manyheads.config.describe import show_value
from manyheads.config.files import Source, load_yaml, to_plain
from manyheads.errors import ConfigError, ModelFileError
from manyheads.files.json_object import read_object
from manyheads.files.verify import file_sha256
from manyheads.models.pretrained import resolve_model_path
from manyheads.tasks.held_out import run_file, run_section
from manyheads.tasks.table import RUNS
from manyheads.training.settings import RunConfig

_NOT_SIZES = ("dropout", "attention_dropout")
_RATES = ("learning_rate", "muon_learning_rate")
_OF_RATES = 0.75
_RECORDS = ("format_version", "task", "languages", "plugins")


def model_layer(name: str, run_dir: str, resume: str) -> Source:
    """The layer of settings that a model determines: its sizes, its digest, and the data it was trained on.

    A run that has checkpoints has these in its config.yaml, so the model is not read again.

    Args:
        name: a model folder, a run folder, or owner/name on the hub.
        run_dir: folder of the run that begins.
        resume: `none` if the run begins again.

    Raises: ModelFileError: there is no such model. ConfigError: its config cannot be read.
    """
    where = f"the model {name}"
    if resume != "none" and (recorded := _recorded(name, Path(run_dir))):
        return Source(recorded, where)
    folder = resolve_model_path(name)
    file = folder / "config.json"
    try:
        values = read_object(file)
        digest = file_sha256(folder / "model.safetensors")
    except OSError as error:
        raise ModelFileError(f"{name} is not a model that a run can begin from: {folder}: {error.strerror}.") from error
    if values.get("architecture") not in ARCHITECTURES:
        raise ModelFileError(f"{file} names no architecture that can be trained; there are: {', '.join(RUNS)}.")
    model = {key: value for key, value in values.items() if key not in _RECORDS}
    config = build(ARCHITECTURES[model["architecture"]].config, model, str(file), "model")
    initial = {"model": name, "sha256": digest, "data": _own_data(name)}
    return Source({"model": to_plain(config), "initial": initial}, where)


def _recorded(name: str, run_dir: Path) -> dict[str, Any]:
    """The layer as config.yaml of a run with checkpoints records it; empty if there is none for this model."""
    file = run_dir / "config.yaml"
    if not file.is_file() or not any((run_dir / "checkpoints").glob("step-*")):
        return {}
    source = load_yaml(file)
    model, initial = source.section("model"), source.section("initial")
    return {"model": model, "initial": initial} if model and initial.get("model") == name else {}


def _own_data(name: str) -> str:
    """The prepared data of a run, if it is still there; empty otherwise."""
    file = run_file(name) if Path(name).is_dir() else None
    path = None if file is None else load_yaml(file).section("data").get("path")
    if file is None or not isinstance(path, str):
        return ""
    inside = sorted(one.parent for one in (file.parent / "data").glob("*/manifest.json"))
    if path.startswith("embedded:"):
        return str(inside[0]) if len(inside) == 1 else ""
    return path if (Path(path) / "manifest.json").is_file() else ""


def default_layer(model: Mapping[str, Any], name: str, *, keeps_preset: bool) -> Source:
    """The layer of defaults for training a model further: batches of the demo presets, and a lower learning rate.

    Args:
        model: its config.
        name: as for `model_layer`; the optimiser of its run is used, if there is one, at three quarters of its rates.
        keeps_preset: a preset determines batches and length, so only optimiser and schedule are replaced.
    """
    entry = ARCHITECTURES[model["architecture"]]
    config = PRESETS[entry.further or MODEL_TASKS[entry.task].further]()
    values = to_plain(config)
    del values["model"], values["initial"]
    plain = {"name": "adamw", "learning_rate": 5e-4, "weight_decay": 0.0}
    values["optimiser"] = _lower_rates(name) or {**values["optimiser"], **plain}
    values["schedule"] = {"kind": "linear", "warmup_steps": 50, "min_ratio": 0.0}
    if keeps_preset:
        values = {name: values[name] for name in ("optimiser", "schedule")}
    else:
        values["run_dir"] = "runs/run"
        values["data"].pop("path")
        if "decoding" in values:  # the demo's length penalty is for models that were trained briefly
            del values["decoding"]["length_penalty"]
            values["decoding"] |= _of_run(name, "decoding")
        if model["architecture"] == "reformer":
            values["data"]["segment_len"] = values["reading"]["segment_len"] = model["max_len"]
            values["data"]["lanes"] = max(1, 16_384 // model["max_len"])
    return Source(values, "the defaults for training a model further")


def _lower_rates(name: str) -> dict[str, Any]:
    """Return the optimiser settings of the run that trained the model, with three quarters of its learning rates.

    The result is empty if there is no such run, or if its schedule was `noam`.
    """
    optimiser = _of_run(name, "optimiser")
    if _of_run(name, "schedule").get("kind") == "noam":  # its rate is a factor of another formula
        return {}
    given = {key: value for key, value in optimiser.items() if key in _RATES and isinstance(value, float | int)}
    # Rounded, because config.yaml shows the rates to users.
    return {**optimiser, **{key: float(f"{_OF_RATES * value:.6g}") for key, value in given.items()}}


def _of_run(name: str, section: str) -> dict[str, Any]:
    """A section of the config.yaml of the run that trained a model; empty if there is no such run."""
    return run_section(name, section) if Path(name).is_dir() else {}


def check_sizes(config: RunConfig, layer: Source) -> None:
    """Refuse settings of the model that contradict the model from which the run begins.

    Args: config: of the run. layer: see `model_layer`.

    Raises: ConfigError: naming each such setting.
    """
    model: Any = getattr(config, "model")  # noqa: B009  (each task's config has its own type of it)
    wanted = build(type(model), layer.values["model"], layer.name, "model")
    wrong = [
        f"model.{item.name} is {show_value(to_plain(getattr(model, item.name)))}, but"
        f" {show_value(to_plain(getattr(wanted, item.name)))} in {layer.name}"
        for item in fields(model)
        if item.init and item.name not in _NOT_SIZES and getattr(model, item.name) != getattr(wanted, item.name)
    ]
    if wrong:
        raise ConfigError(
            f"{'; '.join(wrong)}. A run that begins from a model has its sizes (only dropout can change); leave these"
            " settings out."
        )
