"""Reformers with another number of hash rounds than in training: a table as table 2 of Kitaev et al. 2020."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from manyheads.catalogue import build_model
from manyheads.data.lines import Progress, phase_progress
from manyheads.decoding.generator import Generator
from manyheads.distributed.process import refuse_ranks
from manyheads.errors import ConfigError, RequestError, refuse_nan
from manyheads.evaluation.likelihood import bits_per, evaluate_text
from manyheads.models.pretrained import load_portable_state, portable_state
from manyheads.tasks.language_modelling.evaluate import held_text, readings_of
from manyheads.tasks.report import TextReport

if TYPE_CHECKING:
    from manyheads.extras.research.text_task.options import EvaluateOptions
    from manyheads.models.composites import LanguageModel
    from manyheads.models.reformer.config import HashRounds


def with_hashes(model: LanguageModel, rounds: HashRounds) -> LanguageModel:
    """Return the model with another number of hash rounds (see `ReformerConfig.with_hash_rounds`) and the same weights.

    Args: model: a Reformer; it is not changed.

    Returns: a model in evaluation mode with its own tensors.
    Raises: RequestError: the model has no hash rounds.
    """
    config = model.config
    if config.hash_rounds is None:
        raise RequestError(f"a {config.architecture} has no hash rounds; --num-hashes needs a Reformer, leave it out.")
    state = torch.random.get_rng_state()
    made: LanguageModel = build_model(config.with_hash_rounds(rounds))
    torch.random.set_rng_state(state)  # building the model drew weights that are not used
    load_portable_state(made, portable_state(model))
    return made.to(next(model.parameters()).device).eval()


Tell = Callable[[int], Callable[[int], None]]
"""The total of rows or tokens -> a function to be called with how many are done."""

Judged = tuple[dict[str, float], str]
"""Figures, and the name of the data."""


@dataclass(frozen=True)
class HashRoundsReport(TextReport):
    """See `tasks.report.Report`. results: a record for each model. figure: the one in the table."""

    results: list[dict[str, Any]]
    data: str
    figure: str

    def to_json(self) -> dict[str, Any]:
        return {"results": self.results, "data": self.data}

    def to_lines(self) -> list[str]:
        """A row for each way to train, a column for each to evaluate."""
        columns = list(self.results[0]["by_hashes"])
        is_accuracy = self.figure == "accuracy"
        corner = "train \\ eval"
        width = max(len(corner), *(len(row["trained"]) for row in self.results))
        lines = [corner.ljust(width) + "".join(f"  {_named(column):>8}" for column in columns)]
        for row in self.results:
            shown = (row["by_hashes"][column][self.figure] for column in columns)
            cells = "".join(f"  {value:8.1f}" if is_accuracy else f"  {value:8.4f}" for value in shown)
            lines.append(f"{row['trained']:<{width}}{cells}  {row['model']}")
        tokens = int(next(iter(self.results[0]["by_hashes"].values()))["tokens"])
        unit = "accuracy in percent" if is_accuracy else "nats a token"
        return [*lines, f"{unit}, of {tokens:,} tokens of {self.data}"]


def evaluate_hash_rounds(options: EvaluateOptions, progress: Progress) -> HashRoundsReport:
    """Judge each model on a text at each number of hash rounds."""
    return judge_models(options, progress, partial(_judge, options), "nats_per_token")


def judge_models(
    options: EvaluateOptions,
    progress: Progress,
    judge: Callable[[LanguageModel, Generator, Tell], Judged],
    figure: str,
) -> HashRoundsReport:
    """Judge each model at each number of hash rounds; without any given, at its own.

    Args: judge: called within inference mode. figure: the one in the table.

    Raises: ConfigError: the models have unlike vocabularies, so that figures of a token mean other things.
    """
    refuse_ranks("evaluate by hash rounds")
    asked: list[HashRounds | None] = ["full" if text == "full" else int(text) for text in options.num_hashes]
    rows: list[dict[str, Any]] = []
    data = digest = ""
    for number, name in enumerate((options.model, *options.beside), 1):
        progress(f"loading model {number}", 0, 0)
        generator = options.run_on.load(Generator.from_pretrained, name)
        digest = digest or generator.vocabulary.digest
        if generator.vocabulary.digest != digest:
            raise ConfigError(f"{name} has another vocabulary than {options.model}; compare models of one vocabulary.")
        cells: dict[str, dict[str, float]] = {}
        for hashes in asked or [None]:
            model = generator.single_model if hashes is None else with_hashes(generator.single_model, hashes)
            phase = f"model {number}, {'its own rounds' if hashes is None else _named(str(hashes))}"
            with generator.runner.inference():
                cell, data = judge(model, generator, partial(phase_progress, progress, phase))
            cells["own" if hashes is None else str(hashes)] = cell
        rows.append({"model": name, "trained": _trained(generator.single_model), "by_hashes": cells})
    return HashRoundsReport(rows, data, figure)


def _trained(model: LanguageModel) -> str:
    """`LSH-4`, `full`, or the name of an architecture that does not hash."""
    rounds = model.config.hash_rounds
    return str(model.config.architecture) if rounds is None else _named(str(rounds))


def _named(hashes: str) -> str:
    return f"LSH-{hashes}" if hashes.isdecimal() else hashes


def _judge(options: EvaluateOptions, model: LanguageModel, generator: Generator, tell: Tell) -> Judged:
    held = held_text(generator, options.model, text=options.text, data=options.data, split=options.split)
    [reading] = readings_of(options)
    found = evaluate_text(
        model,
        held.store,
        reading,
        generator.vocabulary,
        device=generator.device,
        on_progress=tell(held.num_read(reading)),
    )
    assert found is not None  # no `stop` is given
    refuse_nan(math.isnan(found.nll_sum))
    cell = {
        "nats_per_token": found.nats_per_token,
        "bits_per_token": found.nats_per_token / math.log(2),
        "tokens": found.num_tokens,
    }
    if (num_bytes := held.num_bytes(reading, generator.vocabulary)) is not None:
        cell["bits_per_byte"] = bits_per(found.nll_sum, num_bytes)
    return cell, held.name
