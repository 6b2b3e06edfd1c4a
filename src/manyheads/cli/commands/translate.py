"""`manyheads translate MODEL [INPUT]`: a line in, a line out; a prompt in a terminal; a warning about bad outputs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.catalogue import HOOKS, load
from manyheads.cli.command_line.parsing import command, program
from manyheads.cli.lines.output import (
    Command,
    LineWriter,
    OutputCheck,
    check_files,
    converse,
    greet,
    is_conversation,
    whole_number,
    write_lines,
)
from manyheads.cli.process import echo, set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.checks import at_least, check
from manyheads.config.options import CommandPage, Shared, argument, group, option, refuse_given
from manyheads.data.lines import LinesOf, OnBadUtf8, Progress, phase_progress
from manyheads.decoding.inputs_and_results import EngineName, engine_named
from manyheads.decoding.options import DecodingOptions, RerankingOptions, TranslationDeviceOptions
from manyheads.decoding.settings import load_settings, overridden
from manyheads.distributed.sharded_lines import is_sharded, model_identity
from manyheads.errors import ConfigError, RequestError
from manyheads.files.verify import json_text
from manyheads.models.hub import is_hub_name, resolve_model_path
from manyheads.tasks.held_out import task_of_folder

if TYPE_CHECKING:
    from manyheads.decoding.inputs_and_results import Translation
    from manyheads.decoding.translator import Translator
    from manyheads.tasks.report import LineWork


@dataclass(frozen=True, kw_only=True)
class TranslateOptions:
    """Options of `manyheads translate`."""

    model: str = Shared.model()
    input: str = argument("A text file, plain or gzip; - is standard input.", default="-", metavar="INPUT")
    output: str = Shared.output("the translations")
    num_return_sequences: int | None = option(
        "Write the N best translations of each line, as tab-separated values.",
        metavar="N",
        default_is="the best one, as plain text",
        aliases=("--nbest",),
    )
    json: bool = Shared.json(
        "Write one JSON object per line, with the source, and score, tokens and log-probabilities of each translation."
    )
    target_lang: str | None = option(
        "Target language, for a model that translates into several.", default=None, metavar="TAG"
    )
    ids: bool = option(
        "Read and write ids instead of text, with spaces between them, exactly as the model does: a source has its own "
        "marks of beginning and end.",
        default=False,
    )
    linearised: bool = option(
        "For parsers: write the text that the model generated, not the tree made from it.", default=False
    )
    on_bad_utf8: OnBadUtf8 = Shared.on_bad_utf8("the output has an empty line")
    engine: EngineName | None = option(
        "Search engine: torch; ctranslate2 (needs the extra ct2; stores an export beside the model); or auto, which "
        "measures both and uses ctranslate2 if it is faster and supports all options.",
        default_is="torch; for --precision int8 ctranslate2",
    )
    lines_at_once: int | None = option(
        "Maximum number of lines that are translated together; fewer if a pipe contains fewer at the moment.",
        metavar="N",
        default_is="256, on CUDA 4096",
    )
    verbose: bool = option("Print settings and speed on standard error.", default=False, aliases=("-v",))
    document: Any = group(load(HOOKS["documents"]))
    models: RerankingOptions = group(RerankingOptions)
    run_on: TranslationDeviceOptions = group(TranslationDeviceOptions)
    decoding: DecodingOptions = group(DecodingOptions)

    def __post_init__(self) -> None:
        check(self, "--", at_least(1), "lines_at_once", "num_return_sequences")
        if self.ids:
            others = {
                "--terms": self.document.terms,
                "--target-lang": self.target_lang,
                "--rerank": self.models.rerank,
                "--ensemble": self.models.ensemble,
                "--shortlist": self.run_on.shortlist,
                "--engine": self.engine not in (None, "torch"),
                "--precision int8": self.run_on.precision == "int8",
            }
            refuse_given(others, "--ids gives a model its ids alone; leave out {}.")
        if self.document.terms is not None:
            given = {
                "--nbest": self.num_return_sequences,
                "--json": self.json,
                "--do-sample": self.decoding.do_sample,
                "--rerank": self.models.rerank,
            }
            refuse_given(given, "--terms gives one translation a line by beam search; leave out {}.")
        engine = engine_named(self.engine, self.run_on.precision)
        if engine == "torch":
            return
        by = "--precision int8" if self.run_on.precision == "int8" else f"--engine {engine}"
        if self.models.ensemble:
            raise ConfigError(
                f"{by} searches one model, but {1 + len(self.models.ensemble)} are named; leave out"
                f" {by.partition(' ')[0]} or --ensemble."
            )
        if self.json:
            other = "--precision fp32" if self.run_on.precision == "int8" else "--engine torch"
            raise ConfigError(f"--json gives token log-probabilities, which {by} may not have; use {other}.")

    def check_target(self) -> None:
        """Compare --target-lang with the tags of a local model, before it is loaded.

        Raises: ConfigError: see `text.sides.check_target`. DataError: the tokenizer is damaged.
        """
        from manyheads.text.of_folder import load_tokenizer
        from manyheads.text.pipeline import has_tokenizer
        from manyheads.text.sides import check_target

        folder = self._folder()
        if folder is not None and has_tokenizer(folder):
            found = load_tokenizer(folder)
            needed = found.needs_language and not self.ids
            check_target(found.target_languages, self.target_lang, self.model, "--target-lang", is_needed=needed)

    def _folder(self) -> Path | None:
        """The folder of a local translation model; None: it is another model, or on the hub."""
        if task_of_folder(self.model) not in ("translation", "parsing"):
            return None
        return next(
            (path for path in (Path(self.model) / "model", Path(self.model)) if (path / "config.json").is_file()), None
        )

    def check_search(self) -> None:
        """Check the search's options against those of a local model, before it is loaded.

        Raises: ConfigError: an option is out of range, or two contradict each other. ModelFileError: the model's own
            options cannot be read.
        """
        folder = self._folder()
        if folder is not None:
            given = replace(self.decoding, forced_prefix=None).overrides(None)
            if given.get("do_sample") and "num_beams" not in given:
                given["num_beams"] = 1
            given["num_return_sequences"] = self.num_return_sequences or 1
            settings = overridden(load_settings(folder), given)
            if "seed" in given and not settings.do_sample:
                raise ConfigError("--seed is for sampling; give --do-sample with it, or leave it out.")

    def identity(self) -> dict[str, Any]:
        """Return the options that change the translations; see `sharded_lines`."""
        return {
            **self.models.identity(),
            "compiled": self.run_on.compile,
            "shortlist": self.run_on.shortlist,
            "engine": self.engine or "torch",
            **({"ids": True} if self.ids else {}),
        }

    def check_for_document(self) -> None:
        """Raises: ConfigError: an option was given that applies to lines only."""
        given = {
            "--num-return-sequences": self.num_return_sequences is not None,
            "--json": self.json,
            "--linearised": self.linearised,
            "--ids": self.ids,
            "--on-bad-utf8": self.on_bad_utf8 != "fail",
            "--do-sample": self.decoding.do_sample,
        }
        refuse_given(given, f"{{}} is for lines; {self.input} is translated as a document. Give --format lines.")


PAGE = CommandPage(
    TranslateOptions,
    """Translate text: one line in, one line out, in order; an empty line gives an empty line.
