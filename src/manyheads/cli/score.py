"""`manyheads score MODEL --source F --target F`: how likely the model finds given translations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from manyheads.cli.decoding_options import DeviceOptions
from manyheads.cli.kinds import names_language_model
from manyheads.cli.machine import set_up_machine
from manyheads.cli.output import LineWriter, refuse_same_file
from manyheads.cli.parsing import parse
from manyheads.cli.phases import Phases, showing_if_long, telling
from manyheads.cli.sharding import blocks_of, is_sharded, local_device, model_identity, run_sharded
from manyheads.cli.truncation import counted_truncations, naming_lines, tell_bad_lines
from manyheads.data.readers import ReadReport, read_pairs

if TYPE_CHECKING:
    from manyheads.decoding.translation import Scored
    from manyheads.decoding.translator import Translator

__all__ = ["ScoreOptions", "run"]

BLOCK_PAIRS = 2048

_DESCRIPTION = """Log-probabilities (in nats) that a model gives to known translations, end of sentence included.
Each pair of lines gives a line of three tab-separated columns: sum of the log-probabilities, number of tokens, mean.
With --tokens it gives a JSON object with each token and its log-probability instead.
A language model scores the lines of --text FILE: `manyheads score MODEL --help` shows its options."""

_EXAMPLES = (
    "manyheads score runs/demo --source test.en --target test.de",
    "manyheads score runs/demo --source test.en --target test.de --tokens --output scores.jsonl",
)


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Options of `manyheads score`."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A model folder, a run folder, or owner/name on the Hugging Face hub."""
    source: Annotated[str, arg(metavar="FILE")]
    """Source sentences, one a line, plain or gzip; - is standard input."""
    target: Annotated[str, arg(metavar="FILE")]
    """Their translations, line by line."""
    output: Annotated[str, arg(aliases=["-o"], metavar="FILE")] = "-"
    """Where scores go; - is standard output."""
    tokens: Annotated[bool, arg(help_behavior_hint="")] = False
    """JSON lines with the log-probability of every token."""
    on_bad_utf8: Literal["fail", "replace"] = "fail"
    """A line that is not UTF-8: fail, or replace its bad bytes."""
    max_tokens: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: the model's)")] = None
    """A batch's budget: rows x longest side. A longer side does not fit."""
    too_long: Literal["fail", "truncate"] = "fail"
    """A side that does not fit: stop and name its line, or cut it, score what is left and say how many were cut."""
    run_on: Annotated[DeviceOptions, arg(name="")] = field(default_factory=DeviceOptions)


def run(arguments: Sequence[str]) -> int:
    """Score pairs of lines. Returns: the exit code."""
    set_up_machine()
    if names_language_model(arguments):
        from manyheads.cli.score_text import score_text_command

        return score_text_command(arguments)
    options = parse(ScoreOptions, arguments, command="score", description=_DESCRIPTION, examples=_EXAMPLES)
    refuse_same_file(options.output, options.source, options.target)
    # All pairs first: unequal counts show at the end of the files, and scores of misaligned lines would mislead.
    report = ReadReport()
    pairs = list(read_pairs(options.source, options.target, on_bad_utf8=options.on_bad_utf8, report=report))
    from manyheads.decoding.translator import Translator

    with showing_if_long() as show:
        show("loading the model", 0, 0)
        translator = Translator.from_pretrained(
            options.model, local_device(options.run_on.device), options.run_on.fixed_precision()
        )
        budget = {} if options.max_tokens is None else {"max_tokens": options.max_tokens}
        translator.settings = translator.options(**budget, too_long=options.too_long)
        (_score_sharded if is_sharded(options.output) else _score)(translator, pairs, options, show, report)
    return 0


def _score(
    translator: Translator, pairs: list[tuple[str, str]], options: ScoreOptions, show: Phases, report: ReadReport
) -> None:
    with (
        counted_truncations(),
        naming_lines(source=options.source, reference=options.target),
        LineWriter(options.output) as writer,
    ):
        for start in range(0, len(pairs), BLOCK_PAIRS):
            lines = _lines(translator, start, pairs[start : start + BLOCK_PAIRS], len(pairs), options, show)
            with show.hidden(writer.is_in_terminal):
                writer.write(lines)
    tell_bad_lines(report)


def _lines(
    translator: Translator, first: int, some: list[tuple[str, str]], total: int, options: ScoreOptions, show: Phases
) -> Iterator[str]:
    """The output lines of pairs; first: number of the first one, from 0; total: of all pairs."""
    sources, targets = zip(*some, strict=True)
    told = telling(show, "scoring", total, first)
    scored = translator.score(sources, targets, told=told, first_number=first + 1)
    return (_shown(first + place, one, options.tokens) for place, one in enumerate(scored, 1))


def _score_sharded(
    translator: Translator, pairs: list[tuple[str, str]], options: ScoreOptions, show: Phases, report: ReadReport
) -> None:
    """The same on several ranks."""

    def work(first: int, some: list[tuple[str, str]]) -> Iterator[str]:
        return _lines(translator, first, some, len(pairs), options, show)

    identity = {
        "command": "score",
        "model": model_identity(options.model),
        "settings": asdict(translator.settings),
        "form": (options.tokens, options.on_bad_utf8),
        "precision": translator.precision,
    }
    files = [options.source, options.target]
    with counted_truncations(), naming_lines(source=options.source, reference=options.target):
        lines = run_sharded(options.output, files, identity, lambda: blocks_of(pairs, BLOCK_PAIRS), work)
    if lines is not None:
        tell_bad_lines(report)


def _shown(number: int, scored: Scored, tokens: bool) -> str:
    total, count = scored.sum_log_prob, len(scored.tokens)
    if not tokens:
        return f"{total:.6f}\t{count}\t{total / count:.6f}"
    record = {
        "line": number,
        "log_prob": total,
        "num_tokens": count,
        "mean_log_prob": total / count,
        "tokens": scored.tokens,
        "token_log_probs": scored.token_log_probs,
    }
    return json.dumps(record, ensure_ascii=False)
