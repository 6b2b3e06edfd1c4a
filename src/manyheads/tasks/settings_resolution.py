"""The settings of a run that begins from a model: its sizes and digest, and defaults for training it further.

The settings of a run from their layers: a preset, files, another architecture, single settings; later ones win.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from manyheads.catalogue import (
    ARCHITECTURES,
    MODEL_TASKS,
    PRESETS,
    RUNS,
    SIZED_BY_PRECISION,
    TASKS,
    ModelTask,
    made_by,
    origins,
)
from manyheads.config.build import build, resolve
from manyheads.config.checks import not_among
from manyheads.config.files import Source, field_types, load_yaml, to_plain
from manyheads.config.options import show_value
from manyheads.data.settings import shares_of
from manyheads.errors import ConfigError, ModelFileError
from manyheads.files.verify import file_sha256, read_object
from manyheads.models.hub import resolve_model_path
from manyheads.tasks.held_out import COPY_TASK, EMBEDDED, json_or_empty, run_file, run_section, task_of_folder
from manyheads.training.settings import RunConfig

_NOT_SIZES = ("dropout", "attention_dropout")
_RATES = ("learning_rate", "muon_learning_rate")
_OF_RATES = 0.75
_RECORDS = ("format_version", "model_type", "task", "languages", "plugins")


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
        if model["architecture"] == "decoder" and model["positions"] == "learned":
            length = min(model["max_len"], values["data"]["segment_len"])
            values["data"]["segment_len"] = values["reading"]["segment_len"] = length
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


_SIZES = (
    "d_model",
    "num_heads",
    "head_dim",
    "d_ff",
    "num_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "dropout",
    "attention_dropout",
)
_NOTHING = """nothing to train yet. Start from one of the presets,
  manyheads train --preset demo             a translator from embedded sentences, in minutes
or from your own data, with settings planned for 20 minutes (or --minutes M),
  manyheads prepare --help                  text files -> data/mine
  manyheads train --data.path data/mine
or from a file of settings,
  manyheads train --config my.yaml
Presets: {presets}. All settings: manyheads train --help."""


def resolve_run(
    typed: Source,
    *,
    preset: str | None = None,
    files: Sequence[str] = (),
    architecture: str | None = None,
    precision: str = "bf16",
    resume: str = "auto",
    plan: Callable[[Source], Source] | None = None,
    mistakes: Sequence[str] = (),
) -> RunConfig:
    """Build the settings of a run.

    Without a preset or a file, the settings of the run in the folder `run_dir`, if there is one, are the first layer.

    Args:
        typed: the single settings, which win over all others.
        preset: name in `PRESETS`.
        files: YAML files, later ones winning.
        architecture: train this kind of model instead, of the same sizes.
        precision: for presets whose sizes depend on it.
        resume: `none` if the run begins again.
        plan: single settings -> the layer below them, for prepared data without a preset, a file or an initial model;
            None: such data is trained with the default settings.
        mistakes: those that were found before, to be reported with the others.

    Raises: ConfigError: names that do not exist, files that cannot be read, values of the wrong type or out of range.
        One message lists all of them.
    """
    found = list(mistakes)
    _choose_path_of_mix([typed])
    base = _base(typed, preset, files, precision, found)
    if (
        plan is not None
        and not base
        and not found
        and architecture is None
        and not typed.section("initial").get("model")
    ):
        base = _planned(typed, resume, plan)
    is_complete = len(found) == len(mistakes)
    sources = [*base, typed]
    _choose_path_of_mix(base)
    initial = None if found else _begin_from(sources, preset, architecture, resume, found)
    base = sources[:-1]
    _use_all_of_other_data(sources)
    if architecture is not None:
        sources.insert(-1, _of_architecture(architecture, sources, found))
    if not base and not found and not typed.section("data").get("path"):
        raise ConfigError(_NOTHING.format(presets=", ".join(PRESETS)))
    kind = _kind_of_task(_kind_of_run(sources, found), preset, sources[0])
    # Without its preset or a file, the rest of a run may contain mistakes that the user did not write.
    if is_complete:
        try:
            config = resolve(kind, sources)
            found += _unused_vocabulary(typed, config) + _decay_for_muon(sources)
            if initial is not None:
                check_sizes(config, initial)
        except ConfigError as error:
            found.append(str(error))
    if found:
        raise ConfigError("\n".join([*found, *_missing_plugins(sources)]))
    return config


def _missing_plugins(sources: Sequence[Source]) -> Iterator[str]:
    """Say which plug-ins are not there of those that the model of a run's folder records."""
    for path in (Path(source.name) for source in sources if Path(source.name).name == "config.yaml"):
        needed = json_or_empty(path.parent / "model" / "config.json").get("plugins")
        missing = [str(name) for name in needed if name not in origins()] if isinstance(needed, list) else []
        if missing:
            yield f"The run needs {', '.join(missing)}: install it, or give --plugin."


