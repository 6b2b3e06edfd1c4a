"""`manyheads info PATH --length N`: the memory of a run that has not begun."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.cli.machine import set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.build import resolve
from manyheads.config.files import load_yaml
from manyheads.errors import ConfigError
from manyheads.tasks.presets import PRESETS
from manyheads.tasks.table import RUNS
from manyheads.tasks.text.settings import TextConfig

if TYPE_CHECKING:
    from manyheads.training.plan.planner import Footprint

__all__ = ["predict"]

MIB = 2**20


def predict(path: Path, length: int, rows: int | None, *, as_json: bool = False) -> int:
    """Print the memory of training at a length.

    Args:
        path: the folder of a run or a model, a YAML file of settings, or the name of a preset.
        length: tokens of a segment.
        rows: sequences of a micro-batch; None: as in the run's settings.
        as_json: print JSON.

    Returns: the exit code.
    Raises: ConfigError: these settings are not of a language model, or the length is above its number of positions.
    """
    config = _config(path)
    set_up_machine()
    from manyheads.tasks.runs import planner

    with showing_if_long() as show:
        found = planner(config).memory(length, rows, show)
    if as_json:
        record = asdict(found)
        probes = record.pop("probes")
        record = {"path": str(path), **record, "total_bytes": found.total_bytes, "probed_lengths": probes}
        print(json.dumps(record, indent=2))
    else:
        print("\n".join(_lines(found)))
    return 0


def _config(path: Path) -> TextConfig:
    run_file = path / "config.yaml" if path.is_dir() else path
    if (path / "config.json").is_file():
        from manyheads.architectures.pretrained import read_config

        model = read_config(path)
        _check_language_model(path, model.architecture)
        return replace(TextConfig(), model=model)
    if run_file.is_file():
        source = load_yaml(run_file, may_be_pipe=run_file == path)
        section = source.values.get("model")
        known = section if isinstance(section, dict) else {}
        _check_language_model(path, known.get("architecture", "transformer"))
        return resolve(TextConfig, [source])
    presets: dict[str, Any] = {name: make() for name, make in PRESETS.items()}
    if str(path) in presets:
        config = presets[str(path)]
        _check_language_model(path, config.model.architecture)
        return config  # type: ignore[no-any-return]
    names = [name for name, config in presets.items() if RUNS[config.model.architecture] is TextConfig]
    raise ConfigError(
        f"{path} is neither a run, a model, a file of settings nor a preset; the presets of language models are"
        f" {', '.join(names)}."
    )


def _check_language_model(path: Path, architecture: object) -> None:
    if RUNS.get(str(architecture)) is not TextConfig:
        raise ConfigError(
            f"{path} is a {architecture}, whose batches have sequences of many lengths; --length is of language models."
            " For the memory of a step use `manyheads train --dry-run`."
        )


def _lines(found: Footprint) -> list[str]:
    tried = " and ".join(f"{probe:,}" for probe in found.probes)
    rows = f"{found.rows:,} sequence{'s' if found.rows > 1 else ''}"
    parts = {
        "program": found.program_bytes,
        "weights, gradients, optimiser": found.state_bytes,
        f"a step of {rows} of {found.length:,} tokens": found.step_bytes,
        "together": found.total_bytes,
    }
    width = max(map(len, parts))
    return [
        f"peak memory of training on a CPU in {found.precision}",
        *(f"  {name:<{width}}  {size / MIB:>10,.0f} MiB" for name, size in parts.items()),
        f"counted in steps of {tried} tokens",
    ]
