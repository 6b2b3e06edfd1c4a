"""`manyheads classify MODEL [INPUT]`: a line in, a label out; a prompt in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from manyheads.cli.command_line.parsing import parse
from manyheads.cli.lines.conversation import greet, is_conversation
from manyheads.cli.lines.output import check_files
from manyheads.cli.lines.running import write_lines
from manyheads.cli.machine import set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import CommandPage
from manyheads.distributed.sharded_lines import is_sharded
from manyheads.extras.classification.options import ClassifyOptions

__all__ = ["PAGE", "run"]

PAGE = CommandPage(
    ClassifyOptions,
    """Give each line of text the label that a classifier finds most probable: one line in, one line out, in order; an
empty line gives an empty line.
Without INPUT, standard input is read; in a terminal there is a prompt, and Ctrl-D ends it.
With --scores the probability follows after a tab. With --nbest N each input line gives N lines of three columns: line
number (from 1), probability, label.""",
    (
        'echo "Guten Tag!" | manyheads classify runs/languages',
        "manyheads classify runs/languages input.txt --scores --output labels.tsv",
        "manyheads classify runs/languages input.txt --nbest 3",
    ),
)


def run(arguments: Sequence[str]) -> int:
    """Classify lines. Returns: the exit code."""
    set_up_machine()
    options = parse(PAGE, arguments, "classify")
    check_files(options.output, options.input)
    if is_conversation(options.input):
        greet(options.model)
    from manyheads.extras.classification.classifier import Classifier
    from manyheads.extras.classification.lines import LabelLines

    models = options.models.all(options.model)
    lines = LabelLines(options.run_on.load(Classifier.from_pretrained, models), options)
    if is_conversation(options.input) and not is_sharded(options.output):
        lines.converse()
        return 0
    with showing_if_long() as show:
        write_lines(lines.job(show), options.output, show)
    return 0
