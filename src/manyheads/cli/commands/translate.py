"""`manyheads translate MODEL [INPUT]`: a line in, a line out; a prompt in a terminal."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.catalogue import HOOKS, load
from manyheads.cli.command_line.parsing import command
from manyheads.cli.command_line.translate_options import PAGE, TranslateOptions
from manyheads.cli.lines.conversation import greet, is_conversation
from manyheads.cli.lines.output import check_files, write_lines
from manyheads.cli.process import set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.distributed.sharded_lines import is_sharded
from manyheads.errors import ConfigError
from manyheads.models.hub import is_hub_name, resolve_model_path
from manyheads.tasks.table import task_of_folder

if TYPE_CHECKING:
    from manyheads.cli.lines.translations import TranslationLines

__all__ = ["PAGE", "converse_or_write", "run", "translate"]


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
    from manyheads.cli.lines.translations import TranslationLines
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
