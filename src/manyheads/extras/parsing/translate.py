"""The command `translate` for parsers: the tree of each line, by text or by a chart."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from manyheads.cli.commands.translate import TranslateOptions, TranslationLines, converse_or_write, translate
from manyheads.cli.lines.output import LineWriter, converse, greet, is_conversation
from manyheads.cli.process import echo
from manyheads.config.options import given_options, refuse_given
from manyheads.data.lines import LinesOf, Progress, phase_progress
from manyheads.decoding.inputs_and_results import Translation, one_line
from manyheads.distributed.process import local_device
from manyheads.distributed.sharded_lines import model_identity
from manyheads.errors import ConfigError
from manyheads.extras.parsing.parser import ChartParser, Parser
from manyheads.extras.parsing.trees import format_tree, repairs_line
from manyheads.nn.kernels.policy import lines_together
from manyheads.tasks.report import LineWork
from manyheads.text.words import words_of


def translate_by_text(options: TranslateOptions) -> int:
    """Write the trees that a translator of trees gives. Returns: the exit code."""
    return translate(options, _TextLines)


class _TextLines(TranslationLines):
    """Makes trees of the model's outputs, and counts repairs."""

    def check_options(self) -> None:
        """Raises: ConfigError: an option is not for parsers."""
        if self._terms is not None:
            raise ConfigError(f"--terms is for translators, but {self._options.model} is a parser.")
        self._task = Parser(self.translator).task
        self._repairs: Counter[str] = Counter()
        self._num_trees = self._num_repaired = 0

    def check_translates_documents(self) -> None:
        """Raises: ConfigError: always."""
        raise ConfigError(f"{self._options.model} is a parser; documents are translated. Give sentences, one per line.")

    def check_output(self, number: int, source: str, text: str) -> None:
        """A tree is never empty."""

    def report(self) -> None:
        """Print a line on standard error if outputs were repaired."""
        if self._num_repaired:
            echo(
                f"manyheads: {self._num_repaired} of {self._num_trees} trees were not well-formed and were repaired:"
                f" {repairs_line(self._repairs)}.",
                file=sys.stderr,
            )

    def _text(self, source: str, one: Translation) -> str:
        return one_line(one.text if self._options.linearised else str(self._record(source, one.text)["text"]))

    def _record(self, source: str, written: str) -> dict[str, Any]:
        """The tree, what the model wrote, and what was repaired."""
        if not words_of(source):
            return {"text": "", "written": written, "repairs": {}}
        restored = self._task.restore(source, written)
        self._num_trees += 1
        self._num_repaired += bool(restored.repairs)
        self._repairs.update(restored.repairs)
        return {"text": format_tree(restored.tree), "written": written, "repairs": dict(restored.repairs)}


def translate_by_chart(options: TranslateOptions) -> int:
    """Write the trees of a chart parser. Returns: the exit code."""
    _check_for_chart(options)
    if is_conversation(options.input):
        greet(options.model)
    device, precision = local_device(options.run_on.device), options.run_on.fixed_precision()
    models = options.models.all(options.model)
    converse_or_write(_ChartLines(ChartParser.from_pretrained(models, device, precision), options), options)
    return 0


def _check_for_chart(options: TranslateOptions) -> None:
    """Raises: ConfigError: an option was given that has no meaning for a chart parser."""
    given = {
        "--nbest": options.num_return_sequences,
        "--target-lang": options.target_lang,
        "--linearised": options.linearised,
        "--engine": options.engine not in (None, "torch"),
        "--compile": options.run_on.compile,
        "--shortlist": options.run_on.shortlist,
        "--rerank": options.models.rerank,
        **dict.fromkeys(given_options(options.decoding, options.document), True),
    }
    refuse_given(given, f"{options.model} is a chart parser, which does not search over text; leave out {{}}.")


class _ChartLines:
    """Makes lines of trees."""

    def __init__(self, parser: ChartParser, options: TranslateOptions) -> None:
        self._parser, self._options = parser, options
        if options.verbose:
            models = " + ".join((options.model, *options.models.ensemble))
            echo(f"{models} on {parser.device}, {parser.precision}", file=sys.stderr)

    def converse(self) -> None:
        """Parse every line that the user types."""
        with LineWriter(self._options.output) as writer:
            converse("a sentence", lambda number, line: writer.write(self.block(number, [line])))

    def job(self, progress: Progress) -> LineWork[str]:
        """The parsing of the whole input."""
        options, started = self._options, time.perf_counter()

        def work(first: int, lines: list[str]) -> Iterator[str]:
            on_progress = phase_progress(progress, "parsing lines", 0, first)
            yield from self.block(first, lines)
            on_progress(len(lines))
            if options.verbose:
                num_lines, seconds = first + len(lines), time.perf_counter() - started
                speed = f"{num_lines / seconds:,.1f} lines/s"
                echo(f"{num_lines:,} lines in {seconds:.1f} s: {speed}", file=sys.stderr)

        identity = {
            "command": "translate",
            "model": model_identity(options.model),
            **options.models.identity(),
            "form": (options.json, options.on_bad_utf8),
            "precision": self._parser.precision,
        }
        at_once = options.lines_at_once or lines_together(self._parser.device)
        source = LinesOf(options.input, at_once, options.on_bad_utf8)
        return LineWork(source, work, identity, {"sentence": options.input})

    def report(self) -> None:
        """A chart needs no repairs."""

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
