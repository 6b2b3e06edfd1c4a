"""`manyheads generate MODEL [PROMPT]`: a language model goes on from a text, as it is written."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from manyheads.cli.command_line.generate_options import GenerateOptions
from manyheads.cli.command_line.pages import program
from manyheads.cli.command_line.parsing import parse
from manyheads.cli.lines.output import LineWriter, refuse_same_file
from manyheads.cli.lines.output_checks import OutputCheck, kept
from manyheads.cli.lines.running import run_lines
from manyheads.cli.machine import set_up_machine
from manyheads.data.line_source import LinesOf
from manyheads.data.lines import read_blocks
from manyheads.decoding.truncation import tell_bad_lines
from manyheads.distributed.place import local_device, refuse_ranks
from manyheads.distributed.sharded_lines import model_identity
from manyheads.errors import ConfigError, DataError, ManyHeadsError

if TYPE_CHECKING:
    from manyheads.decoding.generator import Continuation, Generator

__all__ = ["run"]

_DESCRIPTION = """Go on from a text. The continuation is printed as it is written; --echo prints the prompt first.
Without PROMPT, all of standard input is one; in a terminal you are asked for one after the other, and Ctrl-D ends.
With --lines every line of the input is a prompt and gives a line, in order, or with --json an object.
A model of what is no text goes on from the ids in --input FILE, or from nothing, and writes a file, --output: the ids
as they stood in the files it learned from, or a PNG picture."""

_EXAMPLES = (
    'manyheads generate runs/xl-demo "He opened the door and "',
    'manyheads generate runs/xl-demo "It was " --temperature 0.7 --top-p 0.9 --stop "." --max-new-tokens 400',
    "manyheads generate runs/xl-demo --lines --input prompts.txt --json --output texts.jsonl",
    "manyheads generate runs/pictures --output picture.png",
)
_MOST_PROMPT_CHARS = 100_000_000


OPTIONS = (GenerateOptions,)


def run(arguments: Sequence[str]) -> int:
    """Generate. Returns: the exit code."""
    set_up_machine()
    options = parse(GenerateOptions, arguments, command="generate", description=_DESCRIPTION, examples=_EXAMPLES)
    overrides = options.overrides()
    if options.prompt is not None and (options.lines or options.input != "-"):
        raise ConfigError("A prompt is given, and --lines or --input besides, which name others; give one of them.")
    refuse_same_file(options.output, options.input)
    if not options.lines:
        refuse_ranks("generate without --lines")
    from manyheads.decoding.generator import Generator
    from manyheads.text.id_vocabulary import IdVocabulary

    options.run_on.announce()
    generator = Generator.from_pretrained(
        options.model,
        local_device(options.run_on.device),
        options.run_on.fixed_precision(),
        compile_steps=options.run_on.compile,
    )
    settings = generator.options(**overrides)
    if isinstance(generator.vocabulary, IdVocabulary):
        from manyheads.cli.commands.generate_ids import generate_ids

        return generate_ids(generator, generator.vocabulary, overrides, options)
    if options.verbose:
        print(f"{options.model} on {generator.device}, {generator.precision}: {settings}", file=sys.stderr)
    check = OutputCheck(
        "texts",
        learn_more=f"train it longer or on more data; {program()} info {options.model} shows how it was trained.",
        forbid="Draw instead of --greedy, or give --repetition-penalty 1.2 or --no-repeat-ngram-size 4.",
    )
    if options.lines:
        return _each_line(generator, overrides, options, check)
    if options.prompt is None and options.input == "-" and sys.stdin is not None and sys.stdin.isatty():
        return _converse(generator, overrides, options, check)
    prompt = options.prompt if options.prompt is not None else _whole(options.input)
    with LineWriter(options.output) as writer:
        _write_one(generator, prompt, 0, overrides, options, writer, check)
    check.tell()
    return 0


def _whole(name: str) -> str:
    """All of a file as one prompt, without the line break at its end."""
    lines: list[str] = []
    size = 0
    for block in read_blocks(name, 1024):
        lines += block
        size += sum(map(len, block))
        if size > _MOST_PROMPT_CHARS:
            raise DataError(f"{name} is longer than {_MOST_PROMPT_CHARS:,} characters, too long for one prompt.")
    return "\n".join(lines)


def _write_one(
    generator: Generator,
    prompt: str,
    number: int,
    overrides: dict[str, Any],
    options: GenerateOptions,
    writer: LineWriter,
    check: OutputCheck,
) -> None:
    """The continuations of one prompt, the first as it is written where it is the only one."""
    started = time.perf_counter()
    if options.json or overrides["num_return_sequences"] > 1:
        [found] = generator.continuations([prompt], first=number, **overrides)
        writer.write(_shown(number + 1, prompt, found, generator, options, check))
    else:
        written: list[str] = []
        pieces = kept(generator.stream(prompt, number=number, **overrides), written)
        writer.write_pieces(chain([prompt] if options.echo else [], pieces))
        check.see_text(number + 1, prompt, "".join(written), may_be_empty=bool(options.stop))
    if options.verbose:
        print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)


def _each_line(generator: Generator, overrides: dict[str, Any], options: GenerateOptions, check: OutputCheck) -> int:
    """A continuation for every line."""
    settings = generator.options(**overrides)

    def work(first: int, prompts: list[str]) -> Iterator[str]:
        found = generator.continuations(prompts, first=first, **overrides)
        for number, (prompt, one) in enumerate(zip(prompts, found, strict=True), first + 1):
            yield from _shown(number, prompt, one, generator, options, check, in_line=True)

    def identity() -> dict[str, Any]:
        return {
            "command": "generate",
            "model": model_identity(options.model),
            "settings": asdict(settings),
            "form": (options.json, options.echo, options.on_bad_utf8),
            "precision": generator.precision,
            "compiled": options.run_on.compile,
        }

    source = LinesOf(options.input, settings.max_rows, options.on_bad_utf8)
    if run_lines(source, work, output=options.output, identity=identity):
        tell_bad_lines(source.report)
    check.tell()
    return 0


def _shown(
    number: int,
    prompt: str,
    found: list[Continuation],
    generator: Generator,
    options: GenerateOptions,
    check: OutputCheck,
    in_line: bool = False,
) -> list[str]:
    """The output lines of one prompt."""
    for one in found:
        check.see_text(number, prompt, one.text, may_be_empty=bool(options.stop))
    if options.json:
        continuations = [
            {
                "text": one.text,
                "ended_by": one.ended_by,
                "log_prob": sum(one.log_probs),
                "tokens": generator.vocabulary.tokens(one.ids),
                "token_log_probs": one.log_probs,
            }
            for one in found
        ]
        return [json.dumps({"line": number, "prompt": prompt, "continuations": continuations}, ensure_ascii=False)]
    texts = [(prompt if options.echo else "") + one.text for one in found]
    if in_line:
        return [text.replace("\n", " ") for text in texts]
    lines: list[str] = []
    for place, text in enumerate(texts):
        lines += ["---", text] if place else [text]
    return lines


def _converse(generator: Generator, overrides: dict[str, Any], options: GenerateOptions, check: OutputCheck) -> int:
    """A prompt after the other until the end of the input. What cannot be done is reported, and no end."""
    in_terminal = sys.stdout is not None and sys.stdout.isatty()
    if in_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (the arrow keys of input())
    print("Type a beginning and Enter; Ctrl-D ends.", file=sys.stderr)
    with LineWriter(options.output) as writer:
        for number in count():
            try:
                if not in_terminal:
                    print("> ", end="", file=sys.stderr, flush=True)
                prompt = input("> " if in_terminal else "")
            except EOFError:
                print(file=sys.stderr)
                break
            except UnicodeDecodeError as error:
                print(f"manyheads: what was typed is not in the terminal's encoding: {error.reason}.", file=sys.stderr)
                continue
            try:
                _write_one(generator, prompt, number, overrides, options, writer, check)
                check.tell()
            except ManyHeadsError as error:
                print(f"manyheads: {error}", file=sys.stderr)
    return 0
