"""`evaluate` of translators: one as the task does it, or several on one test set with a paired bootstrap."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from manyheads.data.translation.readers import ReadReport
from manyheads.distributed.process import refuse_ranks
from manyheads.errors import ConfigError, DataError
from manyheads.evaluation.bleu import AUTO, check_tokenizer, text_hints
from manyheads.extras.research.comparison import (
    PAGE_EXAMPLES,
    Comparison,
    Example,
    letters,
    most_different,
    paired_scores,
    sentence_chrf,
)
from manyheads.tasks.held_out import own_data, run_file, task_of_folder
from manyheads.tasks.report import Report, machine_lines, search_line
from manyheads.tasks.translation.evaluate import HeldOutSet, find_test_set, reference_lines, run_model, tokenizer_of
from manyheads.tasks.translation.evaluate import evaluate as evaluate_one

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.extras.research.translation_task.options import EvaluateOptions


def compare(options: EvaluateOptions, progress: Progress) -> Comparison:
    """Judge several translators on the same test set.

    Raises: ConfigError: a model is no translator, has another test set of its own, or another direction. DataError: as
        `evaluate`.
    """
    refuse_ranks("evaluate of several models")
    names = (options.model, *options.others)
    each = {name: replace(options, model=name, others=(), page=None, differences=10) for name in names}
    for name in names:
        if task_of_folder(name) not in (None, "translation"):
            raise ConfigError(f"{name} is no translator, but {names[0]} is; compare models of one task.")
    if options.tokenize != AUTO:
        check_tokenizer(options.tokenize)
    read = ReadReport()
    progress("reading", 0, 0)
    test_set = find_test_set(each[names[0]], read)
    pairs, data = test_set.pairs, test_set.name
    if not pairs:
        raise DataError(f"{data} has no sentences; there is nothing to compare.")
    if options.source is None and options.data is None:
        _check_own_test_sets(each, test_set)
    translations: list[list[str]] = []
    protocols: list[dict[str, Any]] = []
    nats: list[float] = []
    for name in names:
        found = run_model(test_set, each[name], progress, is_compared=True)
        assert found is not None  # there is one rank
        texts, likelihood, protocol = found
        _check_direction(protocol, protocols[0] if protocols else protocol)
        translations.append(texts)
        protocols.append(protocol)
        nats.append(likelihood.nll_sum / len(pairs))
    references, common = test_set.references, {"data": data, "sentences": len(pairs)}
    choice = tokenizer_of(test_set, options, protocols[0])
    hinted = [text_hints(one, references, choice.name) for one in translations]
    hints = list(dict.fromkeys(filter(None, [choice.warning, *chain.from_iterable(hinted)])))
    for hint in hints:
        sys.stderr.write(f"manyheads: warning: {hint}\n")
    progress("comparing", 0, 0)
    scores = paired_scores(translations, *references, tokenize=choice.name, lowercase=options.lowercase)
    by_sentence = [sentence_chrf(one, *references, lowercase=options.lowercase) for one in translations]
    examples = [
        Example(
            f"line {place + 1}",
            *pairs[place],
            tuple(one[place] for one in translations),
            tuple(float(one[place]) for one in by_sentence),
        )
        for place in most_different(by_sentence, max(PAGE_EXAMPLES if options.page else 0, options.differences))
    ]
    return Comparison(
        models=list(names),
        scores=scores,
        figures={"nats/sentence": [f"{one:.2f}" for one in nats]},
        notes=_notes(scores),
        examples=examples,
        example_score="chrF of the sentence",
        smaller_is_better=False,
        num_shown=options.differences,
        protocol={**common, "hints": hints, "models": protocols},
        protocol_lines=_protocol_lines(list(names), protocols, data, len(pairs)),
        page=options.page,
        read=read,
    )


def _check_own_test_sets(each: dict[str, EvaluateOptions], first: HeldOutSet) -> None:
    """Raises: ConfigError: a run has other test pairs than the first one."""
    for name, options in list(each.items())[1:]:
        if run_file(name) is None:
            continue  # a model without a run has no test set of its own
        own = find_test_set(options, ReadReport()).pairs
        if own != first.pairs:
            raise ConfigError(
                f"{name} has another test set ({own_data(name)[0]}, {len(own):,} pairs) than {first.name}"
                f" ({len(first.pairs):,} pairs); name one for all models by --source and --reference, or --data."
            )


def _check_direction(protocol: dict[str, Any], first: dict[str, Any]) -> None:
    """Raises: ConfigError: the languages of both models are known, and they share no direction."""
    own, others = protocol["languages"], first["languages"]
    if own and others and not set(map(tuple, own)) & set(map(tuple, others)):
        shown = [", ".join(f"{source} > {target}" for source, target in one) for one in (own, others)]
        raise ConfigError(
            f"{protocol['model']} translates {shown[0]}, but {first['model']} {shown[1]}; compare models of one"
            " direction."
        )


def _notes(scores: dict[str, Any]) -> list[str]:
    notes = [f"{found[0].signature}" for found in scores.values()]
    return [
        *notes,
        "±: 95% interval; p: paired bootstrap against A (sacreBLEU), * below 0.05",
        "nats/sentence: mean negative log-likelihood of the references, end of sentence included",
    ]


def _protocol_lines(names: list[str], protocols: list[dict[str, Any]], data: str, num_sentences: int) -> list[str]:
    lines = [f"  data       {data}", f"  sentences  {num_sentences:,}", *reference_lines(protocols[0])]
    for letter, protocol in zip(letters(names), protocols, strict=True):
        lines += [
            f"  {letter:<9}  {protocol['parameters']:,} parameters, {search_line(protocol)}",
            f"             truncated {protocol['truncated_sources']} sources,"
            f" {protocol['truncated_references']} references",
        ]
    return [*lines, *machine_lines(protocols[0])]


def evaluate(options: EvaluateOptions, progress: Progress) -> Report | None:
    """See `tasks.translation.evaluate.evaluate`."""
    return compare(options, progress) if options.others else evaluate_one(options, progress)
