"""Output lines of `generate`: continuations of prompts, and a warning about bad ones."""

from __future__ import annotations

import json
import sys
import time
from itertools import chain
from typing import TYPE_CHECKING

from manyheads.cli.command_line.generate_options import GenerateOptions
from manyheads.cli.command_line.pages import program
from manyheads.cli.lines.output import LineWriter
from manyheads.cli.lines.output_checks import OutputCheck, kept

if TYPE_CHECKING:
    from manyheads.decoding.generator import Continuation, Generator

__all__ = ["ContinuationLines"]


class ContinuationLines:
    """Makes lines of what a language model writes.

    Attributes:
        generator: of the model.
        overrides: settings of the command line, for `generator`.
        check: counts texts that are empty or repeat themselves.
    """

    def __init__(self, generator: Generator, options: GenerateOptions) -> None:
        self.generator = generator
        self.overrides = options.generation.overrides()
        self.check = OutputCheck(
            "texts",
            learn_more=f"train it longer or on more data; {program()} info {options.model} shows how it was trained.",
            forbid="Draw instead of --greedy, or give --repetition-penalty 1.2 or --no-repeat-ngram-size 4.",
        )
        self._options = options

    def write(self, writer: LineWriter, number: int, prompt: str) -> None:
        """Write the continuations of one prompt; a single one appears piece by piece. number: from 0, of the prompt."""
        started, options = time.perf_counter(), self._options
        if options.json or options.generation.num_return_sequences > 1:
            [found] = self.generator.continuations([prompt], first=number, **self.overrides)
            writer.write(self.lines(number, prompt, found))
        else:
            written: list[str] = []
            pieces = kept(self.generator.stream(prompt, number=number, **self.overrides), written)
            writer.write_pieces(chain([prompt] if options.echo else [], pieces))
            self._see(number, prompt, "".join(written))
        if options.verbose:
            print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
        self.check.tell()

    def lines(self, number: int, prompt: str, found: list[Continuation]) -> list[str]:
        """The output lines of one prompt. number: from 0, of the prompt."""
        for one in found:
            self._see(number, prompt, one.text)
        options = self._options
        if options.json:
            continuations = [
                {
                    "text": one.text,
                    "ended_by": one.ended_by,
                    "log_prob": sum(one.log_probs),
                    "tokens": self.generator.vocabulary.tokens(one.ids),
                    "token_log_probs": one.log_probs,
                }
                for one in found
            ]
            record = {"line": number + 1, "prompt": prompt, "continuations": continuations}
            return [json.dumps(record, ensure_ascii=False)]
        texts = [(prompt if options.echo else "") + one.text for one in found]
        if options.lines:
            return [text.replace("\n", " ") for text in texts]
        return ["\n---\n".join(texts)]

    def _see(self, number: int, prompt: str, text: str) -> None:
        self.check.see_text(number + 1, prompt, text, may_be_empty=bool(self._options.generation.stop))
