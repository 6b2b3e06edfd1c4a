"""`manyheads inspect attention MODEL --text TEXT`: the attention weights of each head, as a page or as pictures."""

from __future__ import annotations

from pathlib import Path

from manyheads.cli.command_line.parsing import command
from manyheads.cli.process import echo, set_up_machine
from manyheads.config.checks import between, check
from manyheads.config.options import refuse_given
from manyheads.errors import RequestError
from manyheads.extras.inspect.options import ATTENTION_PAGE as PAGE
from manyheads.extras.inspect.options import PICTURES, AttentionOptions, check_kinds

__all__ = ["PAGE", "run"]


_MOST_CELLS = 4096


@command(PAGE, "inspect attention")
def run(options: AttentionOptions) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    set_up_machine()
    check_kinds(options.output, (*PICTURES, "html"))
    check(options, "--", between(1, _MOST_CELLS), "max_cells")
    if all(name.lower().endswith(".html") for name in options.output):
        refuse_given(
            {"--view": options.view is not None, "--layer": options.layer is not None},
            f"{{}}: this is for pictures, but {' and '.join(options.output)} shows all; name a .png, .svg or .pdf by"
            " --output, or leave it out.",
        )
    from manyheads.extras.inspect.attending import text_views, translation_views
    from manyheads.extras.inspect.drawings.attention import view_figure
    from manyheads.extras.inspect.drawings.figure import save_by_name
    from manyheads.extras.inspect.drawings.pages import write_page

    model = options.open()
    if model.task == "language-modelling":
        if options.target is not None:
            raise RequestError(f"{options.model} is a language model, which reads one text; leave --target out.")
        views = text_views(model, options.text, options.memory)
    else:
        if options.memory is not None:
            raise RequestError(f"{options.model} translates and has no memory; leave --memory out.")
        views = translation_views(model, options.text, options.target)
    for name in options.output:
        if name.lower().endswith(".html"):
            echo(write_page(views, Path(name), text=options.text, model=options.model, most=options.max_cells))
        else:
            echo(save_by_name(view_figure(views, options.view, options.layer, options.max_cells), name))
    return 0
