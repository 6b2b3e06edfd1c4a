"""`manyheads evaluate MODEL`: BLEU, chrF and likelihood on held-out text, and everything they depend on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from manyheads import __version__
from manyheads.cli.decoding_options import DecodingOptions, SearchDeviceOptions
from manyheads.cli.evaluation_pairs import held_out_pairs, own_data
from manyheads.cli.kinds import names_language_model
from manyheads.cli.likelihood import likelihood_lines, likelihood_of, likelihood_record
from manyheads.cli.machine import set_up_machine
from manyheads.cli.output import LineWriter, refuse_same_file
from manyheads.cli.parsing import given_options, parse
from manyheads.cli.phases import Progress, showing_if_long, telling
from manyheads.cli.sharding import blocks_of, is_sharded, local_device, model_identity, refuse_ranks, run_sharded
from manyheads.cli.translate import one_line
from manyheads.cli.truncation import counted_truncations, naming_lines, tell_bad_lines
from manyheads.data.lines import describe
from manyheads.data.readers import ReadReport, read_pairs
from manyheads.errors import ConfigError, DataError

if TYPE_CHECKING:
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.decoding.translator import Translator
    from manyheads.evaluation.bleu import Score
    from manyheads.evaluation.likelihood import Likelihood

__all__ = ["EvaluateOptions", "run", "search_line"]

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


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of `manyheads evaluate`."""

    model: Annotated[Positional[str], arg(metavar="[MODEL]", help_behavior_hint="")] = ""
    """A model folder, a run folder, or owner/name on the Hugging Face hub."""
    source: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Source sentences, one a line, plain or gzip."""
    reference: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Their translations by people, line by line."""
    hypotheses: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Translations to judge instead of a model's."""
    data: Annotated[str | None, arg(metavar="DATA", help_behavior_hint="(default: the run's)")] = None
    """A folder written by prepare, embedded:tatoeba-en-de, or copy-task."""
    split: Annotated[
        Literal["test", "valid"] | None,
        arg(metavar="{test,valid}", help_behavior_hint="(default: test if there is one)"),
    ] = None
    """Which part of the data."""
    trees: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Of a parser: the right trees, in brackets; the sentences are their words."""
    baseline: Annotated[Literal["flat", "right"] | None, arg(metavar="{flat,right}", help_behavior_hint="")] = None
    """Judge trees that need no model: flat or right-branching ones, with the labels usual in training trees."""
    train_trees: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: of --data)")] = None
    """Training trees, whose labels --baseline counts."""
    tokenize: Annotated[str, arg(metavar="{13a,none,intl,char,zh}")] = "13a"
    """BLEU's tokenizer; none for text that is tokenized already."""
    lowercase: Annotated[bool, arg(help_behavior_hint="")] = False
    """Ignore case in BLEU and chrF."""
    output: Annotated[str | None, arg(aliases=["-o"], metavar="FILE", help_behavior_hint="")] = None
    """Save the translations, one a line."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print one JSON object."""
    on_bad_utf8: Literal["fail", "replace"] = "fail"
    """A line that is not UTF-8: fail, or replace its bad bytes."""
    run_on: Annotated[SearchDeviceOptions, arg(name="")] = field(default_factory=SearchDeviceOptions)
    decoding: Annotated[DecodingOptions, arg(name="")] = field(default_factory=DecodingOptions)

    def __post_init__(self) -> None:
        if self.baseline is None and self.train_trees is not None:
            raise ConfigError("--train-trees are counted for --baseline; leave them out.")
        if self.hypotheses is not None and (self.model or self.source is not None):
            raise ConfigError("--hypotheses are judged as they are; leave out MODEL and --source.")
        unused = given_options(self.run_on, self.decoding)
        if unused and (self.hypotheses is not None or self.baseline is not None):
            judged = "--hypotheses" if self.hypotheses is not None else "--baseline"
            raise ConfigError(f"With {judged} there is no model to run; leave out {', '.join(unused)}.")
        if self.trees is not None or self.baseline is not None:
            return
        if self.hypotheses is None and not self.model:
            raise ConfigError("Say what to evaluate: a MODEL, or --hypotheses FILE with --reference FILE.")
        if self.hypotheses is not None and self.reference is None and self.data is None:
            raise ConfigError("--hypotheses need --reference FILE, or --data (trees: --trees), to be compared with.")
        if self.data is not None and (self.source is not None or self.reference is not None):
            raise ConfigError("--data brings its own sources and references; leave out --source and --reference.")
        if self.split is not None and self.reference is not None:
            raise ConfigError("--split chooses a part of --data; files are taken whole.")
        if self.hypotheses is None and (self.source is None) != (self.reference is None):
            raise ConfigError("--source and --reference come together, line by line.")


def run(arguments: Sequence[str]) -> int:
    """Evaluate. Returns: the exit code."""
    set_up_machine()
    if names_language_model(arguments):
        from manyheads.cli.evaluate_text import evaluate_text_command

        return evaluate_text_command(arguments)
    options = parse(EvaluateOptions, arguments, command="evaluate", description=_DESCRIPTION, examples=_EXAMPLES)
    options.run_on.announce()
    from manyheads.cli.evaluate_trees import concerns_trees, evaluate_trees

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


def search_line(decoding: dict[str, Any]) -> str:
    """One line about the decoding settings."""
    if decoding["do_sample"]:
        names = ("temperature", "top_k", "top_p", "seed")
        parts = ["sampling", *(f"{name} {decoding[name]}" for name in names)]
    elif decoding["num_beams"] == 1:
        parts = ["greedy"]
    else:
        parts = [
            f"beam {decoding['num_beams']}",
            f"length penalty {decoding['length_penalty']} ({decoding['length_penalty_kind']})",
        ]
        parts += ["early stopping"] * (decoding["early_stopping"] is True)
    ratio, offset = decoding["max_len_ratio"], decoding["max_len_offset"]
    limit = decoding["max_new_tokens"] or f"{ratio:g} x source + {offset}"
    parts.append(f"at most {limit} tokens")
    unusual = {
        "min_new_tokens": 0,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "rules": "manyheads",
        "well_formed": True,
    }
    parts += [f"{name} {decoding[name]}" for name, usual in unusual.items() if decoding[name] != usual]
    parts += [f"{name} {list(decoding[name])}" for name in ("banned_ids", "forced_prefix_ids") if decoding[name]]
    return ", ".join([*parts, f"batches of {decoding['max_tokens']} tokens"])
