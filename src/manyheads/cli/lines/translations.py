"""Output lines of `translate`, and a warning about bad outputs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from manyheads.catalogue import HOOKS, load
from manyheads.cli.command_line.parsing import program
from manyheads.cli.command_line.translate_options import TranslateOptions
from manyheads.cli.lines.conversation import Command, converse, whole_number
from manyheads.cli.lines.output import LineWriter, OutputCheck
from manyheads.cli.process import echo
from manyheads.data.lines import LinesOf, Progress, phase_progress
from manyheads.decoding.search_problem import Translation, one_line
from manyheads.decoding.translator import Translator
from manyheads.distributed.sharded_lines import model_identity
from manyheads.errors import ConfigError, RequestError
from manyheads.files.verify import json_text
from manyheads.nn.kernels.policy import lines_together
from manyheads.tasks.report import LineWork


class TranslationLines:
    """Converts the output of a model to lines, and counts bad outputs.

    Attributes:
        translator: the model.
        overrides: fields of `DecodingSettings` from the command line.

    Raises: ConfigError: an option is not for this kind of model.
    """

    def __init__(self, translator: Translator, options: TranslateOptions, terms: Any = None) -> None:
        self.translator, self._options, self._terms = translator, options, terms
        self.check_options()
        # The command line decides the form of the output, never the model's settings.
        nbest = options.num_return_sequences or 1
        self.overrides = {**options.decoding.overrides(translator.tokenizer), "num_return_sequences": nbest}
        self._settings = translator.options(**self.overrides)
        self._last = ""
        if translator.search.engine is not None:
            echo(f"manyheads: {translator.search.choose_engine(self._settings)}", file=sys.stderr)
        self._check = OutputCheck(
            "translations",
            learn_more=f"train it longer or on more data; {program()} info {options.model} shows how it was trained.",
            forbid="--min-new-tokens 1 forbids empty ones, --no-repeat-ngram-size 3 repetitions.",
        )
        if options.verbose:
            models = " + ".join((options.model, *options.models.ensemble))
            about = f"{models} on {translator.device}, {translator.precision}: {self._settings}"
            echo(about, file=sys.stderr)

    def _with_terms(self, sources: list[str], found: list[list[Translation]]) -> list[list[Translation]]:
        """Return the translations, with the terms of their sources in them."""
        if self._terms is None:
            return found
        before = [one[0].text for one in found]
        texts = self._terms.force(self.translator, sources, before, **self.overrides)
        return [[replace(one[0], text=text)] for one, text in zip(found, texts, strict=True)]

    def check_options(self) -> None:
        """Raises: ConfigError: an option is not for translators."""
        if self._options.linearised:
            raise ConfigError("--linearised is for parsers, but this model translates.")

    def check_translates_documents(self) -> None:
        """Raises: ConfigError: the model translates no documents."""

    def converse(self) -> None:
        """Translate every line that the user types."""
        with LineWriter(self._options.output) as writer:

            def answer(number: int, line: str) -> None:
                self._last = line
                [found] = self._with_terms([line], self.translator.translate_nbest([line], **self.overrides))
                writer.write(self.lines(number + 1, line, found))
                self._check.report()

            directions = ", ".join(f"{source}-{target}" for source, target in self.translator.languages)
            converse("a sentence", answer, f"{directions}> " if directions else "> ", self._commands())

    def _commands(self) -> dict[str, Command]:
        beams = Command("N", "search with N beams", lambda text: self._set("num_beams", whole_number("beam", text)))
        nbest = Command("N", "show the N best translations", lambda text: self._show_best(whole_number("nbest", text)))
        about = "draw the attention of the last sentence as a page; default attention.html"
        return {"beam": beams, "nbest": nbest, "attention": Command("[FILE]", about, self._draw_attention)}

    def _set(self, name: str, value: int) -> str:
        """Change an option for the following lines. Raises: ConfigError: it is out of range."""
        overrides = {**self.overrides, name: value}
        self._settings = self.translator.options(**overrides)
        self.overrides = overrides
        return f"{name} is {value}"

    def _show_best(self, count: int) -> str:
        told = self._set("num_return_sequences", count)
        self._options = replace(self._options, num_return_sequences=count if count > 1 else None)
        return told

    def _draw_attention(self, file: str) -> str:
        """Write the page of the last sentence.

        Returns: what to print. Raises: RequestError: there is no sentence, or another kind of file is named.
        """
        if not self._last.strip():
            raise RequestError(":attention draws the last sentence, but there is none yet; type one first.")
        path = Path(file or "attention.html")
        if path.suffix.lower() != ".html":
            raise RequestError(f":attention writes an HTML page, but the name is {path}; let it end in .html.")
        page = load(HOOKS["picture"])("attention page", path, self.translator, self._last)
        done = "replaced" if os.path.exists(path) else "written"  # noqa: PTH110  (never an error; writing reports it)
        return f"{done}: {page.save()[0]}"

    def job(self, progress: Progress) -> LineWork[str]:
        """The translation of the whole input."""
        options = self._options
        started, num_tokens = time.perf_counter(), 0

        def work(first: int, sources: list[str]) -> Iterator[str]:
            nonlocal num_tokens
            on_progress = phase_progress(progress, "translating lines", 0, first)
            batch = self.translator.translate_nbest(
                sources, on_progress=on_progress, first_number=first + 1, **self.overrides
            )
            batch = self._with_terms(sources, batch)
            for number, (source, found) in enumerate(zip(sources, batch, strict=True), first + 1):
                yield from self.lines(number, source, found)
            num_tokens += sum(len(found[0].tokens) for found in batch)
            if options.verbose:
                num_lines, seconds = first + len(sources), time.perf_counter() - started
                speed = f"{num_lines / seconds:,.1f} lines/s, {num_tokens / seconds:,.0f} tokens/s"
                echo(f"{num_lines:,} lines, {num_tokens:,} tokens in {seconds:.1f} s: {speed}", file=sys.stderr)

        at_once = options.lines_at_once or lines_together(self.translator.device)
        form = (
            options.json,
            options.num_return_sequences,
            options.linearised,
            at_once,
            options.on_bad_utf8,
        )
        identity = {
            "command": "translate",
            "model": model_identity(options.model),
            **options.identity(),
            "settings": asdict(self._settings),
            "form": form,
            "precision": self.translator.precision,
            "target_lang": self.translator.target_lang,
            "terms": [asdict(term) for term in self._terms or ()],
        }
        source = LinesOf(options.input, at_once, options.on_bad_utf8)
        return LineWork(source, work, identity, {"text": options.input})

    def lines(self, number: int, source: str, translations: list[Translation]) -> list[str]:
        """The output lines of one input line. number: of the line, from 1."""
        if source.strip():  # an empty translation of an empty line is right
            self.check_output(number, source, translations[0].text)
        if self._options.json:
            found = [
                {
                    **self._record(source, one.text),
                    "score": one.score,
                    "log_prob": sum(one.token_log_probs),
                    "tokens": one.tokens,
                    "token_log_probs": one.token_log_probs,
                }
                for one in translations
            ]
            return [json_text({"line": number, "source": source, "translations": found})]
        if self._options.num_return_sequences is None:
            return [self._text(source, translations[0])]
        texts = [self._text(source, one).replace("\t", " ") for one in translations]
        return [f"{number}\t{one.score:.6f}\t{text}" for one, text in zip(translations, texts, strict=True)]

    def report(self) -> None:
        """Print a line on standard error if outputs were empty or repeated themselves."""
        self._check.report()
        if self._terms is not None:
            echo(f"manyheads: {self._terms.describe()}", file=sys.stderr)

    def check_output(self, number: int, source: str, text: str) -> None:
        """Note whether an output is bad. number: of the line, from 1."""
        self._check.see(number, source, text)

    def _text(self, source: str, one: Translation) -> str:
        return one_line(one.text)

    def _record(self, source: str, written: str) -> dict[str, Any]:
        """Return the fields of an output's text for JSON."""
        return {"text": written}
