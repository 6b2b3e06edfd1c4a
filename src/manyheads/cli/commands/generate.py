"""`manyheads generate MODEL [PROMPT]`: a language model continues a text, and the output appears as it is generated."""

from __future__ import annotations

from manyheads.cli.command_line.generate_options import PAGE, GenerateOptions
from manyheads.cli.command_line.parsing import command
from manyheads.cli.lines.conversation import greet, is_conversation
from manyheads.cli.lines.output import check_files, write_lines
from manyheads.cli.process import set_up_machine
from manyheads.distributed.process import refuse_ranks

__all__ = ["PAGE", "run"]


@command(PAGE, "generate")
def run(options: GenerateOptions) -> int:
    """Generate. Returns: the exit code."""
    set_up_machine()
    check_files(options.output, options.input)
    if not options.lines:
        refuse_ranks("generate without --lines")
    options.generation.overrides()  # contradictions show before the model is loaded
    if options.prompt is None and is_conversation(options.input):
        greet(options.model)
    options.run_on.announce()
    from manyheads.cli.lines.continuations import ContinuationLines, write_ids
    from manyheads.decoding.generator import Generator
    from manyheads.text.vocabulary import IdVocabulary

    generator = options.run_on.load(Generator.from_pretrained, options.models.all(options.model))
    if isinstance(generator.vocabulary, IdVocabulary):
        write_ids(generator, generator.vocabulary, options)
        return 0
    lines = ContinuationLines(generator, options)
    if options.lines:
        write_lines(lines.job(), options.output)
        lines.check.report()
    elif options.prompt is None and is_conversation(options.input):
        lines.converse()
    else:
        lines.answer_prompt(options.prompt)
    return 0
