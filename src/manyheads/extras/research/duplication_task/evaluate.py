"""Evaluation on the duplication task: accuracy in the second half, by hash rounds (Kitaev et al. 2020, table 2)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from manyheads.config.files import Source, load_yaml
from manyheads.config.options import refuse_given
from manyheads.data.settings import DUPLICATION
from manyheads.errors import ConfigError
from manyheads.evaluation.likelihood import counted
from manyheads.extras.research.duplication import HELD_OUT, evaluate_duplication, held_out
from manyheads.extras.research.hash_rounds import Judged, Tell, judge_models
from manyheads.extras.research.text_task.evaluate import evaluate as evaluate_text
from manyheads.tasks.held_out import run_file

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.decoding.generator import Generator
    from manyheads.extras.research.text_task.options import EvaluateOptions
    from manyheads.models.composites import LanguageModel
    from manyheads.tasks.report import Report

_ROWS = 16


def evaluate(options: EvaluateOptions, progress: Progress) -> Report | None:
    """Judge each model at each number of hash rounds; on another text if one is named.

    Raises: ConfigError: the run's seed and length are unknown, its training sequences are asked for, or an ensemble.
    """
    if options.others or options.data not in (None, DUPLICATION) or options.text is not None:
        return evaluate_text(options, progress)
    reading = ("memory_len", "segment_len", "ext_len", "clamp_len", "same_length", "documents", "max_tokens")
    unused = {name: getattr(options, name) for name in ("recl", "dynamic", "dry_run", *reading)}
    given = {f"--{name.replace('_', '-')}": value for name, value in unused.items()}
    given["--ensemble"] = options.models.ensemble
    refuse_given(given, "{} cannot be used on the duplication task; leave it out.")
    seed, length = _sequences(options.model)
    return judge_models(options, progress, partial(_judge, options, seed, length), "accuracy")


def _sequences(model: str) -> tuple[int, int]:
    """Seed and length of a run's sequences."""
    file = run_file(model)
    source = Source({}, model) if file is None else load_yaml(file)
    seed, length = source.values.get("seed"), source.section("data").get("segment_len")
    if type(seed) is not int or type(length) is not int:
        raise ConfigError(f"{file or model} has no seed or no data.segment_len; give a run folder.")
    return seed, length


def _judge(
    options: EvaluateOptions, seed: int, length: int, model: LanguageModel, generator: Generator, tell: Tell
) -> Judged:
    if options.split == "train":
        raise ConfigError("--split train: sequences of the duplication task are new at every step; use test or valid.")
    split = options.split or "test"
    batches = counted(held_out(seed, split, length, options.lanes or _ROWS), tell(HELD_OUT[split]))
    with generator.runner.inference():
        found = evaluate_duplication(model, batches, device=generator.device)
    assert found is not None  # no `stop` is given
    figures = {"accuracy": found.accuracy, "nats_per_token": found.nats_per_token, "tokens": found.num_tokens}
    return figures, f"{DUPLICATION}, {length} tokens"
