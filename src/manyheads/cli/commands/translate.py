"""`manyheads translate MODEL [INPUT]`: a line in, a line out; a prompt in a terminal."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from manyheads.architectures.hub import is_hub_name, resolve_model_path
from manyheads.cli.command_line.command import command
from manyheads.cli.command_line.translate_options import PAGE, TranslateOptions
from manyheads.cli.lines.conversation import greet, is_conversation
from manyheads.cli.lines.output import check_files
from manyheads.cli.lines.running import write_lines
from manyheads.cli.machine import set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.distributed.process import local_device
from manyheads.distributed.sharded_lines import is_sharded
from manyheads.tasks.table import task_of_folder

__all__ = ["PAGE", "run"]


@command(PAGE, "translate")
def run(options: TranslateOptions) -> int:
    """Translate lines or a document. Returns: the exit code."""
    set_up_machine()
    check_files(options.output, options.input, options.document.terms)
    if _is_chart_parser(options.model):
        return _parse_by_chart(options)
    document = options.document.read_input(options.input, options.output)
    if document is not None:
        options.check_for_document()
    terms = options.document.read_terms() if document is None else None
    options.check_search()
    options.check_target()
    if is_conversation(options.input):
        greet(options.model)
    options.run_on.announce()
    from manyheads.cli.lines.translations import TranslationLines
    from manyheads.decoding.translator import Translator

    load = partial(Translator.from_pretrained, engine=options.engine)
    translator = options.run_on.load(load, options.models.all(options.model)).into(options.target_lang, "--target-lang")
    translator = options.models.reranked(translator)
    lines = TranslationLines(translator, options, terms)
    if document is not None:
        lines.check_translates_documents()
        document.translate(
            lines.translator,
            options.model,
            options.output,
            lines.overrides,
            lines_at_once=options.lines_at_once,
            others=options.identity(),
        )
    elif is_conversation(options.input) and not is_sharded(options.output):
        lines.converse()
    else:
        with showing_if_long() as show:
            write_lines(lines.job(show), options.output, show)
        lines.tell()
    return 0


def _is_chart_parser(model: str) -> bool:
    """Return whether a model is a chart parser; one on the hub is downloaded to see it."""
    is_on_hub = is_hub_name(model) and not Path(model).exists()
    return task_of_folder(str(resolve_model_path(model)) if is_on_hub else model) == "spans"


def _parse_by_chart(options: TranslateOptions) -> int:
    """Write the trees of a chart parser. Returns: the exit code."""
    from manyheads.extras.parsing.chart_parser import ChartParser
    from manyheads.extras.parsing.lines import TreeLines, check_for_chart

    check_for_chart(options)
    if is_conversation(options.input):
        greet(options.model)
    device, precision = local_device(options.run_on.device), options.run_on.fixed_precision()
    models = options.models.all(options.model)
    lines = TreeLines(ChartParser.from_pretrained(models, device, precision), options)
    if is_conversation(options.input) and not is_sharded(options.output):
        lines.converse()
        return 0
    with showing_if_long() as show:
        write_lines(lines.job(show), options.output, show)
    return 0
