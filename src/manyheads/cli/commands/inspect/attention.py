"""`manyheads inspect attention MODEL --text TEXT`: where each head looks, as a page or as pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.command_line.command import command
from manyheads.cli.command_line.inspect_options import PICTURES, ModelOptions, check_kinds, picture_option
from manyheads.cli.machine import set_up_machine
from manyheads.cli.printing import say
from manyheads.config.checks import between, check
from manyheads.config.options import CommandPage, option
from manyheads.errors import RequestError

__all__ = ["PAGE", "AttentionOptions", "run"]


_MOST_CELLS = 4096


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(ModelOptions):
    """Options of `manyheads inspect attention`."""

    target: str | None = option(
        "The translation that it writes.", default=None, metavar="TEXT", default_is="the model's own"
    )
    output: tuple[str, ...] = picture_option("attention.html", ("html", *PICTURES))
    memory: int | None = option(
        "Tokens at the beginning of the text that a language model with memory has read before.",
        default=None,
        metavar="N",
        default_is="half of the text",
    )
    view: str | None = option(
        "In pictures: encoder, decoder or cross.", default=None, metavar="NAME", default_is="the last"
    )
    layer: int | None = option(
        "In pictures: the layer, counted from 1.", default=None, metavar="N", default_is="the last"
    )
    max_cells: int = option("Rows and columns of a picture; longer texts are thinned.", default=512, metavar="N")


PAGE = CommandPage(
    AttentionOptions,
    """Draw where each head of a model looks as it reads and writes a text. The default is one HTML file that
needs no network: a grid of all heads, a matrix and lines of each, weights under the pointer, and pictures to save.
Files that end in .png, .svg or .pdf show one layer: the mean of its heads, and each of them.""",
    (
        'manyheads inspect attention runs/demo --text "I am hungry."',
        'manyheads inspect attention runs/demo --text "I am hungry." --target "Ich habe Hunger." --output look.html',
        'manyheads inspect attention runs/demo --text "I am hungry." --output a.png a.pdf --view cross --layer 3',
        'manyheads inspect attention runs/xl-demo --text "He opened the door and went in." --memory 10',
    ),
)


@command(PAGE, "inspect attention")
def run(options: AttentionOptions) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    set_up_machine()
    check_kinds(options.output, (*PICTURES, "html"))
    check(options, "--", between(1, _MOST_CELLS), "max_cells")
    from manyheads.decoding.attending import text_views, translation_views
    from manyheads.decoding.generator import Generator
    from manyheads.visualise.attention import view_figure
    from manyheads.visualise.attention_page import write_page
    from manyheads.visualise.figure import save_by_name

    model = options.open()
    if isinstance(model, Generator):
        if options.target is not None:
            raise RequestError(f"{options.model} is a language model, which reads one text; leave --target out.")
        views = text_views(model, options.text, options.memory)
    else:
        if options.memory is not None:
            raise RequestError(f"{options.model} translates and has no memory; leave --memory out.")
        views = translation_views(model, options.text, options.target)
    for name in options.output:
        if name.lower().endswith(".html"):
            say(write_page(views, Path(name), text=options.text, model=options.model, most=options.max_cells))
        else:
            say(save_by_name(view_figure(views, options.view, options.layer, options.max_cells), name))
    return 0
