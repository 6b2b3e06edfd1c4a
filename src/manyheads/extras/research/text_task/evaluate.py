"""`evaluate` of language models: as the task does it, an experiment of this extra, or several models on one text.

Several models are compared by a paired bootstrap over the parts of the text; the passages that differ most are shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from manyheads.data.lines import Progress, phase_progress
from manyheads.data.settings import DUPLICATION
from manyheads.decoding.generator import Generator
from manyheads.distributed.process import refuse_ranks
from manyheads.errors import ConfigError, DataError
from manyheads.evaluation.likelihood import bits_per, token_losses
from manyheads.evaluation.perplexity import perplexity_of, show_perplexity
from manyheads.extras.research.comparison import (
    PAGE_EXAMPLES,
    Comparison,
    Example,
    letters,
    most_different,
    paired_losses,
)
from manyheads.extras.research.dynamic import Dynamic
from manyheads.extras.research.hash_rounds import evaluate_hash_rounds
from manyheads.extras.research.recl import evaluate_recl
from manyheads.tasks.held_out import own_data, run_file
from manyheads.tasks.language_modelling.evaluate import evaluate as evaluate_text
from manyheads.tasks.language_modelling.held_out import HeldText, held_text, readings_of
from manyheads.tasks.report import Report, machine_lines, model_record
from manyheads.tasks.table import task_of_folder

if TYPE_CHECKING:
    from manyheads.evaluation.reading import Reading
    from manyheads.extras.research.text_task.options import EvaluateOptions
    from manyheads.text.vocabulary import Vocabulary

LEAST_DOCUMENTS = 30
"""With fewer documents, the parts of the paired bootstrap are passages of equal length."""
NUM_PARTS = 200
PASSAGE_TOKENS = 64
"""Length of the passages that are shown."""


@dataclass(frozen=True)
class _Judged:
    """losses: of each token in nats, NaN where it is not scored. (tokens,)"""

    losses: NDArray[np.float64]
    reading: Reading
    record: dict[str, Any]


def compare(options: EvaluateOptions, show: Progress) -> Comparison:
    """Judge several language models on the same text.

    Raises: ConfigError: a model is of another task or vocabulary, or has another text of its own. DataError: there is
        no such text, or a model gives one of its tokens the probability 0.
    """
    refuse_ranks("evaluate of several models")
    names = [options.model, *options.others]
    for name in names:
        if task_of_folder(name) not in (None, "text", "ids"):
            raise ConfigError(f"{name} is no language model, but {names[0]} is; compare models of one task.")
    if options.text is None and options.data is None:
        _check_own_texts(names)
    judged: list[_Judged] = []
    held: HeldText | None = None
    vocabulary: Vocabulary | None = None
    for number, name in enumerate(names, 1):
        show(f"loading model {number}", 0, 0)
        generator = options.run_on.load(Generator.from_pretrained, name)
        if held is None or vocabulary is None:
            held = held_text(generator, name, text=options.text, data=options.data, split=options.split)
            vocabulary = generator.vocabulary
        elif generator.vocabulary.digest != vocabulary.digest:
            raise ConfigError(
                f"{name} has another vocabulary ({generator.vocabulary.kind}) than {names[0]} ({vocabulary.kind}), so"
                " their tokens are not the same; evaluate each by itself on --text and compare bits a byte."
            )
        judged.append(_judge(replace(options, model=name, others=(), page=None, differences=10), generator, held,
                             phase_progress(show, f"scoring tokens, model {number}", len(held.store), 0)))  # fmt: skip
    assert held is not None
    assert vocabulary is not None
    return _report(options, names, judged, held, vocabulary)


def _check_own_texts(names: list[str]) -> None:
    """Raises: ConfigError: a run was trained on other data than the first one."""
    path, _ = own_data(names[0], "--text FILE")
    for name in names[1:]:
        if run_file(name) is not None and own_data(name)[0] != path:
            raise ConfigError(
                f"{name} has another text ({own_data(name)[0]}) than {names[0]} ({path}); name one for all models by"
                " --text or --data."
            )


def _judge(options: EvaluateOptions, generator: Generator, held: HeldText, on_progress: Any) -> _Judged:
    [reading] = readings_of(options)
    with generator.runner.inference():
        losses = token_losses(
            generator.model, held.store, reading, generator.vocabulary, device=generator.device, on_progress=on_progress
        )
    if infinite := int(np.isinf(losses).sum()):
        raise DataError(
            f"{options.model} gives {infinite:,} of the tokens the probability 0, so its mean loss is infinite; leave"
            " it out, or evaluate it by itself."
        )
    return _Judged(losses, reading, model_record(options.model, generator.model, generator.device, generator.precision))


def _report(
    options: EvaluateOptions, names: list[str], judged: list[_Judged], held: HeldText, vocabulary: Vocabulary
) -> Comparison:
    is_scored = np.all([np.isfinite(one.losses) for one in judged], axis=0)
    if not is_scored.any():
        raise DataError(f"No token of {held.name} is scored by all models; give a longer text.")
    bounds, unit = _parts(held, len(is_scored))
    scores = paired_losses(*_sums(judged, is_scored, bounds))
    nats = [one.value for one in scores]
    figures = {"perplexity": [show_perplexity(perplexity_of(one), 3) for one in nats]}
    if vocabulary.is_text and is_scored.sum() >= len(held.store) - 1:
        figures["bits/byte"] = [f"{bits_per(one * int(is_scored.sum()), held.counts['bytes']):.4f}" for one in nats]
    tokens = int(is_scored.sum())
    protocol = {
        "data": held.name,
        "tokens": tokens,
        "unit": vocabulary.kind,
        "vocabulary": vocabulary.digest,
        "parts": {"number": len(bounds) - 1, "unit": unit},
        "models": [{**one.record, "reading": vars(one.reading)} for one in judged],
    }
    lines = [f"  data       {held.name}", f"  scored     {tokens:,} tokens by all models; unit {vocabulary.kind}"]
    for letter, one in zip(letters(names), judged, strict=True):
        memory = "the model's" if one.reading.memory_len is None else f"{one.reading.memory_len:,}"
        lines.append(
            f"  {letter:<9}  {one.record['parameters']:,} parameters, segment {one.reading.segment_len:,}, memory"
            f" {memory}, {one.reading.lanes:,} lanes, documents {one.reading.documents}"
        )
    return Comparison(
        models=names,
        scores={"nats/token": scores},
        figures=figures,
        notes=[
            scores[0].signature,
            f"±: 95% interval; p: paired bootstrap over {len(bounds) - 1:,} {unit} against A, * below 0.05",
        ],
        examples=_passages(options, judged, is_scored, held, vocabulary),
        example_score="nats of the passage",
        smaller_is_better=True,
        num_shown=options.differences,
        protocol=protocol,
        protocol_lines=[*lines, *machine_lines(judged[0].record)],
        page=options.page,
    )


def _parts(held: HeldText, num_tokens: int) -> tuple[NDArray[np.int64], str]:
    """Return the positions where the parts of the text begin, and its end; and the kind of parts: documents, or
    passages of equal length."""
    ends = held.store.first(num_tokens).offsets
    if len(ends) > LEAST_DOCUMENTS:
        return ends, "documents"
    number = max(1, min(NUM_PARTS, num_tokens // PASSAGE_TOKENS))
    return np.linspace(0, num_tokens, number + 1).astype(np.int64), f"passages of {num_tokens // number:,} tokens"


def _sums(
    judged: list[_Judged], is_scored: NDArray[np.bool_], bounds: NDArray[np.int64]
) -> tuple[list[NDArray[np.float64]], NDArray[np.int64]]:
    """Losses of the parts for each model, and the number of tokens; parts without a scored token are left out."""
    counts = np.diff(np.concatenate([[0], np.cumsum(is_scored)])[bounds]).astype(np.int64)
    sums = [np.diff(np.concatenate([[0.0], np.cumsum(np.where(is_scored, one.losses, 0.0))])[bounds]) for one in judged]
    return [one[counts > 0] for one in sums], counts[counts > 0]


def _passages(
    options: EvaluateOptions,
    judged: list[_Judged],
    is_scored: NDArray[np.bool_],
    held: HeldText,
    vocabulary: Vocabulary,
) -> list[Example]:
    """The passages whose losses differ most."""
    bounds = np.append(np.arange(0, len(is_scored), PASSAGE_TOKENS), len(is_scored)).astype(np.int64)
    sums = [np.add.reduceat(np.where(is_scored, one.losses, 0.0), bounds[:-1]) for one in judged]
    found = []
    for place in most_different(sums, max(PAGE_EXAMPLES if options.page else 0, options.differences)):
        ids = held.store.ids[bounds[place] : bounds[place + 1]].tolist()
        text = vocabulary.decode(ids) if vocabulary.is_text else " ".join(map(str, ids))
        found.append(Example(f"token {bounds[place]:,}", "", text, (), tuple(float(one[place]) for one in sums)))
    return found


def evaluate(options: EvaluateOptions, show: Progress) -> Report | None:
    """See `tasks.language_modelling.evaluate.evaluate`."""
    if options.others:
        return compare(options, show)
    if options.data == DUPLICATION:
        raise ConfigError(f"{options.model} is not a run on the {DUPLICATION}, so seed and length are unknown.")
    if options.recl:
        return evaluate_recl(options, show)
    if options.num_hashes:
        return evaluate_hash_rounds(options, show)
    if options.dynamic is None:
        return evaluate_text(options, show)
    # One set of weights can follow only one lane of the text.
    return evaluate_text(replace(options, lanes=1 if options.lanes is None else options.lanes), show, Dynamic)
