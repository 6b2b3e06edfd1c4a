"""`manyheads evaluate MODEL`: BLEU, chrF and likelihood on held-out text, and everything they depend on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from manyheads import __version__
from manyheads.cli.command_line.evaluate_options import EvaluateOptions, EvaluateTextOptions
from manyheads.cli.command_line.model_task import task_of_arguments
from manyheads.cli.command_line.parsing import parse
from manyheads.cli.commands.translate import one_line
from manyheads.cli.lines.likelihood import likelihood_lines, likelihood_of, likelihood_record
from manyheads.cli.lines.output import LineWriter, refuse_same_file
from manyheads.cli.machine import set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.data.line_source import blocks_of
from manyheads.data.lines import describe
from manyheads.data.progress import Progress, telling
from manyheads.data.readers import ReadReport, read_pairs
from manyheads.decoding.truncation import counted_truncations, naming_lines, tell_bad_lines
from manyheads.distributed.place import local_device, refuse_ranks
from manyheads.distributed.sharded_lines import is_sharded, model_identity, run_sharded
from manyheads.errors import DataError
from manyheads.tasks.held_out import held_out_pairs, own_data
from manyheads.tasks.search_line import search_line

if TYPE_CHECKING:
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.decoding.translator import Translator
    from manyheads.evaluation.bleu import Score
    from manyheads.evaluation.likelihood import Likelihood

__all__ = ["run"]

BLOCK_PAIRS = 256
"""Pairs that a rank judges at once; several ranks take turns."""

_DESCRIPTION = """Judge a model on held-out text: BLEU and chrF by sacreBLEU with their signatures, likelihood, and the
protocol: all that must be equal before two such figures may be compared. Text comes from --source and --reference,
or --data; without either, from what the run was trained with. --hypotheses judges translations made elsewhere.
A language model is judged by perplexity and bits a byte: `manyheads evaluate MODEL --help` shows its options.
A parser is judged by labelled brackets (evalb's rules), on --trees or its data; so are --hypotheses with --trees."""

_EXAMPLES = (
    "manyheads evaluate runs/demo",
    "manyheads evaluate runs/demo --source test.en --reference test.de --beam 8 --output test.out",
    "manyheads evaluate --hypotheses test.out --reference test.de",
    "manyheads evaluate runs/parser --trees test.ptb",
)


OPTIONS = (EvaluateOptions, EvaluateTextOptions)


def run(arguments: Sequence[str]) -> int:
    """Evaluate. Returns: the exit code."""
    set_up_machine()
    if task_of_arguments(arguments) == "text":
        from manyheads.cli.commands.evaluate_text import evaluate_text_command

        return evaluate_text_command(arguments)
    options = parse(EvaluateOptions, arguments, command="evaluate", description=_DESCRIPTION, examples=_EXAMPLES)
    options.run_on.announce()
    from manyheads.cli.commands.evaluate_trees import concerns_trees, evaluate_trees

    if concerns_trees(options):
        refuse_ranks("evaluate of trees")
        return evaluate_trees(options)
    if options.hypotheses is not None:
        refuse_ranks("evaluate of --hypotheses")
    if options.output is not None:
        refuse_same_file(options.output, options.source, options.reference, options.hypotheses)
    report = ReadReport()
    pairs, name = _pairs(options, report)
    if not pairs:
        raise DataError(f"{name} has no sentences; there is nothing to evaluate.")
    references = [reference for _, reference in pairs]
    likelihood, protocol = None, {"data": name, "sentences": len(pairs)}
    if options.hypotheses is not None:
        translations = [hypothesis for hypothesis, _ in pairs]
        protocol["hypotheses"] = options.hypotheses
    else:
        found = _run_model(pairs, options)
        if found is None:
            return 0  # the main rank has all that the others found
        translations, likelihood, more = found
        protocol |= more
    from manyheads.evaluation.bleu import corpus_bleu, corpus_chrf

    scores = {
        "BLEU": corpus_bleu(translations, references, tokenize=options.tokenize, lowercase=options.lowercase),
        "chrF": corpus_chrf(translations, references, lowercase=options.lowercase),
    }
    if options.output is not None:
        with LineWriter(options.output) as writer:
            writer.write(translations)
    with LineWriter("-") as writer:
        writer.write((_as_json if options.json else _as_text)(scores, likelihood, protocol))
    tell_bad_lines(report)
    return 0


def _pairs(options: EvaluateOptions, report: ReadReport) -> tuple[list[tuple[str, str]], str]:
    """What is compared, (source or hypothesis, reference), and what it is called."""
    first = options.source if options.hypotheses is None else options.hypotheses
    if first is not None and options.reference is not None:
        pairs = list(read_pairs(first, options.reference, on_bad_utf8=options.on_bad_utf8, report=report))
        return pairs, f"{describe(first)} + {describe(options.reference)}"
    data, seed = (options.data, 1) if options.data is not None else own_data(options.model)
    pairs, split = held_out_pairs(data, options.split, seed)
    if options.hypotheses is not None:
        from manyheads.data.lines import read_lines

        found = list(read_lines(options.hypotheses, on_bad_utf8=options.on_bad_utf8, report=report))
        if len(found) != len(pairs):
            raise DataError(
                f"{describe(options.hypotheses)} has {len(found)} lines, but {data} {split} has {len(pairs)} pairs."
            )
        pairs = [(hypothesis, reference) for hypothesis, (_, reference) in zip(found, pairs, strict=True)]
    return pairs, f"{data} {split}"


def _run_model(
    pairs: list[tuple[str, str]], options: EvaluateOptions
) -> tuple[list[str], Likelihood, dict[str, Any]] | None:
    """Translations, likelihood of the references, and what they depend on; of several ranks, on the main one."""
    import torch

    from manyheads.decoding.translator import Translator

    with (
        showing_if_long() as show,
        naming_lines(text=options.source or "the source", reference=options.reference or "the reference"),
    ):
        show("loading the model", 0, 0)
        translator = Translator.from_pretrained(
            options.model,
            local_device(options.run_on.device),
            options.run_on.fixed_precision(),
            compile_steps=options.run_on.compile,
        )
        overrides = {**options.decoding.overrides(translator.tokenizer), "num_return_sequences": 1}
        settings = translator.options(**overrides)
        assert isinstance(translator.model, torch.nn.Module)
        if is_sharded(options.output):
            judged = _judge_sharded(translator, pairs, settings, overrides, options, show)
        else:
            judged = _judge(translator, pairs, settings, overrides, show)
    if judged is None:
        return None
    likelihood, translations, num_references, num_sources = judged
    protocol = {
        "model": options.model,
        "parameters": sum(parameter.numel() for parameter in translator.model.parameters()),
        "tokenizer": translator.tokenizer.digest,
        "truncated_sources": num_sources,
        "truncated_references": num_references,
        "decoding": {name: getattr(settings, name) for name in settings.__dataclass_fields__},
        "device": str(translator.device),
        "precision": translator.precision,
        "compiled": options.run_on.compile,
        "versions": {"manyheads": __version__, "torch": str(torch.__version__)},
    }
    return translations, likelihood, protocol


Judged = tuple["Likelihood", list[str], int, int]
"""Likelihood of the references, translations, references and sources that were cut."""


def _judge(
    translator: Translator,
    pairs: list[tuple[str, str]],
    settings: DecodingSettings,
    overrides: dict[str, Any],
    show: Progress,
    first: int = 0,
    total: int | None = None,
) -> Judged:
    """Args: first: number of the first pair, from 0; total: of all pairs, None: of these."""
    total = len(pairs) if total is None else total
    told = telling(show, "likelihood", total, first)
    with counted_truncations() as long_references:
        likelihood = likelihood_of(translator, pairs, settings, first=first, told=told)
    sources, told = [source for source, _ in pairs], telling(show, "translating", total, first)
    with counted_truncations() as long_sources:
        found = translator.translate_nbest(sources, told=told, first_number=first + 1, **overrides)
    return likelihood, [one_line(one[0].text) for one in found], long_references.count, long_sources.count


def _judge_sharded(
    translator: Translator,
    pairs: list[tuple[str, str]],
    settings: DecodingSettings,
    overrides: dict[str, Any],
    options: EvaluateOptions,
    show: Progress,
) -> Judged | None:
    """The same on several ranks."""
    from manyheads.evaluation.likelihood import Likelihood

    def work(first: int, some: list[tuple[str, str]]) -> Iterator[str]:
        likelihood, translations, *cut = _judge(translator, some, settings, overrides, show, first, len(pairs))
        yield json.dumps([likelihood.nll_sum, likelihood.num_tokens, translations, *cut])

    text = json.dumps(pairs).encode()
    identity = {
        "command": "evaluate",
        "model": model_identity(options.model),
        "settings": asdict(settings),
        "pairs": hashlib.sha256(text).hexdigest(),
        "precision": translator.precision,
        "compiled": options.run_on.compile,
    }
    lines = run_sharded(options.output, [], identity, lambda: blocks_of(pairs, BLOCK_PAIRS), work, merge=False)
    if lines is None:
        return None
    parts = [json.loads(line) for line in lines]
    likelihood = Likelihood(math.fsum(part[0] for part in parts), sum(part[1] for part in parts))
    translations = [line for part in parts for line in part[2]]
    return likelihood, translations, sum(part[3] for part in parts), sum(part[4] for part in parts)


def _as_json(scores: dict[str, Score], likelihood: Likelihood | None, protocol: dict[str, Any]) -> list[str]:
    record: dict[str, Any] = {
        name.lower(): {
            "score": score.value,
            "signature": score.signature,
            "length": score.hyp_len,
            "reference_length": score.ref_len,
        }
        for name, score in scores.items()
    }
    if likelihood is not None:
        record["likelihood"] = likelihood_record(likelihood)
    return [json.dumps({**record, "protocol": protocol}, ensure_ascii=False, indent=2)]


def _as_text(scores: dict[str, Score], likelihood: Likelihood | None, protocol: dict[str, Any]) -> list[str]:
    lines = [
        line
        for name, score in scores.items()
        for line in (
            f"{name} = {score}",
            f"  {score.signature}",
            f"  length {score.hyp_len:,}, the references' {score.ref_len:,}",
        )
    ]
    if likelihood is not None:
        lines += likelihood_lines(likelihood)
    lines += ["protocol", f"  data       {protocol['data']}", f"  sentences  {protocol['sentences']:,}"]
    if likelihood is None:
        return [*lines, f"  judged     {protocol['hypotheses']}"]
    versions = ", ".join(f"{name} {version}" for name, version in protocol["versions"].items())
    return [
        *lines,
        f"  model      {protocol['model']}, {protocol['parameters']:,} parameters",
        f"  search     {search_line(protocol['decoding'])}",
        f"  truncated  {protocol['truncated_sources']} sources, {protocol['truncated_references']} references",
        f"  precision  {protocol['precision']} on {protocol['device']}",
        f"  versions   {versions}",
    ]
