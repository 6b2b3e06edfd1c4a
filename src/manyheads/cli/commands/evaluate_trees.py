"""`manyheads evaluate` of a parser: bracket scores by evalb's rules, and everything they depend on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads import __version__
from manyheads.cli.lines.likelihood import likelihood_lines, likelihood_of, likelihood_record
from manyheads.cli.lines.output import LineWriter, refuse_same_file
from manyheads.cli.watching.phases import showing_if_long
from manyheads.data.lines import ReadReport, describe, read_lines
from manyheads.data.manifest import MAX_MANIFEST_BYTES
from manyheads.data.progress import telling
from manyheads.decoding.truncation import counted_truncations
from manyheads.errors import ConfigError, DataError
from manyheads.files.guarded import read_limited
from manyheads.tasks.held_out import own_data
from manyheads.text.bracketing import repairs_line
from manyheads.text.parsing import TASK_FILE, ParsingTask

if TYPE_CHECKING:
    from manyheads.cli.command_line.evaluate_options import EvaluateOptions
    from manyheads.data.prepared import PreparedData
    from manyheads.evaluation.brackets import BracketScore
    from manyheads.evaluation.likelihood import Likelihood
    from manyheads.evaluation.parses import ParseReport
    from manyheads.text.trees import Node

__all__ = ["concerns_trees", "evaluate_trees"]


def concerns_trees(options: EvaluateOptions) -> bool:
    """Whether what is to be evaluated are trees: by an option, or since the model or the data is a parser's."""
    if options.trees is not None or options.baseline is not None:
        return True
    if options.data is not None and _has_task(Path(options.data) / "manifest.json", "task"):
        return True
    return any((Path(options.model) / inner / TASK_FILE).is_file() for inner in (".", "model") if options.model)


