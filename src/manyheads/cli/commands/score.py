"""`manyheads score MODEL --source F --target F`: how likely the model finds given translations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from manyheads.cli.command_line.model_task import task_of_arguments
from manyheads.cli.command_line.parsing import parse
from manyheads.cli.commands.score_text import ScoreTextOptions
from manyheads.cli.lines.output import refuse_same_file
from manyheads.cli.lines.running import run_lines
from manyheads.cli.machine import set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import argument, group, option
from manyheads.data.line_source import GivenItems
from manyheads.data.progress import telling
from manyheads.data.readers import ReadReport, read_pairs
from manyheads.decoding.options import DeviceOptions
from manyheads.decoding.truncation import counted_truncations, naming_lines, tell_bad_lines
from manyheads.distributed.place import local_device
from manyheads.distributed.sharded_lines import model_identity

if TYPE_CHECKING:
    from manyheads.decoding.translation import Scored

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

    model: str = argument("A model folder, a run folder, or owner/name on the Hugging Face hub.", metavar="MODEL")
    source: str = option("Source sentences, one a line, plain or gzip; - is standard input.", metavar="FILE")
    target: str = option("Their translations, line by line.", metavar="FILE")
    output: str = option("Where scores go; - is standard output.", default="-", metavar="FILE", aliases=("-o",))
    tokens: bool = option("JSON lines with the log-probability of every token.", default=False)
    on_bad_utf8: Literal["fail", "replace"] = option(
        "A line that is not UTF-8: fail, or replace its bad bytes.", default="fail"
    )
    max_tokens: int | None = option(
        "A batch's budget: rows x longest side. A longer side does not fit.",
        default=None,
        metavar="N",
        default_is="the model's",
    )
    too_long: Literal["fail", "truncate"] = option(
        "A side that does not fit: stop and name its line, or cut it, score what is left and say how many were cut.",
        default="fail",
    )
    run_on: DeviceOptions = group(DeviceOptions)


OPTIONS = (ScoreOptions, ScoreTextOptions)


def run(arguments: Sequence[str]) -> int:
    """Score pairs of lines. Returns: the exit code."""
    set_up_machine()
    if task_of_arguments(arguments) == "text":
        from manyheads.cli.commands.score_text import score_text_command

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

        def work(first: int, some: list[tuple[str, str]]) -> Iterator[str]:
            sources, targets = zip(*some, strict=True)
            told = telling(show, "scoring", len(pairs), first)
            scored = translator.score(sources, targets, told=told, first_number=first + 1)
            return (_shown(first + place, one, options.tokens) for place, one in enumerate(scored, 1))

        def identity() -> dict[str, Any]:
            return {
                "command": "score",
                "model": model_identity(options.model),
                "settings": asdict(translator.settings),
                "form": (options.tokens, options.on_bad_utf8),
                "precision": translator.precision,
            }

        source = GivenItems(pairs, BLOCK_PAIRS, [options.source, options.target], report)
        with counted_truncations(), naming_lines(source=options.source, reference=options.target):
            is_main = run_lines(source, work, output=options.output, identity=identity, show=show)
        if is_main:
            tell_bad_lines(source.report)
    return 0


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
