"""`manyheads generate MODEL [PROMPT]`: a language model goes on from a text, as it is written."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from manyheads.cli.command_line.generate_options import GenerateOptions
from manyheads.cli.command_line.parsing import parse
from manyheads.cli.lines.continuations import ContinuationLines
from manyheads.cli.lines.conversation import converse, is_conversation
from manyheads.cli.lines.output import LineWriter, refuse_same_file
from manyheads.cli.lines.running import run_lines
from manyheads.cli.machine import set_up_machine
from manyheads.config.options import CommandPage
from manyheads.data.line_source import LinesOf
from manyheads.data.lines import read_blocks
from manyheads.decoding.truncation import tell_bad_lines
from manyheads.distributed.place import refuse_ranks
from manyheads.distributed.sharded_lines import model_identity
from manyheads.errors import DataError

__all__ = ["PAGE", "run"]

_MOST_PROMPT_CHARS = 100_000_000

PAGE = CommandPage(
    GenerateOptions,
    """Go on from a text. The continuation is printed as it is written; --echo prints the prompt first.
Without PROMPT, all of standard input is one; in a terminal you are asked for one after the other, and Ctrl-D ends.
With --lines every line of the input is a prompt and gives a line, in order, or with --json an object.
A model of ids or pictures continues the ids in --input FILE, or begins a new document, and writes a file, --output: ids
in the format of its training files, or a PNG picture.""",
    (
        'manyheads generate runs/xl-demo "He opened the door and "',
        'manyheads generate runs/xl-demo "It was " --temperature 0.7 --top-p 0.9 --stop "." --max-new-tokens 400',
        "manyheads generate runs/xl-demo --lines --input prompts.txt --json --output texts.jsonl",
        "manyheads generate runs/pictures --output picture.png",
    ),
)


def run(arguments: Sequence[str]) -> int:
    """Generate. Returns: the exit code."""
    set_up_machine()
    options = parse(PAGE, arguments, "generate")
    refuse_same_file(options.output, options.input)
    if not options.lines:
        refuse_ranks("generate without --lines")
    overrides = options.generation.overrides()
    from manyheads.decoding.generator import Generator
    from manyheads.text.id_vocabulary import IdVocabulary

    options.run_on.announce()
    generator = options.run_on.load(Generator.from_pretrained, options.model)
    settings = generator.options(**overrides)
    if isinstance(generator.vocabulary, IdVocabulary):
        from manyheads.cli.commands.generate_ids import generate_ids

        return generate_ids(generator, generator.vocabulary, overrides, options)
    if options.verbose:
        print(f"{options.model} on {generator.device}, {generator.precision}: {settings}", file=sys.stderr)
    lines = ContinuationLines(generator, options)
    if options.lines:
        _each_line(lines, options)
        return 0
    with LineWriter(options.output) as writer:
        if options.prompt is None and is_conversation(options.input):
            converse("a beginning", lambda number, prompt: lines.write(writer, number, prompt))
        else:
            lines.write(writer, 0, _whole(options.input) if options.prompt is None else options.prompt)
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


def _each_line(lines: ContinuationLines, options: GenerateOptions) -> None:
    """Continue every line of the input."""
    generator, settings = lines.generator, lines.generator.options(**lines.overrides)

    def work(first: int, prompts: list[str]) -> Iterator[str]:
        found = generator.continuations(prompts, first=first, **lines.overrides)
        for number, (prompt, one) in enumerate(zip(prompts, found, strict=True), first):
            yield from lines.lines(number, prompt, one)

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
    lines.check.tell()
