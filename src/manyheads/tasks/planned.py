"""The plan of a run on one's own data: facts about the data and the machine, the rule of `training.plan.rule`, and a
table of the choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyheads.catalogue import MODEL_TASKS, TASKS
from manyheads.config.build import convert, resolve
from manyheads.config.describe import show_value
from manyheads.config.files import Source, from_dotted, to_dotted
from manyheads.data.prepared_folder import read_prepared
from manyheads.errors import ConfigError, DataError
from manyheads.tasks.language_modelling.settings import TextConfig
from manyheads.tasks.presets import demo, xl_demo
from manyheads.tasks.table import json_or_empty
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.text.pipeline import MAX_FILE_BYTES
from manyheads.training.plan.rule import REFERENCE_LAYERS, REFERENCE_WIDTH, Choice, Facts, Plan, plan_run

DEFAULT_MINUTES = 20.0
_KINDS = {"translation": "pairs", "language-modelling": "text"}
_ARCHITECTURES = {"pairs": "transformer", "text": "transformer-xl"}
_CONFIGS: dict[str, type[TrainConfig] | type[TextConfig]] = {"pairs": TrainConfig, "text": TextConfig}
_RATES = tuple(10.0**power for power in range(1, 8))
"""Of slow and fast machines, in tokens per second."""

MeasureRate = Callable[[Any, int, int], tuple[float, str]]


@dataclass(frozen=True)
class PlannedRun:
    """The settings of a planned run as a layer below the command line, and the table that explains them."""

    layer: Source
    table: str


def plan_layer(typed: Source, measure: MeasureRate | None = None) -> PlannedRun:
    """Plan a run on prepared data. Settings of the command line are kept, and the others follow from them.

    Args:
        typed: the settings of the command line, with `data.path`.
        measure: (config, length, rows) -> tokens per second of training steps, and a description of the machine;
            None: measured here.

    Raises: ConfigError: the data is not of pairs or text, or another architecture is asked for; the message names a
        preset. DataError: it cannot be read.
    """
    given = to_dotted(typed.values)
    folder = Path(str(given["data.path"]))
    manifest = read_prepared(folder)
    kind = _kind_of(folder, manifest, given)
    minutes, steps = _limit_of(given)
    try:
        config = _reference(kind, manifest, typed)
        facts, machine = _facts(kind, folder, manifest, minutes, steps, given), ""
    except KeyError as error:
        raise DataError(f"{folder}/manifest.json is damaged: it has no {error}. Prepare the data again.") from None
    length, rows = (16, 128) if kind == "pairs" else (config.data.segment_len, config.data.lanes)
    if not steps:  # their number does not depend on the machine
        _check_given(facts, folder, typed)
        rate, machine = (measure or _measured)(config, length, rows)
        facts = replace(facts, tokens_per_second=rate)
    plan = plan_run(facts)
    return PlannedRun(_layer_of(plan, facts, folder, given), _table(plan, facts, given, machine))


def _layer_of(plan: Plan, facts: Facts, folder: Path, given: Mapping[str, Any]) -> Source:
    values: dict[str, Any] = {
        **plan.settings(),
        "model.architecture": _ARCHITECTURES[facts.kind],
        "run_dir": f"runs/{folder.resolve().name}",
    }
    chosen = {name: value for name, value in values.items() if name not in given}
    return from_dotted((_CONFIGS[facts.kind],), chosen, "the plan")


def _check_given(facts: Facts, folder: Path, typed: Source) -> None:
    """Find a mistake in the given settings before the measurement, which takes seconds.

    Raises: ConfigError: they are wrong whatever the rate is, and so the sizes that the plan chooses.
    """
    mistake: ConfigError | None = None
    for rate in _RATES:
        layer = _layer_of(plan_run(replace(facts, tokens_per_second=rate)), facts, folder, to_dotted(typed.values))
        try:
            resolve(_CONFIGS[facts.kind], [layer, typed])
        except ConfigError as error:
            mistake = error
        else:
            return
    assert mistake is not None
    raise mistake


def _kind_of(folder: Path, manifest: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    task = manifest.get("task")
    name = task.get("name") if isinstance(task, Mapping) else "translation"
    kind = _KINDS.get(str(name))
    if kind == "text" and json_or_empty(folder / "tokenizer.json", MAX_FILE_BYTES).get("level") == "ids":
        raise ConfigError(f"A plan is for sentence pairs and text; {folder} holds ids. Name --preset reformer-demo.")
    if kind is None:
        known = next((one for one in TASKS.values() if one.recorded_as == name), TASKS["translation"])
        preset = MODEL_TASKS[known.model_task].further
        raise ConfigError(f"A plan is for sentence pairs and text; {folder} is for {name}. Name --preset {preset}.")
    asked = given.get("model.architecture", _ARCHITECTURES[kind])
    if asked != _ARCHITECTURES[kind]:
        preset = "reformer-demo" if kind == "text" else "demo --architecture reformer"
        raise ConfigError(
            f"model.architecture is {asked}, but a plan for {folder} is for {_ARCHITECTURES[kind]}; name a preset, such"
            f" as --preset {preset}."
        )
    return kind


def _has_merges(folder: Path) -> bool:
    """Whether the tokenizer is BPE, so that `data.translation.bpe_dropout` can be used."""
    model = json_or_empty(folder / "tokenizer.json", MAX_FILE_BYTES).get("model")
    return isinstance(model, dict) and model.get("type") == "BPE"


def _limit_of(given: Mapping[str, Any]) -> tuple[float, int]:
    """Return the minutes and steps of the run: the given ones, or the default minutes."""
    steps = convert(int, given.get("training.max_steps", 0), "training.max_steps")
    minutes = convert(float, given.get("training.max_minutes", 0.0 if steps else DEFAULT_MINUTES), "--minutes")
    if not 0 <= minutes < math.inf or steps < 0 or not (minutes or steps):
        raise ConfigError(f"--minutes is {minutes:g}; a plan needs a time above 0, such as --minutes 20.")
    return (0.0, steps) if steps and not minutes else (minutes, 0)


def _reference(kind: str, manifest: Mapping[str, Any], typed: Source) -> Any:
    """The run whose rate is measured: the demo presets at the reference width, with this data's vocabulary."""
    own = {name: typed.values[name] for name in ("device", "precision", "num_threads") if name in typed.values}
    if "num_threads" in own:
        own["num_threads"] = convert(int, own["num_threads"], "num_threads")
    size = manifest["tokenizer"]["vocab_size"]
    if kind == "pairs":
        base = demo("bf16")
        layers = dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), REFERENCE_LAYERS[kind])
        sizes = {"source_vocab_size": size, "target_vocab_size": size, **layers}
        return replace(base, **own, model=replace(base.model, **sizes))
    text = xl_demo()
    model: Any = text.model
    width = {"d_model": REFERENCE_WIDTH, "head_dim": REFERENCE_WIDTH // 4, "d_ff": 4 * REFERENCE_WIDTH}
    return replace(text, **own, model=replace(model, vocab_size=size, **width))


def _measured(config: Any, length: int, rows: int) -> tuple[float, str]:
    from manyheads.decoding.model_runner import choose_device
    from manyheads.training.plan.planner import synthetic_run_of, tokens_per_second
    from manyheads.training.run.precision import resolve_precision

    device = choose_device(config.device)
    config = resolve_precision(config, device)
    rate = tokens_per_second(synthetic_run_of(config), length, rows, device)
    return rate, f"{device}, {config.precision}"


def _facts(
    kind: str, folder: Path, manifest: Mapping[str, Any], minutes: float, steps: int, given: Mapping[str, Any]
) -> Facts:
    """Return what the plan depends on, without the rate, which is measured later."""
    counts = manifest["counts"]["train"]
    fixed = dict(given)
    layers = [f"model.{name}" for name in ("num_layers", "num_encoder_layers", "num_decoder_layers")]
    for name in ("model.d_model", *layers, "data.max_tokens", "data.lanes", "data.segment_len"):
        if name in fixed:
            fixed[name] = convert(int, fixed[name], name)
            if fixed[name] < 1:
                raise ConfigError(f"{name} is {fixed[name]}; it must be at least 1.")
    if "data.bpe_dropout" in fixed:
        fixed["data.bpe_dropout"] = convert(float, fixed["data.bpe_dropout"], "data.bpe_dropout")
    if "model.memory_len" in fixed:
        fixed["model.memory_len"] = convert(int, fixed["model.memory_len"], "model.memory_len")
    common: dict[str, Any] = {"minutes": minutes, "steps": steps, "tokens_per_second": 0.0, "given": fixed}
    if kind == "text":
        return Facts(kind="text", num_samples=max(1, counts["documents"]), tokens=counts["tokens"], **common)
    pairs = counts["pairs"]
    return Facts(
        kind="pairs",
        num_samples=pairs,
        tokens=max(counts["source_tokens"] + pairs, counts["target_tokens"] + 2 * pairs),
        longest_source=counts["source_longest"] + 1,
        longest_target=counts["target_longest"] + 2,
        has_merges=_has_merges(folder),
        **common,
    )


def _table(plan: Plan, facts: Facts, given: Mapping[str, Any], machine: str) -> str:
    """A line about the data and the machine, and one for each choice."""
    what = f"{facts.num_samples:,} pairs, " if facts.kind == "pairs" else ""
    limit = (
        f"{facts.minutes:g} minute{'' if facts.minutes == 1 else 's'}" if facts.minutes else f"{facts.steps:,} steps"
    )
    head = (
        f"plan for {what}{facts.tokens:,} training tokens and {limit}: about {plan.num_steps:,} steps,"
        f" {plan.num_epochs:.1f} passes"
    )
    if machine:
        head += f"\nmeasured: {facts.tokens_per_second:,.0f} tokens/s at d_model {REFERENCE_WIDTH} ({machine})"
    typed = [Choice(name, value, "given on the command line") for name, value in given.items() if "." in name]
    rows = [(one.setting, show_value(one.value), one.reason) for one in (*typed, *plan.choices) if one.reason]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {name:<{widths[0]}}  {value:<{widths[1]}}  {reason}" for name, value, reason in rows]
    return "\n".join([head, *lines, "all settings: config.yaml in the run's folder, or --print-config"])
