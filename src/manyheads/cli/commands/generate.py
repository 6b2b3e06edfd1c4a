"""`manyheads generate MODEL [PROMPT]`: a language model goes on from a text, as it is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from manyheads.cli.command_line.command import command
from manyheads.cli.command_line.generate_options import GenerateOptions
from manyheads.cli.lines.conversation import greet, is_conversation
from manyheads.cli.lines.output import check_files
from manyheads.cli.lines.running import write_lines
from manyheads.cli.machine import set_up_machine
from manyheads.cli.printing import say
from manyheads.config.options import CommandPage
from manyheads.distributed.place import refuse_ranks

__all__ = ["PAGE", "run"]

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


@command(PAGE, "generate")
def run(options: GenerateOptions) -> int:
    """Generate. Returns: the exit code."""
    set_up_machine()
    check_files(options.output, options.input)
    if not options.lines:
        refuse_ranks("generate without --lines")
    overrides = options.generation.overrides()  # contradictions show before the model is loaded
    if options.prompt is None and is_conversation(options.input):
        greet(options.model)
    options.run_on.announce()
    from manyheads.cli.lines.continuations import ContinuationLines
    from manyheads.decoding.generator import Generator
    from manyheads.text.id_vocabulary import IdVocabulary

    generator = options.run_on.load(Generator.from_pretrained, options.model)
    if isinstance(generator.vocabulary, IdVocabulary):
        options.check_for_ids()
        from manyheads.decoding.id_files import write_continuations

        for record in write_continuations(
            generator,
            generator.vocabulary,
            options.input,
            Path(options.output),
            echo=options.echo,
            overrides=overrides,
        ):
            if options.json:
                print(json.dumps(record))
            else:
                say(f"{record['file']}  {record['ids']:,} ids", file=sys.stderr)
        return 0
    lines = ContinuationLines(generator, options)
    if options.lines:
        write_lines(lines.job(), options.output)
        lines.check.tell()
    elif options.prompt is None and is_conversation(options.input):
        lines.converse()
    else:
        lines.answer_prompt(options.prompt)
    return 0
