"""The settings of a language model's training, found by a name: a run, a model, a file or a preset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from manyheads.catalogue import PRESETS
from manyheads.config.build import resolve
from manyheads.config.files import load_yaml
from manyheads.errors import ConfigError
from manyheads.tasks.language_modelling.settings import TextConfig
from manyheads.tasks.table import RUNS


def find_config(path: Path) -> TextConfig:
    """Return the training settings that a path names.

    Args: path: the folder of a run or a model, a YAML file of settings, or the name of a preset.

    Raises: ConfigError: it is none of them, or it is not of a language model.
    """
    run_file = path / "config.yaml" if path.is_dir() else path
    if (path / "config.json").is_file():
        from manyheads.models.pretrained import read_config

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