def _has_task(manifest: Path, key: str) -> bool:
    try:
        return key in json.loads(read_limited(manifest, MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError, TypeError):
        return False  # whoever opens the folder says what is wrong with it


def evaluate_trees(options: EvaluateOptions) -> int:
    """Evaluate. Returns: the exit code.

    Raises: ConfigError: options contradict each other. DataError: trees cannot be read, or counts differ.
    """
    _check(options)
    gold, name, data = _gold(options)
    if not gold:
        raise DataError(f"{name} has no trees; there is nothing to evaluate.")
    likelihood, protocol = None, {"data": name, "sentences": len(gold)}
    if options.hypotheses is not None:
        report, more = _judge_file(options.hypotheses, gold, options)
    elif options.baseline is not None:
        report, more = _judge_baseline(gold, options, data)
    else:
        report, likelihood, more = _judge_model(gold, options)
    protocol |= more
    if options.output is not None:
        from manyheads.text.trees import format_tree

        with LineWriter(options.output) as writer:
            writer.write("" if tree is None else format_tree(tree) for tree in report.trees)
    with LineWriter("-") as writer:
        writer.write((_as_json if options.json else _as_text)(report, likelihood, protocol))
    return 0


def _check(options: EvaluateOptions) -> None:
    for name in ("source", "reference"):
        if getattr(options, name) is not None:
            raise ConfigError(f"A parser is judged by trees, which bring their sentences; give --trees, not --{name}.")
    if options.trees is not None and (options.data is not None or options.split is not None):
        raise ConfigError("--trees are the trees to judge by; leave out --data and --split.")
    given = [options.hypotheses is not None, options.baseline is not None, bool(options.model)]
    if sum(given) != 1 and not (options.baseline is not None and options.model and options.hypotheses is None):
        raise ConfigError("Say what to evaluate, one of: a MODEL, --hypotheses FILE, or --baseline flat|right.")
    if options.output is not None:
        refuse_same_file(options.output, options.trees, options.hypotheses, options.train_trees)


def _gold(options: EvaluateOptions) -> tuple[list[tuple[str, str]], str, PreparedData | None]:
    """Sentences with their trees, what they are called, and the prepared data that they are from, if any."""
    from manyheads.data.trees import read_sentences

    if options.trees is not None:
        return read_sentences(options.trees, ParsingTask(), options.on_bad_utf8), describe(options.trees), None
    from manyheads.data.prepared import PreparedData

    path = options.data if options.data is not None else own_data(options.model)[0]
    data = PreparedData.open(path)
    if data.task is None:
        raise DataError(f"{path} holds no trees; give --trees FILE.")
    texts = {"test": data.test_text, "valid": data.valid_text}
    for split in [options.split] if options.split else ["test", "valid"]:
        if texts[split]:
            return texts[split], f"{path} {split}", data
    raise DataError(f"{path} has no {options.split or 'test or valid'} trees; give --trees FILE.")


def _judge_file(path: str, gold: list[tuple[str, str]], options: EvaluateOptions) -> tuple[ParseReport, dict[str, Any]]:
    """Trees made elsewhere, one a line; an empty line is a sentence without a tree."""
    from manyheads.evaluation.parses import judge_trees
    from manyheads.text.trees import parse_tree

    lines = list(read_lines(path, on_bad_utf8=options.on_bad_utf8, report=ReadReport()))
    name = describe(path)
    if len(lines) != len(gold):
        raise DataError(f"{name} has {len(lines)} lines, one tree each, but there are {len(gold)} gold trees.")
    trees: list[Node | None] = [
        parse_tree(line, f"{name}: line {number}") if line.strip() else None for number, line in enumerate(lines, 1)
    ]
    return judge_trees(trees, [tree for _, tree in gold]), {"judged": name}


def _judge_baseline(
    gold: list[tuple[str, str]], options: EvaluateOptions, data: PreparedData | None
) -> tuple[ParseReport, dict[str, Any]]:
    """Trees that need no model, from the labels of training trees."""
    from manyheads.evaluation.parses import judge_trees
    from manyheads.evaluation.tree_baselines import Baseline

    assert options.baseline is not None
    if options.train_trees is not None:
        from manyheads.data.trees import read_tree_file

        trees = list(read_tree_file(options.train_trees, options.on_bad_utf8, ReadReport(), ParsingTask()))
        name = describe(options.train_trees)
    elif data is not None:
        trees, name = _training_trees(data), f"{data.path} train"
    else:
        raise ConfigError("A baseline counts the labels of training trees: give --train-trees FILE.")
    baseline = Baseline(options.baseline, trees)
    report = judge_trees([baseline.tree(sentence) for sentence, _ in gold], [tree for _, tree in gold])
    return report, {"judged": baseline.describe(), "counted_on": name}


def _training_trees(data: PreparedData) -> list[Node]:
    """The training trees of prepared data, which keeps them as ids."""
    assert data.task is not None
    sides = [
        data.tokenizer.decode_batch([data.train[place][side].tolist() for place in range(len(data.train))])
        for side in (0, 1)
    ]
    return [data.task.restore(sentence, written).tree for sentence, written in zip(*sides, strict=True)]


def _judge_model(
    gold: list[tuple[str, str]], options: EvaluateOptions
) -> tuple[ParseReport, Likelihood, dict[str, Any]]:
    """What a model makes of the sentences, and how likely it finds the right trees."""
    import torch

    from manyheads.decoding.parser import Parser
    from manyheads.evaluation.parses import judge_written

    run_on = options.run_on
    sentences, trees = [sentence for sentence, _ in gold], [tree for _, tree in gold]
    with showing_if_long() as show:
        show("loading the model", 0, 0)
        parser = Parser.from_pretrained(
            options.model, run_on.device, run_on.fixed_precision(), compile_steps=run_on.compile
        )
        translator = parser.translator
        overrides = {**options.decoding.overrides(translator.tokenizer), "num_return_sequences": 1}
        settings = translator.options(**overrides)
        cutting = dataclasses.replace(settings, too_long="truncate")
        # A tree that is too long to be learned is still one to judge by; so it is cut, and counted, and never refused.
        with counted_truncations() as long_trees:
            told = telling(show, "likelihood", len(gold))
            likelihood = likelihood_of(translator, gold, cutting, "tree", told=told)
        with counted_truncations() as long_sources:
            written = translator.translate(sentences, told=telling(show, "parsing", len(gold)), **overrides)
        show("judging the trees", 0, 0)
        report = judge_written(parser.task, sentences, written, trees)
    assert isinstance(translator.model, torch.nn.Module)
    protocol = {
        "model": options.model,
        "parameters": sum(parameter.numel() for parameter in translator.model.parameters()),
        "tokenizer": translator.tokenizer.digest,
        "task": parser.task.to_json(),
        "truncated_sources": long_sources.count,
        "truncated_trees": long_trees.count,
        "decoding": dataclasses.asdict(settings),
        "device": str(translator.device),
        "precision": translator.precision,
        "compiled": run_on.compile,
        "versions": {"manyheads": __version__, "torch": str(torch.__version__)},
    }
    return report, likelihood, protocol


def _figures(score: BracketScore) -> dict[str, Any]:
    return {
        "f1": score.f1,
        "precision": score.precision,
        "recall": score.recall,
        "exact_match": score.exact_match,
        "average_crossing": score.average_crossing,
        "tagging_accuracy": score.tagging_accuracy,
        **dataclasses.asdict(score),
    }


def _as_json(report: ParseReport, likelihood: Likelihood | None, protocol: dict[str, Any]) -> list[str]:
    from manyheads.evaluation.brackets import SIGNATURE

    record: dict[str, Any] = {
        "brackets": {**_figures(report.all), "signature": SIGNATURE},
        "brackets_40": {**_figures(report.short), "signature": f"{SIGNATURE}|words<=40"},
        "ill_formed": report.ill_formed,
        "repairs": dict(report.repairs),
    }
    if likelihood is not None:
        record["likelihood"] = likelihood_record(likelihood)
    return [json.dumps({**record, "protocol": protocol}, ensure_ascii=False, indent=2)]


def _as_text(report: ParseReport, likelihood: Likelihood | None, protocol: dict[str, Any]) -> list[str]:
    from manyheads.evaluation.brackets import SIGNATURE
    from manyheads.tasks.search_line import search_line

    lines = [f"F1 = {report.all.f1:.2f}", f"  {SIGNATURE}"]
    for name, score in (("all", report.all), ("<= 40 words", report.short)):
        lines.append(
            f"  {name:<12} P {score.precision:.2f}  R {score.recall:.2f}  F1 {score.f1:.2f}"
            f"  exact {score.exact_match:.2f}%  crossing {score.average_crossing:.2f}"
            f"  ({score.sentences:,} sentences, {score.gold:,} brackets)"
        )
    if report.all.tagging_accuracy is not None:
        lines.append(f"  tags         {report.all.tagging_accuracy:.2f}%")
    if report.all.errors:
        lines.append(
            f"  errors       {report.all.errors:,} sentences left out: no tree, or other words than the gold tree"
        )
    if report.ill_formed is not None:
        lines.append(f"  ill-formed   {report.ill_formed:,} trees mended: {repairs_line(report.repairs)}")
    if likelihood is not None:
        lines += likelihood_lines(likelihood)
    lines += ["protocol", f"  data       {protocol['data']}", f"  sentences  {protocol['sentences']:,}"]
    if "model" not in protocol:
        lines.append(f"  judged     {protocol['judged']}")
        return [*lines, *([f"  counted on {protocol['counted_on']}"] if "counted_on" in protocol else [])]
    task = ", ".join(f"{key} {value}" for key, value in protocol["task"].items() if key != "name")
    versions = ", ".join(f"{name} {version}" for name, version in protocol["versions"].items())
    return [
        *lines,
        f"  model      {protocol['model']}, {protocol['parameters']:,} parameters",
        f"  task       {protocol['task']['name']}: {task}",
        f"  search     {search_line(protocol['decoding'])}",
        f"  truncated  {protocol['truncated_sources']} sources, {protocol['truncated_trees']} trees",
        f"  precision  {protocol['precision']} on {protocol['device']}",
        f"  versions   {versions}",
    ]