def likely_architecture(preset: str | None, files: Sequence[str]) -> str:
    """Return the model.architecture of a preset, or of the first file that names one; without one, the first of all.

    It says which settings a command line probably has. Mistakes are reported by `resolve_run`.
    """
    if preset is not None and preset in PRESETS:
        return str(PRESETS[preset]().model.architecture)
    for name in files:
        if Path(name).is_file():  # a pipe can be read once
            with suppress(ConfigError):
                named = load_yaml(name).section("model").get("architecture")
                if isinstance(named, str) and named in RUNS:
                    return named
    return next(iter(RUNS))


def _begin_from(
    sources: list[Source], preset: str | None, architecture: str | None, resume: str, mistakes: list[str]
) -> Source | None:
    """If the run begins from a model, insert the model's layers: above the preset, below files.

    Returns: the layer of the model's sizes; None if the run begins from random weights, or a mistake was found.
    """
    named = [source.section("initial").get("model") for source in sources]
    name = next((one for one in reversed(named) if isinstance(one, str)), "")
    if not name:
        return None
    if architecture is not None:
        mistakes.append(f"--architecture {architecture} and the model {name} contradict each other; leave one out.")
        return None
    folders = [source.values.get("run_dir") for source in sources]
    run_dir = next((one for one in reversed(folders) if isinstance(one, str)), RunConfig().run_dir)
    try:
        layer = model_layer(name, run_dir, resume)
    except (ConfigError, ModelFileError) as error:
        mistakes.append(str(error))
        return None
    if sources[0].name == str(Path(run_dir) / "config.yaml"):  # the settings of the same run come first
        sources.insert(1, layer)
        return layer
    defaults = default_layer(layer.values["model"], name, keeps_preset=preset is not None)
    place = int(preset is not None)
    sources[place:place] = [defaults, layer]
    return layer


def _choose_path_of_mix(sources: Sequence[Source]) -> None:
    """Set `data.path` of a source that mixes data without naming it: the folder with the largest share."""
    for source in sources:
        section = source.section("data")
        mix = section.get("mix")
        if isinstance(mix, str):
            section["mix"] = mix = [mix]
        if mix and "path" not in section and isinstance(mix, list):
            try:
                shares = shares_of([str(entry) for entry in mix])
            except ConfigError:
                continue  # building the settings reports it
            section["path"] = max(shares, key=lambda name: shares[name])


def _base(typed: Source, preset: str | None, files: Sequence[str], precision: str, mistakes: list[str]) -> list[Source]:
    """The preset and the files, or else the settings of the run that is to be continued."""
    sources = []
    if preset is not None and preset in PRESETS:
        sized = [precision] if preset in SIZED_BY_PRECISION else []
        sources.append(Source(to_plain(_of_preset(preset, *sized)), f"preset {preset}"))
    elif preset is not None:
        mistakes.append(not_among("there is no preset", preset, PRESETS))
    named = [(Path(name), True) for name in files]
    if preset is None and not files and isinstance(typed.values.get("run_dir"), str):
        earlier = Path(typed.values["run_dir"]) / "config.yaml"
        named = [(earlier, False)] if earlier.is_file() else []
    for file, may_be_pipe in named:
        try:
            source = load_yaml(file, may_be_pipe=may_be_pipe)
            if "preset" in source.values:
                mistakes.append(
                    f"{source.where('preset')}: preset is not a setting of a file; remove the line, and give"
                    f" --preset {source.values['preset']} on the command line, together with --config."
                )
            sources.append(source)
        except ConfigError as error:
            mistakes.append(str(error))
    return sources


def _of_preset(name: str, *sized: str) -> RunConfig:
    """Raises: ConfigError: the function of a plug-in's preset fails, or returns no settings of a run."""
    config: RunConfig = made_by(PRESETS, name, *sized)
    if not hasattr(config, "run_dir"):
        raise ConfigError(f"the preset {name} is {config!r}; its function must return the settings of a run.")
    return config


def _unused_vocabulary(typed: Source, config: RunConfig) -> list[str]:
    """A message for each setting of a vocabulary that the command line asks of data that already has one."""
    path = str(Source(to_plain(config), "").section("data").get("path"))
    manifest = Path(path) / "manifest.json"
    if not manifest.is_file():
        return []
    given = {f"tokenizer.{key}": f"tokenizer.{key}" for key in typed.section("tokenizer")}
    given |= {f"vocabulary.{key}": key for key in typed.section("vocabulary")}
    return [
        f"--{name} has no effect on {path}, whose tokenizer was trained when the data was prepared; leave it out, or"
        f" prepare the data again with --{option.replace('_', '-')}."
        for name, option in given.items()
    ]


def _decay_for_muon(sources: Sequence[Source]) -> list[str]:
    """A message if a layer takes Adam and leaves the weight decay of a layer below, which was chosen for Muon.

    Muon and AdamW shrink the weights; Adam adds the decay to the gradient, where the same number does far more.
    """
    name, decay = (
        next((source for source in reversed(sources) if key in source.section("optimiser")), None)
        for key in ("name", "weight_decay")
    )
    if name is None or decay is None or sources.index(name) <= sources.index(decay):
        return []
    value = decay.section("optimiser")["weight_decay"]
    if name.section("optimiser")["name"] != "adam" or value == 0:
        return []
    return [
        f"optimiser.name is adam ({name.where('optimiser.name')}), but optimiser.weight_decay {value}"
        f" ({decay.where('optimiser.weight_decay')}) is for an optimiser that shrinks the weights; Adam would add it to"
        " the gradient. Choose adamw, or give --optimiser.weight_decay as well, for example 0."
    ]


