"""`manyheads score` of a language model: how likely it finds given texts, a line each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyheads.cli.command_line.parsing import parse
from manyheads.cli.lines.output import refuse_same_file
from manyheads.cli.lines.running import run_lines
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import argument, group, option
from manyheads.data.line_source import LinesOf
from manyheads.data.lines import OnBadUtf8
from manyheads.data.progress import telling
from manyheads.decoding.options import DeviceOptions
from manyheads.decoding.truncation import tell_bad_lines
from manyheads.distributed.place import local_device
from manyheads.distributed.sharded_lines import model_identity

if TYPE_CHECKING:
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

    model: str = argument("A model folder, a run folder, or owner/name on the Hugging Face hub.", metavar="MODEL")
    text: str = option("Texts, one a line, plain or gzip; - is standard input.", default="-", metavar="FILE")
    output: str = option("Where scores go; - is standard output.", default="-", metavar="FILE", aliases=("-o",))
    tokens: bool = option("JSON lines with the log-probability of every token.", default=False)
    on_bad_utf8: OnBadUtf8 = option(
        "A line that is not UTF-8: fail, replace its bad bytes, or skip (it is scored as an empty one).", default="fail"
    )
    max_rows: int = option("Lines that are read side by side.", default=64, metavar="N")
    run_on: DeviceOptions = group(DeviceOptions)


def score_text_command(arguments: Sequence[str]) -> int:
    """Score lines. Returns: the exit code."""
    options = parse(ScoreTextOptions, arguments, command="score", description=_DESCRIPTION, examples=_EXAMPLES)
    refuse_same_file(options.output, options.text)
    from manyheads.decoding.generator import Generator
    from manyheads.decoding.text_scoring import score_texts
    from manyheads.errors import ConfigError

    if options.max_rows < 1:
        raise ConfigError(f"--max-rows is {options.max_rows}; it must be at least 1.")
    with showing_if_long() as show:
        show("loading the model", 0, 0)
        device = local_device(options.run_on.device)
        generator = Generator.from_pretrained(options.model, device, options.run_on.fixed_precision())

        def work(first: int, lines: list[str]) -> Iterator[str]:
            told = telling(show, "scoring lines", 0, first)
            found = score_texts(generator, lines, max_rows=options.max_rows, told=told)
            return (_shown(first + place, one, options.tokens) for place, one in enumerate(found, 1))

        def identity() -> dict[str, Any]:
            return {
                "command": "score",
                "model": model_identity(options.model),
                "form": (options.tokens, options.on_bad_utf8, options.max_rows),
                "precision": generator.precision,
            }

        source = LinesOf(options.text, 16 * options.max_rows, options.on_bad_utf8)
        if run_lines(source, work, output=options.output, identity=identity, show=show):
            tell_bad_lines(source.report)
    return 0


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
