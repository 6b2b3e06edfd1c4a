"""Output lines of `translate` for a chart parser: the tree of each line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

from manyheads.cli.command_line.translate_options import TranslateOptions
from manyheads.cli.lines.conversation import converse
from manyheads.cli.lines.output import LineWriter
from manyheads.cli.printing import say
from manyheads.config.options import given_options, refuse_given
from manyheads.data.line_source import LinesOf
from manyheads.data.progress import Progress, telling
from manyheads.distributed.sharded_lines import model_identity
from manyheads.extras.parsing.chart_parser import ChartParser
from manyheads.extras.parsing.trees import format_tree
from manyheads.tasks.report import LineWork

__all__ = ["TreeLines", "check_for_chart"]


def check_for_chart(options: TranslateOptions) -> None:
    """Raises: ConfigError: an option was given that has no meaning for a chart parser."""
    given = {
        "--nbest": options.num_return_sequences,
        "--target-lang": options.target_lang,
        "--linearised": options.linearised,
        "--engine": options.engine != "torch",
        "--compile": options.run_on.compile,
        "--shortlist": options.run_on.shortlist,
        "--rerank": options.models.rerank,
        **dict.fromkeys(given_options(options.decoding, options.document), True),
    }
    refuse_given(given, f"{options.model} is a chart parser, which does not search over text; leave out {{}}.")


class TreeLines:
    """Makes lines of trees."""

    def __init__(self, parser: ChartParser, options: TranslateOptions) -> None:
        self._parser, self._options = parser, options
        if options.verbose:
            models = " + ".join((options.model, *options.models.ensemble))
            say(f"{models} on {parser.device}, {parser.precision}", file=sys.stderr)

    def converse(self) -> None:
        """Parse every line that the user types."""
        with LineWriter(self._options.output) as writer:
            converse("a sentence", lambda number, line: writer.write(self.block(number, [line])))

    def job(self, show: Progress) -> LineWork[str]:
        """The parsing of the whole input."""
        options, started = self._options, time.perf_counter()

        def work(first: int, lines: list[str]) -> Iterator[str]:
            told = telling(show, "parsing lines", 0, first)
            yield from self.block(first, lines)
            told(len(lines))
            if options.verbose:
                num_lines, seconds = first + len(lines), time.perf_counter() - started
                speed = f"{num_lines / seconds:,.1f} lines/s"
                say(f"{num_lines:,} lines in {seconds:.1f} s: {speed}", file=sys.stderr)

        identity = {
            "command": "translate",
            "model": model_identity(options.model),
            **options.models.identity(),
            "form": (options.json, options.on_bad_utf8),
            "precision": self._parser.precision,
        }
        source = LinesOf(options.input, options.lines_at_once, options.on_bad_utf8)
        return LineWork(source, work, identity, {"sentence": options.input})

    def block(self, first: int, lines: list[str]) -> list[str]:
        """Return the output of some lines. first: number of the first one, from 0. An empty line has no tree."""
        trees = self._parser.parse(lines, first_number=first + 1)
        texts = ["" if tree is None else format_tree(tree) for tree in trees]
        if not self._options.json:
            return texts
        return [
            json.dumps({"line": number, "source": line, "tree": text}, ensure_ascii=False)
            for number, (line, text) in enumerate(zip(lines, texts, strict=True), first + 1)
        ]
