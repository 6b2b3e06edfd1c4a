"""`manyheads generate MODEL [PROMPT]`: a language model goes on from a text, as it is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from manyheads.cli.command_line.command import command
from manyheads.cli.command_line.generate_options import PAGE, GenerateOptions
from manyheads.cli.lines.conversation import greet, is_conversation
from manyheads.cli.lines.output import check_files
from manyheads.cli.lines.running import write_lines
from manyheads.cli.machine import set_up_machine
from manyheads.cli.printing import say
from manyheads.distributed.place import refuse_ranks

__all__ = ["PAGE", "run"]


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
