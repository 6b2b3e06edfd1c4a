"""`manyheads score` of a language model: how likely it finds given texts, a line each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from manyheads.cli.decoding_options import DeviceOptions
from manyheads.cli.output import LineWriter, refuse_same_file
from manyheads.cli.parsing import parse
from manyheads.cli.phases import Phases, showing_if_long, telling
from manyheads.cli.sharding import blocks_of, is_sharded, local_device, model_identity, run_sharded
from manyheads.cli.truncation import tell_bad_lines
from manyheads.data.lines import OnBadUtf8, ReadReport, read_blocks, read_lines

if TYPE_CHECKING:
    from manyheads.decoding.generator import Generator
    from manyheads.decoding.translation import Scored

__all__ = ["ScoreTextOptions", "score_text_command"]

_DESCRIPTION = """Log-probabilities (in nats) that a language model gives to texts, each line by itself.
Each line gives a line of three tab-separated columns: sum of the log-probabilities, number of tokens, mean; an empty
line has none of either. With --tokens it gives a JSON object with each token and its log-probability instead."""

_EXAMPLES = (
    "manyheads score runs/xl-demo --text sentences.txt",
    "manyheads score runs/xl-demo --text sentences.txt --tokens --output scores.jsonl",
)


@dataclass(frozen=True, kw_only=True)
class ScoreTextOptions:
    """Options of `manyheads score` for a language model."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A model folder, a run folder, or owner/name on the Hugging Face hub."""
    text: Annotated[str, arg(metavar="FILE")] = "-"
    """Texts, one a line, plain or gzip; - is standard input."""
    output: Annotated[str, arg(aliases=["-o"], metavar="FILE")] = "-"
    """Where scores go; - is standard output."""
    tokens: Annotated[bool, arg(help_behavior_hint="")] = False
    """JSON lines with the log-probability of every token."""
    on_bad_utf8: OnBadUtf8 = "fail"
    """A line that is not UTF-8: fail, replace its bad bytes, or skip (it is scored as an empty one)."""
    max_rows: Annotated[int, arg(metavar="N")] = 64
    """Lines that are read side by side."""
    run_on: Annotated[DeviceOptions, arg(name="")] = field(default_factory=DeviceOptions)


def score_text_command(arguments: Sequence[str]) -> int:
    """Score lines. Returns: the exit code."""
    options = parse(ScoreTextOptions, arguments, command="score", description=_DESCRIPTION, examples=_EXAMPLES)
    refuse_same_file(options.output, options.text)
    from manyheads.decoding.generator import Generator
    from manyheads.errors import ConfigError

    if options.max_rows < 1:
        raise ConfigError(f"--max-rows is {options.max_rows}; it must be at least 1.")
    with showing_if_long() as show:
        show("loading the model", 0, 0)
        device = local_device(options.run_on.device)
        generator = Generator.from_pretrained(options.model, device, options.run_on.fixed_precision())
        (_score_sharded if is_sharded(options.output) else _score)(generator, options, show)
    return 0


def _score(generator: Generator, options: ScoreTextOptions, show: Phases) -> None:
    report = ReadReport()
    number = 0
    awaits = options.text == "-"  # whoever writes it may take their time
    if awaits:
        show.rest()
    with LineWriter(options.output) as writer:
        for lines in read_blocks(options.text, 16 * options.max_rows, on_bad_utf8=options.on_bad_utf8, report=report):
            found = _lines(generator, number, lines, options, show)
            with show.hidden(writer.is_in_terminal):
                writer.write(found)
            number += len(lines)
            if awaits:
                show.rest()
    tell_bad_lines(report)


def _lines(
    generator: Generator, first: int, lines: list[str], options: ScoreTextOptions, show: Phases
) -> Iterator[str]:
    """The output lines of input lines; first: number of the first one, from 0."""
    from manyheads.decoding.text_scoring import score_texts

    told = telling(show, "scoring lines", 0, first)
    found = score_texts(generator, lines, max_rows=options.max_rows, told=told)
    return (_shown(first + place, one, options.tokens) for place, one in enumerate(found, 1))


def _score_sharded(generator: Generator, options: ScoreTextOptions, show: Phases) -> None:
    """The same of a file, on several ranks."""
    report = ReadReport()

    def blocks() -> Iterator[list[str]]:
        nonlocal report
        report = ReadReport()  # a file is read more than once, and counted once
        lines = read_lines(options.text, on_bad_utf8=options.on_bad_utf8, report=report)
        return blocks_of(lines, 16 * options.max_rows)

    def work(first: int, lines: list[str]) -> Iterator[str]:
        return _lines(generator, first, lines, options, show)

    identity = {
        "command": "score",
        "model": model_identity(options.model),
        "form": (options.tokens, options.on_bad_utf8, options.max_rows),
        "precision": generator.precision,
    }
    if run_sharded(options.output, [options.text], identity, blocks, work) is not None:
        tell_bad_lines(report)


def _shown(number: int, scored: Scored, tokens: bool) -> str:
    total, count = scored.sum_log_prob, len(scored.tokens)
    if not tokens:
        return f"{total:.6f}\t{count}\t{total / count:.6f}" if count else "0\t0\t"
    record = {
        "line": number,
        "log_prob": total,
        "num_tokens": count,
        "mean_log_prob": total / count if count else None,
        "tokens": scored.tokens,
        "token_log_probs": scored.token_log_probs,
    }
    return json.dumps(record, ensure_ascii=False)
