"""The plan of a run on one's own data: facts about the data and the machine, a rule, and a table of the choices.

The rule chooses sizes, regularisation, batch and schedule from the amount of data, the minutes and the rate of the
machine. Its numbers come from the runs in experiments/own-data.md: the best settings for a number of steps and a number
of passes over the data. It measures and reads nothing, so a plan can be computed by hand from its facts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from manyheads.catalogue import MODEL_TASKS, TASKS
from manyheads.config.build import convert, resolve
from manyheads.config.files import Source, from_dotted, to_dotted
from manyheads.config.options import show_value
from manyheads.data.prepared_folder import read_prepared
from manyheads.errors import ConfigError, DataError
from manyheads.tasks.held_out import json_or_empty
from manyheads.tasks.language_modelling.settings import TextConfig, xl_demo
from manyheads.tasks.translation.settings import TrainConfig, demo
from manyheads.text.pipeline import MAX_FILE_BYTES

N = TypeVar("N", int, float)

REFERENCE_WIDTH = 256
"""d_model of the model whose rate is measured."""

REFERENCE_LAYERS = {"pairs": 3, "text": 4}
"""Its layers, of each stack."""

TRAINING_SHARE = 0.85
"""The share of the minutes that is spent on steps; validation, samples and checkpoints take the rest."""

_COST_EXPONENT = 1.8
"""A step's time grows with this power of d_model: products grow with its square, everything else more slowly."""

_SHORT_RUN = 4000
"""A run with fewer steps takes the choices of the demo, and does not gain from averages of the weights."""

_MANY_PASSES = 20
"""From so many passes over sentence pairs on, each pass segments words differently (BPE dropout)."""

_DROPOUT: dict[str, tuple[tuple[tuple[float, float], ...], float]] = {
    "pairs": (((4, 0.0), (10, 0.1), (20, 0.2)), 0.3),
    "pairs, segmented anew": (((40, 0.1), (90, 0.2)), 0.3),
    # After five passes over a novel, dropout 0.1 still cost a language model 0.09 bits a byte.
    "text": (((8, 0.0), (20, 0.1), (40, 0.2)), 0.3),
}
"""The dropout below so many passes, and that of more passes."""

_STEP_TOKENS = 2048
_SEGMENT_LEN = 128
_LENGTH_MULTIPLE = 16


@dataclass(frozen=True)
class _Width:
    """A width, its number of layers (of each stack), and the least number of steps and of training tokens for which it
    is chosen."""

    d_model: int
    num_layers: int
    least_steps: int
    least_tokens: int


