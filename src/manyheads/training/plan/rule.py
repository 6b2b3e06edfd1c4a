"""The rule that plans a run: sizes, regularisation, batch and schedule from the amount of data, the minutes and the
rate of the machine.

Its numbers come from the runs in experiments/own-data.md: the best settings for a number of steps and a number of
passes over the data. This file measures and reads nothing, so a plan can be computed by hand from its facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

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
