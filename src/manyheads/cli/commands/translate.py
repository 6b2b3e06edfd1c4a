"""`manyheads translate MODEL [INPUT]`: a line in, a line out; a prompt in a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from manyheads.cli.command_line.parsing import parse
from manyheads.cli.lines.output import LineWriter, refuse_same_file
from manyheads.cli.lines.running import run_lines
from manyheads.cli.machine import set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import argument, group, option
from manyheads.data.line_source import LinesOf
from manyheads.data.lines import OnBadUtf8
from manyheads.data.progress import telling
from manyheads.decoding.options import DecodingOptions, SearchDeviceOptions
from manyheads.decoding.translation import one_line
from manyheads.decoding.truncation import counted_truncations, naming_lines, tell_bad_lines
from manyheads.distributed.place import local_device
from manyheads.distributed.sharded_lines import is_sharded, model_identity
from manyheads.errors import ConfigError, ManyHeadsError

if TYPE_CHECKING:
    from manyheads.cli.lines.parses import Shown
    from manyheads.decoding.translation import Translation
    from manyheads.decoding.translator import Translator

__all__ = ["TranslateOptions", "run"]

_DESCRIPTION = """Translate text: one line in, one line out, in order; an empty line gives an empty line.
Without INPUT, standard input is read; in a terminal there is a prompt, and Ctrl-D ends it.
With --nbest N each input line gives up to N lines of three columns: line number (from 1), score, translation.
A model trained on trees parses: a sentence, words with spaces between them, gives its tree over exactly these words."""

_EXAMPLES = (
    'echo "I am hungry." | manyheads translate runs/demo',
    "manyheads translate runs/demo input.en --output output.de --beam 8 --verbose",
    "manyheads translate runs/demo input.en --nbest 4",
)


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
    linearised: bool = option("Of a parser: what the model wrote, not the tree that it was made into.", default=False)
    on_bad_utf8: OnBadUtf8 = option(
        "A line that is not UTF-8: fail, replace its bad bytes, or skip (an empty line comes out).", default="fail"
    )
    lines_at_once: int = option(
        "Maximum number of lines that are translated together; fewer if a pipe has no more at the moment.",
        default=256,
        metavar="N",
    )
    verbose: bool = option("Print the settings and the speed on standard error.", default=False, aliases=("-v",))
    run_on: SearchDeviceOptions = group(SearchDeviceOptions)
    decoding: DecodingOptions = group(DecodingOptions)


OPTIONS = (TranslateOptions,)


def run(arguments: Sequence[str]) -> int:
    """Translate lines. Returns: the exit code."""
    set_up_machine()
    options = parse(TranslateOptions, arguments, command="translate", description=_DESCRIPTION, examples=_EXAMPLES)
    if options.lines_at_once < 1:
        raise ConfigError(f"--lines-at-once is {options.lines_at_once}; it must be at least 1.")
    refuse_same_file(options.output, options.input)
    options.run_on.announce()
    from manyheads.decoding.translator import Translator

    translator = Translator.from_pretrained(
        options.model,
        local_device(options.run_on.device),
        options.run_on.fixed_precision(),
        compile_steps=options.run_on.compile,
    )
    # What is asked for decides the form of the output, never what the model's settings suggest.
    overrides = {
        **options.decoding.overrides(translator.tokenizer),
        "num_return_sequences": options.num_return_sequences or 1,
    }
    if options.num_return_sequences is not None and options.num_return_sequences < 1:
        raise ConfigError(f"--nbest is {options.num_return_sequences}; it must be at least 1.")
    settings = translator.options(**overrides)
    if options.verbose:
        print(f"{options.model} on {translator.device}, {translator.precision}: {settings}", file=sys.stderr)
    from manyheads.cli.lines.parses import Shown
    from manyheads.decoding.parser import task_of

    shown = Shown(task_of(translator), options.model, linearised=options.linearised)
    if options.input == "-" and not is_sharded(options.output) and sys.stdin is not None and sys.stdin.isatty():
        return _converse(translator, overrides, options, shown)
    started, num_tokens = time.perf_counter(), 0

    def work(first: int, sources: list[str]) -> Iterator[str]:
        nonlocal num_tokens
        told = telling(show, "translating lines", 0, first)
        batch = translator.translate_nbest(sources, told=told, first_number=first + 1, **overrides)
        for number, (source, found) in enumerate(zip(sources, batch, strict=True), first + 1):
            yield from _lines(number, source, found, options, shown)
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
            "form": (
                options.json, options.num_return_sequences, options.linearised, options.lines_at_once,
                options.on_bad_utf8,
            ),
            "precision": translator.precision,
            "compiled": options.run_on.compile,
        }  # fmt: skip

    source = LinesOf(options.input, options.lines_at_once, options.on_bad_utf8)
    with showing_if_long() as show, counted_truncations(), naming_lines(text=options.input):
        is_main = run_lines(source, work, output=options.output, identity=identity, show=show)
    if is_main:
        tell_bad_lines(source.report)
    shown.tell()
    return 0


def _lines(
    number: int, source: str, translations: list[Translation], options: TranslateOptions, shown: Shown
) -> list[str]:
    """The output lines of one input line."""
    shown.note(number, source, translations[0].text)
    if options.json:
        found = [
            {
                **shown.record(source, one.text),
                "score": one.score,
                "log_prob": sum(one.token_log_probs),
                "tokens": one.tokens,
                "token_log_probs": one.token_log_probs,
            }
            for one in translations
        ]
        record = {"line": number, "source": source, "translations": found}
        return [json.dumps(record, ensure_ascii=False)]
    if options.num_return_sequences is None:
        return [one_line(shown.text(source, translations[0].text))]
    texts = [one_line(shown.text(source, one.text)).replace("\t", " ") for one in translations]
    return [f"{number}\t{one.score:.6f}\t{text}" for one, text in zip(translations, texts, strict=True)]


def _converse(translator: Translator, overrides: dict[str, Any], options: TranslateOptions, shown: Shown) -> int:
    """A prompt for each line until the end of the input. A line that cannot be translated is reported, and no end."""
    in_terminal = sys.stdout is not None and sys.stdout.isatty()
    if in_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (the arrow keys of input())
    print("Type a sentence and Enter; Ctrl-D ends.", file=sys.stderr)
    number = 0
    with LineWriter(options.output) as writer:
        while True:
            try:
                # readline must know the prompt to redraw a line, and writes it to the terminal that is standard output
                if not in_terminal:
                    print("> ", end="", file=sys.stderr, flush=True)
                line = input("> " if in_terminal else "")
            except EOFError:
                print(file=sys.stderr)
                return 0
            except UnicodeDecodeError as error:
                print(f"manyheads: what was typed is not in the terminal's encoding: {error.reason}.", file=sys.stderr)
                continue
            number += 1
            try:
                found = translator.translate_nbest([line], **overrides)[0]
            except ManyHeadsError as error:
                print(f"manyheads: {error}", file=sys.stderr)
                continue
            writer.write(_lines(number, line, found, options, shown))
            shown.tell_translations()
