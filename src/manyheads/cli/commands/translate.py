"""`manyheads translate MODEL [INPUT]`: a line in, a line out; a prompt in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from manyheads.cli.command_line.parsing import parse
from manyheads.cli.lines.conversation import converse, is_conversation
from manyheads.cli.lines.documents import DocumentOptions, open_document
from manyheads.cli.lines.output import LineWriter, refuse_same_file
from manyheads.cli.lines.running import run_lines
from manyheads.cli.machine import set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import CommandPage, argument, group, option
from manyheads.data.line_source import LinesOf
from manyheads.data.lines import OnBadUtf8
from manyheads.data.progress import telling
from manyheads.decoding.options import DecodingOptions, SearchDeviceOptions
from manyheads.decoding.truncation import counted_truncations, naming_lines, tell_bad_lines
from manyheads.distributed.sharded_lines import is_sharded, model_identity
from manyheads.errors import ConfigError

__all__ = ["PAGE", "TranslateOptions", "run"]


@dataclass(frozen=True, kw_only=True)
class TranslateOptions:
    """Options of `manyheads translate`."""

    model: str = argument("A model folder, a run folder, or owner/name on the Hugging Face hub.", metavar="MODEL")
    input: str = argument("A text file, plain or gzip; - is standard input.", default="-", metavar="INPUT")
    output: str = option("Where translations go; - is standard output.", default="-", metavar="FILE", aliases=("-o",))
    num_return_sequences: int | None = option(
        "The N best translations of each line, as tab-separated values.",
        default=None,
        metavar="N",
        default_is="the best one, as plain text",
        aliases=("--nbest",),
    )
    json: bool = option(
        "One JSON object a line, with the source, and score, tokens and log-probabilities of each translation.",
        default=False,
    )
    linearised: bool = option(
        "For parsers: show the text that the model wrote, not the tree made from it.", default=False
    )
    on_bad_utf8: OnBadUtf8 = option(
        "A line that is not UTF-8: fail, replace its bad bytes, or skip (an empty line comes out).", default="fail"
    )
    lines_at_once: int = option(
        "Maximum number of lines that are translated together; fewer if a pipe has no more at the moment.",
        default=256,
        metavar="N",
    )
    verbose: bool = option("Print the settings and the speed on standard error.", default=False, aliases=("-v",))
    document: DocumentOptions = group(DocumentOptions)
    run_on: SearchDeviceOptions = group(SearchDeviceOptions)
    decoding: DecodingOptions = group(DecodingOptions)

    def __post_init__(self) -> None:
        for name, value in {"--lines-at-once": self.lines_at_once, "--nbest": self.num_return_sequences}.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")


PAGE = CommandPage(
    TranslateOptions,
    """Translate text: one line in, one line out, in order; an empty line gives an empty line.
Without INPUT, standard input is read; in a terminal there is a prompt, and Ctrl-D ends it.
With --nbest N each input line gives up to N lines of three columns: line number (from 1), score, translation.
A parser gives the tree of each sentence, whose words have spaces between them, over exactly these words.
In a document (Markdown, HTML, subtitles, CSV, JSONL; see --format) everything but the text stays as it is.""",
    (
        'echo "I am hungry." | manyheads translate runs/demo',
        "manyheads translate runs/demo input.en --output output.de --beam 8 --verbose",
        "manyheads translate runs/demo input.en --nbest 4",
        "manyheads translate runs/demo page.md --output page.de.md",
    ),
)


def run(arguments: Sequence[str]) -> int:
    """Translate lines. Returns: the exit code."""
    set_up_machine()
    options = parse(PAGE, arguments, "translate")
    refuse_same_file(options.output, options.input)
    document = open_document(options.document, options.input, options.output)
    if document is not None:
        _refuse_for_documents(options)
    options.run_on.announce()
    from manyheads.cli.lines.translations import TranslationLines
    from manyheads.decoding.parser import task_of
    from manyheads.decoding.translator import Translator

    translator = options.run_on.load(Translator.from_pretrained, options.model)
    # The command line decides the form of the output, never the model's settings.
    nbest = options.num_return_sequences
    overrides = {**options.decoding.overrides(translator.tokenizer), "num_return_sequences": nbest or 1}
    settings = translator.options(**overrides)
    if options.verbose:
        print(f"{options.model} on {translator.device}, {translator.precision}: {settings}", file=sys.stderr)
    if document is not None:
        if task_of(translator) is not None:
            raise ConfigError(f"{options.model} is a parser; documents are translated. Give sentences, one a line.")
        return document.translate(
            translator, options.model, options.output, overrides, lines_at_once=options.lines_at_once
        )
    lines = TranslationLines(
        task_of(translator),
        options.model,
        linearised=options.linearised,
        as_json=options.json,
        as_list=nbest is not None,
    )
    if not is_sharded(options.output) and is_conversation(options.input):
        with LineWriter(options.output) as writer:

            def answer(number: int, line: str) -> None:
                writer.write(lines.lines(number + 1, line, translator.translate_nbest([line], **overrides)[0]))
                lines.check.tell()

            directions = ", ".join(f"{source}-{target}" for source, target in translator.languages)
            converse("a sentence", answer, f"{directions}> " if directions else "> ")
        return 0
    started, num_tokens = time.perf_counter(), 0

    def work(first: int, sources: list[str]) -> Iterator[str]:
        nonlocal num_tokens
        told = telling(show, "translating lines", 0, first)
        batch = translator.translate_nbest(sources, told=told, first_number=first + 1, **overrides)
        for number, (source, found) in enumerate(zip(sources, batch, strict=True), first + 1):
            yield from lines.lines(number, source, found)
        num_tokens += sum(len(found[0].tokens) for found in batch)
        if options.verbose:
            num_lines, seconds = first + len(sources), time.perf_counter() - started
            speed = f"{num_lines / seconds:,.1f} lines/s, {num_tokens / seconds:,.0f} tokens/s"
            print(f"{num_lines:,} lines, {num_tokens:,} tokens in {seconds:.1f} s: {speed}", file=sys.stderr)

    def identity() -> dict[str, Any]:
        return {
            "command": "translate",
            "model": model_identity(options.model),
            "settings": asdict(settings),
            "form": (options.json, nbest, options.linearised, options.lines_at_once, options.on_bad_utf8),
            "precision": translator.precision,
            "compiled": options.run_on.compile,
        }

    source = LinesOf(options.input, options.lines_at_once, options.on_bad_utf8)
    with showing_if_long() as show, counted_truncations(), naming_lines(text=options.input):
        is_main = run_lines(source, work, output=options.output, identity=identity, show=show)
    if is_main:
        tell_bad_lines(source.report)
    lines.tell()
    return 0


def _refuse_for_documents(options: TranslateOptions) -> None:
    """Raises: ConfigError: an option is of lines."""
    for name, is_given in (
        ("--num-return-sequences", options.num_return_sequences is not None),
        ("--json", options.json),
        ("--linearised", options.linearised),
        ("--on-bad-utf8", options.on_bad_utf8 != "fail"),
        ("--do-sample", bool(options.decoding.do_sample)),
    ):
        if is_given:
            raise ConfigError(f"{name} is for lines; {options.input} is translated as a document. Give --format lines.")
