"""`manyheads info PATH --length N`: the memory of a run that has not begun."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from manyheads.cli.machine import set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.build import resolve
from manyheads.config.files import load_yaml
from manyheads.errors import ConfigError
from manyheads.tasks.presets import PRESETS
from manyheads.tasks.table import RUNS
from manyheads.tasks.text.settings import TextConfig

if TYPE_CHECKING:
    from manyheads.training.plan.memory import Footprint

__all__ = ["predict"]

MIB = 2**20


def predict(path: Path, length: int, rows: int | None, *, as_json: bool = False) -> int:
    """Print what training takes at a length.

    Args:
        path: a run's folder, a model's, a YAML file of settings, or the name of a preset.
        length: tokens of a segment.
        rows: sequences at once; None: as the run has it.
        as_json: print JSON.

    Returns: the exit code.
    Raises: ConfigError: nothing trains a language model by these settings, or the length is beyond its positions.
    """
    config = _config(path)
    set_up_machine()
    from manyheads.tasks.text.plan import predict_memory

    with showing_if_long() as show:
        found = predict_memory(config, length, rows, show)
    if as_json:
        print(json.dumps({"path": str(path), **found.to_json()}, indent=2))
    else:
        print("\n".join(_lines(found)))
    return 0


def _config(path: Path) -> TextConfig:
    model_file = next((file for file in (path / "config.json",) if file.is_file()), None)
    run_file = path / "config.yaml" if path.is_dir() else path
    if model_file is not None:
        from manyheads.architectures.pretrained import read_config

        model = read_config(path)
        if RUNS.get(model.architecture) is not TextConfig:
            raise _other(path, model.architecture)
        return replace(TextConfig(), model=model)
    if run_file.is_file():
        source = load_yaml(run_file, may_be_pipe=run_file == path)
        section = source.values.get("model")
        name = section.get("architecture", "transformer") if isinstance(section, dict) else "transformer"
        if RUNS.get(name) is not TextConfig:
            raise _other(path, name)
        return resolve(TextConfig, [source])
    if str(path) in PRESETS:
        config: Any = PRESETS[str(path)]()
        if config.task == "translation":
            raise _other(path, config.model.architecture)
        return cast(TextConfig, config)
    names = [name for name, make in PRESETS.items() if make().task != "translation"]
    raise ConfigError(
        f"{path} is neither a run, a model, a file of settings nor a preset; the presets of language models are"
        f" {', '.join(names)}."
    )


def _other(path: Path, architecture: object) -> ConfigError:
    return ConfigError(
        f"{path} is of a {architecture}, whose batches are of many lengths; --length is of language models. Memory"
        " of a step: `manyheads train --dry-run`."
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