_WIDTHS: dict[str, tuple[_Width, ...]] = {
    "pairs": (
        _Width(512, 6, 15_000, 10_000_000),
        _Width(384, 4, 4_000, 2_000_000),
        _Width(256, 3, 1_500, 150_000),
        _Width(192, 2, 250, 100_000),
        _Width(128, 2, 0, 0),
    ),
    "text": (
        _Width(512, 8, 15_000, 20_000_000),
        _Width(384, 6, 6_000, 5_000_000),
        _Width(256, 6, 3_000, 1_000_000),
        _Width(192, 4, 300, 500_000),
        _Width(128, 4, 0, 0),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts on which a plan depends.

    Attributes:
        kind: sentence pairs, or a text for a language model.
        num_samples: training pairs; of a text, its documents or 1.
        tokens: training tokens; of pairs, those of the larger side, special tokens included.
        longest_source, longest_target: tokens of the longest sentences, special tokens included; 0 for a text.
        has_merges: the tokenizer of pairs is BPE, whose merges can be left out at random.
        minutes: limit of the run; 0 if it is limited by steps.
        steps: number of steps, if that is the limit.
        tokens_per_second: of training steps with the reference model on this machine; not used if `steps` is given.
        given: settings that the user has fixed, by dotted names.
    """

    kind: Literal["pairs", "text"]
    num_samples: int
    tokens: int
    longest_source: int = 0
    longest_target: int = 0
    has_merges: bool = False
    minutes: float = 0.0
    steps: int = 0
    tokens_per_second: float
    given: Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    """A setting by its dotted name, its value, and the reason in a few words; empty reasons are not shown."""

    setting: str
    value: Any
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """The choices, and the expected optimiser steps and passes over the data."""

    choices: tuple[Choice, ...]
    num_steps: int
    num_epochs: float

    def settings(self) -> dict[str, Any]:
        """Return setting -> value."""
        return {choice.setting: choice.value for choice in self.choices}


def plan_run(facts: Facts) -> Plan:
    """Return the plan for some facts. A choice that the user has fixed is left out, and the others follow from it."""
    step_tokens = int(facts.given.get("data.max_tokens") or _STEP_TOKENS)
    if facts.kind == "text":
        step_tokens = int(facts.given.get("data.lanes") or _lanes(facts)) * _segment_len(facts)
    width = _choose_width(facts, step_tokens)
    d_model = int(facts.given.get("model.d_model") or width.d_model)
    layers = _layers(facts, width)
    steps = _steps(facts, d_model, layers, step_tokens)
    if facts.kind == "pairs" and "data.max_tokens" not in facts.given:
        step_tokens = _first_below(steps, ((250, 1024), (6_000, 2048), (24_000, 4096)), 8192)
        step_tokens = max(step_tokens, _limit(facts.longest_source), _limit(facts.longest_target))
        steps = _steps(facts, d_model, layers, step_tokens)
    epochs = steps * step_tokens / max(1, facts.tokens)
    make = _pairs if facts.kind == "pairs" else _text
    choices = [*_shape(facts, width, d_model, steps), *make(facts, step_tokens), *_learning(facts, steps, epochs)]
    return Plan(tuple(one for one in choices if one.setting not in facts.given), steps, epochs)


def _choose_width(facts: Facts, step_tokens: int) -> _Width:
    """The widest model that gets enough steps and enough tokens; of a given width, the next one not above it."""
    widths = _WIDTHS[facts.kind]
    if given := facts.given.get("model.d_model"):
        return next((width for width in widths if width.d_model <= int(given)), widths[-1])
    for width in widths:
        enough = _steps(facts, width.d_model, _layers(facts, width), step_tokens) >= width.least_steps
        if enough and facts.tokens >= width.least_tokens:
            return width
    return widths[-1]


def _layer_names(facts: Facts) -> tuple[str, ...]:
    return ("num_encoder_layers", "num_decoder_layers") if facts.kind == "pairs" else ("num_layers",)


def _layers(facts: Facts, width: _Width) -> float:
    """The layers of each stack, or their mean if the user has fixed them."""
    counts = [int(facts.given.get(f"model.{name}") or width.num_layers) for name in _layer_names(facts)]
    return sum(counts) / len(counts)


def _steps(facts: Facts, d_model: int, num_layers: float, step_tokens: int) -> int:
    """The steps of the run with a model of this size."""
    if facts.steps:
        return facts.steps
    cost = (d_model / REFERENCE_WIDTH) ** _COST_EXPONENT * (num_layers / REFERENCE_LAYERS[facts.kind])
    return max(1, int(60 * facts.minutes * TRAINING_SHARE * facts.tokens_per_second / cost / step_tokens))


def _shape(facts: Facts, width: _Width, d_model: int, steps: int) -> list[Choice]:
    wider = [one for one in _WIDTHS[facts.kind] if one.d_model > width.d_model]
    reason = f"about {steps:,} steps of {facts.tokens:,} training tokens"
    if wider:
        needed = wider[-1]
        tokens = f" and {needed.least_tokens:,} tokens" if needed.least_tokens else ""
        reason += f"; {needed.d_model} needs {needed.least_steps:,} steps{tokens}"
    heads = max((count for count in (8, 4, 2, 1) if d_model % count == 0 and d_model // count >= 32), default=1)
    heads = min(heads, 4) if d_model <= REFERENCE_WIDTH else heads
    found = [
        Choice("model.d_model", d_model, reason),
        Choice("model.num_heads", heads, f"heads of {d_model // heads} dimensions"),
        Choice("model.d_ff", 4 * d_model, "four times d_model, as in the papers"),
        *(Choice(f"model.{name}", width.num_layers, f"for d_model {d_model}") for name in _layer_names(facts)),
    ]
    if facts.kind == "pairs":
        return [
            *found,
            Choice("model.norm_position", "pre", "trains without a long warm-up"),
            Choice("model.relative_bias", 16, "the order of words is learned sooner than from sinusoids"),
            Choice("model.positions", "none", "the distances of the relative bias are enough"),
        ]
    return [
        *found,
        Choice("model.memory_len", _segment_len(facts), "one segment of memory"),
        Choice("model.relative_bias", 16, "which tokens are near is learned sooner than from sinusoids"),
    ]


def _pairs(facts: Facts, step_tokens: int) -> list[Choice]:
    sides = (("source", facts.longest_source), ("target", facts.longest_target))
    return [
        Choice("data.max_tokens", step_tokens, "small steps: their number matters most in a short run"),
        *(
            Choice(f"data.max_{side}_len", _limit(longest), f"the longest has {longest} tokens")
            for side, longest in sides
        ),
        Choice("data.pad_to_multiple", 2, "fewer shapes, for which kernels are prepared"),
        Choice("training.label_smoothing", 0.1, "as in the Transformer paper"),
        Choice("decoding.num_beams", 4, "as in the Transformer paper"),
        Choice("decoding.max_len_offset", 20),
        Choice("validation.bleu_sentences", 100, "so that a validation takes seconds"),
    ]


def _limit(longest: int) -> int:
    """A limit that drops no sentence, up to 256 tokens."""
    return min(256, max(32, -(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE))


def _segment_len(facts: Facts) -> int:
    return int(facts.given.get("data.segment_len") or _SEGMENT_LEN)


def _lanes(facts: Facts) -> int:
    return max(1, min(16, facts.tokens // (10 * _SEGMENT_LEN)))


def _text(facts: Facts, step_tokens: int) -> list[Choice]:
    segment_len = _segment_len(facts)
    memory_len = int(facts.given.get("model.memory_len", segment_len))
    return [
        Choice("data.lanes", _lanes(facts), "16, unless a lane would have less than ten segments"),
        Choice("data.segment_len", _SEGMENT_LEN, "many short steps learn faster than few long ones"),
        Choice("training.label_smoothing", 0.0, "the loss is the measure of a language model"),
        Choice("reading.segment_len", segment_len),
        Choice("reading.memory_len", 2 * memory_len, "twice the memory of training reads better"),
        Choice("reading.max_tokens", 20_000, "so that a validation takes seconds"),
        Choice("validation.sample_tokens", 300),
        Choice("generation.temperature", 0.8),
    ]


def _learning(facts: Facts, steps: int, epochs: float) -> list[Choice]:
    rounded = f"about {epochs:.1f} passes over the data"
    bpe_dropout = 0.1 if facts.has_merges and epochs >= _MANY_PASSES else 0.0
    is_segmented_anew = facts.kind == "pairs" and facts.given.get("data.bpe_dropout", bpe_dropout) > 0
    dropout = _first_below(epochs, *_DROPOUT["pairs, segmented anew" if is_segmented_anew else facts.kind])
    is_short = steps < 600
    adam, muon = (0.01, 0.03) if is_short and facts.kind == "pairs" else (0.006, 0.02)
    if facts.kind == "text":
        adam = 0.003
    short = [
        Choice("initial.embeddings", "cooccurrence", "words begin near their translations"),
        Choice("decoding.length_penalty", 1.2, "after few steps translations are too short"),
    ]
    every = max(10, _round(steps / _validations(facts)))
    limit = [Choice("training.max_minutes", facts.minutes, "the time to be used"), Choice("training.max_steps", 0)]
    by_muon = facts.given.get("optimiser.name", "muon") == "muon"
    decay = Choice("optimiser.weight_decay", 0.1, "unseen sentences are translated better")
    anew = Choice("data.bpe_dropout", bpe_dropout, f"{rounded}, each with other pieces, need less dropout")
    return [
        *([anew] if bpe_dropout else []),
        Choice("model.dropout", dropout, f"{rounded}; more passes need more"),
        Choice("optimiser.name", "muon", "learns more in a short run than Adam"),
        Choice("optimiser.learning_rate", adam, f"for {'few' if is_short else 'many'} steps"),
        Choice("optimiser.muon_learning_rate", muon, f"for {'few' if is_short else 'many'} steps"),
        *([decay] if facts.kind == "pairs" and by_muon else []),
        Choice("optimiser.clip_norm", 1.0),
        Choice("schedule.kind", "linear", "the rate ends at 0 with the run"),
        Choice("schedule.warmup_steps", max(10, min(200, steps // 20)), "a twentieth of the steps, at most 200"),
        Choice("training.ema_decay", 0.998 if steps >= _SHORT_RUN else 0.0, "averages need thousands of steps"),
        *(short if facts.kind == "pairs" and steps < _SHORT_RUN else []),
        *([] if facts.steps else limit),
        Choice("validation.every_steps", every, f"about {_validations(facts)} validations"),
        Choice("training.save_every", every, "with each validation"),
        Choice("training.log_every", max(1, min(50, steps // 20))),
        Choice("training.keep", 2),
    ]


def _validations(facts: Facts) -> int:
    return 5 if facts.steps else max(2, min(10, round(facts.minutes / 2)))


def _first_below(value: float, bounds: tuple[tuple[float, N], ...], last: N) -> N:
    """Return the entry of the first bound that is above the value."""
    return next((found for bound, found in bounds if value < bound), last)


def _round(value: float) -> int:
    """Round to one or two digits."""
    unit = _first_below(value, ((100, 5), (1000, 10)), 100)
    return round(value / unit) * unit


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
    """Whether the tokenizer is BPE, so that `data.bpe_dropout` can be used."""
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
    from manyheads.extras.planning.planner import tokens_per_second
    from manyheads.training.run.device import resolve_precision
    from manyheads.training.run.objective import synthetic_run_of

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
