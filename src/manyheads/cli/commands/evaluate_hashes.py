"""`manyheads evaluate --num-hashes`: a Reformer by the number of its hash rounds, on a text or the duplication task."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.cli.lines.likelihood import counted
from manyheads.cli.lines.output import LineWriter
from manyheads.cli.lines.reading import readings_of, tokens_of
from manyheads.cli.watching.phases import showing_if_long
from manyheads.data.progress import telling
from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from manyheads.architectures.language_model import LanguageModel
    from manyheads.architectures.reformer.config import HashRounds
    from manyheads.cli.command_line.evaluate_options import EvaluateTextOptions
    from manyheads.tasks.text.held_out import HeldText

__all__ = ["duplication_of", "evaluate_hashes"]

_ROWS = 16

Telling = Callable[[int], Callable[[int], None]]
"""Of how many rows or tokens -> a function to be called with how many are done."""


def duplication_of(options: EvaluateTextOptions) -> tuple[int, int] | None:
    """Seed and length of the duplication task that a model is to be judged on; None: it is judged on something else."""
    from manyheads.config.files import load_yaml
    from manyheads.data.settings import DUPLICATION

    if options.data not in (None, DUPLICATION) or options.text is not None:
        return None
    folder = Path(options.model)
    file = next((place / "config.yaml" for place in (folder, folder.parent) if (place / "config.yaml").is_file()), None)
    values = load_yaml(file).values if file is not None else {}
    data = values.get("data")
    if not isinstance(data, dict) or data.get("path") != DUPLICATION:
        if options.data == DUPLICATION:
            raise ConfigError(f"{options.model} is no run on the {DUPLICATION}, so seed and length are unknown.")
        return None
    seed, length = values.get("seed"), data.get("segment_len")
    if type(seed) is not int or type(length) is not int:
        raise ConfigError(f"{file} names no seed or no data.segment_len; is it a run's?")
    return seed, length


def evaluate_hashes(options: EvaluateTextOptions) -> int:
    """Judge each model at each number of rounds; of the duplication task without any named, at its own.

    Returns: the exit code.
    """
    from manyheads.decoding.device import inference
    from manyheads.decoding.generator import Generator
    from manyheads.evaluation.hashes import with_hashes

    task = duplication_of(options)
    asked: list[HashRounds | None] = ["full" if text == "full" else int(text) for text in options.num_hashes]
    rows: list[dict[str, Any]] = []
    with showing_if_long() as show:
        for number, name in enumerate((options.model, *options.beside), 1):
            show(f"loading model {number}", 0, 0)
            generator = Generator.from_pretrained(name, options.run_on.device, options.run_on.fixed_precision())
            cells: dict[str, dict[str, float]] = {}
            for hashes in asked or [None]:
                model = generator.model if hashes is None else with_hashes(generator.model, hashes)
                what = f"model {number}, {'its own rounds' if hashes is None else _named(str(hashes))}"
                with inference(generator.device, generator.precision):
                    if task:
                        cell = _duplicated(model, task, options, partial(telling, show, what))
                    else:
                        cell = _text(model, generator, options, partial(telling, show, what))
                cells["own" if hashes is None else str(hashes)] = cell
            rows.append({"model": name, "trained": _trained(generator.model), "by_hashes": cells})
    data = f"duplication-task, {task[1]} tokens" if task else _text_name(generator, options)
    with LineWriter("-") as writer:
        if options.json:
            writer.write([json.dumps({"results": rows, "data": data}, ensure_ascii=False, indent=2)])
        else:
            writer.write(_table(rows, data, "accuracy" if task else "nats_per_token"))
    return 0


def _trained(model: LanguageModel) -> str:
    """`LSH-4`, `full`, or another architecture's name."""
    rounds = model.config.hash_rounds
    return str(model.config.architecture) if rounds is None else _named(str(rounds))


def _named(hashes: str) -> str:
    return f"LSH-{hashes}" if hashes.isdecimal() else hashes


def _duplicated(
    model: LanguageModel, task: tuple[int, int], options: EvaluateTextOptions, telling: Telling
) -> dict[str, float]:
    from manyheads.data.duplication import HELD_OUT, held_out
    from manyheads.evaluation.duplication import evaluate_duplication

    if options.split == "train":
        raise ConfigError("--split train: sequences of the duplication task are new at every step; use test or valid.")
    split = options.split or "test"
    batches = held_out(task[0], split, task[1], options.lanes or _ROWS)
    batches = counted(batches, telling(HELD_OUT[split]))
    found = evaluate_duplication(model, batches, device=next(model.parameters()).device)
    assert found is not None  # nobody asked it to stop
    return {"accuracy": found.accuracy, "nats_per_token": found.nats_per_token, "tokens": found.num_tokens}


def _text(model: LanguageModel, generator: Any, options: EvaluateTextOptions, telling: Telling) -> dict[str, float]:
    from manyheads.evaluation.language_model import bits_per, evaluate_text

    held, [reading] = _held(generator, options), readings_of(options)
    vocabulary = generator.vocabulary
    ids = {"end_id": vocabulary.end_id, "begin_id": vocabulary.begin_id}
    told = telling(tokens_of(held, reading))
    found = evaluate_text(model, held.store, reading, **ids, device=generator.device, told=told)
    assert found is not None  # nobody asked it to stop
    cell = {
        "nats_per_token": found.nats_per_token,
        "bits_per_token": found.nats_per_token / math.log(2),
        "tokens": found.num_tokens,
    }
    if not reading.max_tokens:
        cell["bits_per_byte"] = bits_per(found.nll_sum, held.counts["bytes"])
    return cell


def _text_name(generator: Any, options: EvaluateTextOptions) -> str:
    return _held(generator, options).name


def _held(generator: Any, options: EvaluateTextOptions) -> HeldText:
    from manyheads.tasks.text.held_out import held_text

    return held_text(generator, options.model, text=options.text, data=options.data, split=options.split)


def _table(rows: list[dict[str, Any]], data: str, figure: str) -> list[str]:
    """As table 2 of the paper: a row for each way to train, a column for each to evaluate."""
    columns = list(rows[0]["by_hashes"])
    what = "accuracy in percent" if figure == "accuracy" else "nats a token"
    corner = "train \\ eval"
    width = max(len(corner), *(len(row["trained"]) for row in rows))
    lines = [corner.ljust(width) + "".join(f"  {_named(column):>8}" for column in columns)]
    for row in rows:
        shown = (row["by_hashes"][column][figure] for column in columns)
        cells = "".join(f"  {value:8.1f}" if figure == "accuracy" else f"  {value:8.4f}" for value in shown)
        lines.append(f"{row['trained']:<{width}}{cells}  {row['model']}")
    tokens = int(next(iter(rows[0]["by_hashes"].values()))["tokens"])
    return [*lines, f"{what}, of {tokens:,} tokens of {data}"]