def _planned(typed: Source, resume: str, plan: Callable[[Source], Source]) -> list[Source]:
    """The layer of a plan for prepared data, or the settings of the run that was planned for it before.

    Raises: ConfigError, DataError: see `extras.planning.plan.plan_layer`.
    """
    path = typed.section("data").get("path")
    if not isinstance(path, str) or not (Path(path) / "manifest.json").is_file():
        return []
    earlier = Path("runs") / Path(path).resolve().name / "config.yaml"
    if resume != "none" and "run_dir" not in typed.values and any((earlier.parent / "checkpoints").glob("step-*")):
        known = load_yaml(earlier)
        if Path(str(known.section("data").get("path"))).resolve() == Path(path).resolve():
            return [known]
        raise ConfigError(
            f"{earlier.parent} holds a run on other data ({known.section('data').get('path')}); give --run-dir for"
            " this one."
        )
    return [plan(typed)]


def _use_all_of_other_data(sources: Sequence[Source]) -> None:
    """Apply a preset's data.num_train_pairs to its own data only.

    If another source names other data, all of it is used.
    """
    preset, later = sources[0].section("data"), [source.section("data") for source in sources[1:]]
    paths = [section["path"] for section in later if "path" in section]
    if sources[0].name.startswith("preset ") and paths and paths[-1] != preset.get("path"):
        preset.pop("num_train_pairs", None)


def _of_architecture(name: str, sources: Sequence[Source], mistakes: list[str]) -> Source:
    """The layer of another architecture: its name, and the sizes of the layers below."""
    kinds = {source.section("model").get("architecture") for source in sources} - {None}
    paths = [source.section("data").get("path") for source in sources]
    path = next((path for path in reversed(paths) if isinstance(path, str)), "")
    tasks = [ARCHITECTURES[str(kind)].task for kind in kinds if str(kind) in ARCHITECTURES]
    task = next(iter(tasks), None) or (None if kinds else _task_of_data(path))
    if task is not None and f"{name}{MODEL_TASKS[task].suffix}" in RUNS:
        name = f"{name}{MODEL_TASKS[task].suffix}"
    if name not in RUNS:
        mistakes.append(not_among("--architecture is", name, RUNS))
        return Source({}, "--architecture")
    config: type = ARCHITECTURES[name].config
    known: dict[str, Any] = {}
    for source in sources[:-1]:
        known |= source.section("model")
    # If null is not possible for a size of an architecture, 0 or the default means the same.
    kept = {size: known[size] for size in _SIZES if known.get(size) is not None and size in field_types(config)}
    layer: dict[str, Any] = {"model": {**kept, "architecture": name}}
    if not hasattr(config, "attending") and any(source.section("reading") for source in sources[:-1]):
        layer["reading"] = dict.fromkeys(("memory_len", "clamp_len", "same_length"))  # it has no memory to set
    return Source(layer, "--architecture")


def _task_of_data(data: str) -> ModelTask | None:
    """Return the kind of model that data of that name is for, as far as its name and records tell."""
    task = "translation" if data in (EMBEDDED, COPY_TASK) else task_of_folder(data)
    return None if task is None else TASKS[task].model_task


def _kind_of_run(sources: Sequence[Source], mistakes: list[str]) -> type[RunConfig]:
    """The config class for the sources' model.architecture; a translator's if none is named."""
    named: dict[str, str] = {}
    for source in sources:
        name = source.section("model").get("architecture")
        if isinstance(name, str):
            named.setdefault(name, source.name)
            if name not in RUNS:
                mistakes.append(not_among(f"{source.name}: model.architecture is", name, RUNS))
    if len({RUNS[name] for name in named if name in RUNS}) > 1:
        listed = ", ".join(f"{name} by {where}" for name, where in named.items())
        mistakes.append(f"model.architecture is set twice ({listed}), whose runs have different settings; keep one.")
    kind: type[RunConfig] = RUNS[next((name for name in named if name in RUNS), next(iter(RUNS)))]
    return kind


def _kind_of_task(usual: type[RunConfig], preset: str | None, first: Source) -> type[RunConfig]:
    """The config class of a task with settings of its own: of a preset's object, or as a run's folder records it.

    Args: usual: the class for the model. first: the settings of the preset, or of the run that is continued.
    """
    kind = usual
    if preset is not None and preset in PRESETS and first.name == f"preset {preset}":
        kind = type(_of_preset(preset))
    elif Path(first.name).name == "config.yaml" and (folder := Path(first.name).parent / "model").is_dir():
        task = task_of_folder(str(folder), strictly=True)
        kind = TASKS[task].config if task is not None and TASKS[task].run is not None else usual
    return kind if issubclass(kind, usual) else usual