Without INPUT, standard input is read; in a terminal there is a prompt, and Ctrl-D ends it.
With --nbest N each input line gives up to N lines of three columns: line number (from 1), score, translation.
A parser writes the tree of each sentence over exactly its words, which must be separated by spaces. A model of several
languages needs --target-lang. --terms FILE forces terminology. --ensemble averages several models for each token;
--rerank ranks the translations of a beam with a model of the reverse direction.
In a document (Markdown, HTML, subtitles, CSV, JSONL; see --format) everything but the text stays as it is.""",
    (
        'echo "I am hungry." | manyheads translate runs/demo',
        "manyheads translate runs/demo input.en --output output.de --beam 8 --verbose",
        "manyheads translate runs/demo input.en --nbest 4",
        "manyheads translate runs/a input.en --ensemble runs/b runs/c --rerank runs/back",
        "manyheads translate runs/demo page.md --output page.de.md",
    ),
)


@command(PAGE, "translate")
def run(options: TranslateOptions) -> int:
    """Translate lines or a document, or do what another task than translation does here. Returns: the exit code."""
    set_up_machine()
    check_files(options.output, options.input, options.document.terms)
    hook = HOOKS.get(f"translate.{_task(options.model)}")
    if options.ids and hook is not None:
        raise ConfigError(f"--ids is for translators, but {options.model} is another model; leave it out.")
    code: int = translate(options) if hook is None else load(hook)(options)
    return code


def translate(options: TranslateOptions, kind: type[TranslationLines] | None = None) -> int:
    """Translate by a search over text. Args: kind: of output lines; None: those of translators."""
    document = options.document.read_input(options.input, options.output)
    if document is not None:
        options.check_for_document()
    terms = options.document.read_terms() if document is None else None
    options.check_search()
    options.check_target()
    if is_conversation(options.input):
        greet(options.model)
    options.run_on.announce()
    from manyheads.decoding.translator import Translator
    from manyheads.nn.kernels.policy import lines_together

    opened = partial(Translator.from_pretrained, engine=options.engine)
    translator = options.run_on.load(opened, options.models.all(options.model))
    if options.ids:
        translator = translator.by_ids()
    else:
        translator = options.models.reranked(translator.into(options.target_lang, "--target-lang"))
    lines = (kind or TranslationLines)(translator, options, terms)
    if document is not None:
        lines.check_translates_documents()
        document.translate(
            lines.translator,
            options.model,
            options.output,
            lines.overrides,
            lines_at_once=options.lines_at_once or lines_together(lines.translator.device),
            others=options.identity(),
        )
    else:
        converse_or_write(lines, options)
    return 0


def converse_or_write(lines: Any, options: TranslateOptions) -> None:
    """Answer a user, or write the output of the whole input. lines: `TranslationLines`, or another with its methods."""
    if is_conversation(options.input) and not is_sharded(options.output):
        lines.converse()
    else:
        with showing_if_long() as progress:
            write_lines(lines.job(progress), options.output, progress)
        lines.report()


def _task(model: str) -> str | None:
    """The task of a model; one on the hub is downloaded to see it."""
    is_on_hub = is_hub_name(model) and not Path(model).exists()
    return task_of_folder(str(resolve_model_path(model)) if is_on_hub else model)


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

        from manyheads.nn.kernels.policy import lines_together
        from manyheads.tasks.report import LineWork

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
        from manyheads.decoding.inputs_and_results import one_line

        return one_line(one.text)

    def _record(self, source: str, written: str) -> dict[str, Any]:
        """Return the fields of an output's text for JSON."""
        return {"text": written}
