"""`manyheads inspect attention|buckets MODEL --text TEXT`: weights of each head; a Reformer's buckets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.process import echo, set_up_machine
from manyheads.config.checks import between, check
from manyheads.config.options import CommandPage, option, refuse_given
from manyheads.errors import RequestError
from manyheads.extras.inspect.options import (
    PICTURES,
    ModelOptions,
    check_kinds,
    inspect_command,
    picture_option,
    write_figure,
)

_MOST_CELLS = 4096


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(ModelOptions):
    """Options of `manyheads inspect attention`."""

    target: str | None = option(
        "The translation; without it, the model's own.", metavar="TEXT", default_is="the model's own"
    )
    output: tuple[str, ...] = picture_option("attention.html", ("html", *PICTURES))
    memory: int | None = option(
        "For a language model with memory: number of tokens at the beginning of the text that are in memory.",
        metavar="N",
        default_is="half of the text",
    )
    view: str | None = option(
        "Attention in .png, .svg and .pdf files: encoder, decoder or cross.", metavar="NAME", default_is="the last"
    )
    layer: int | None = option(
        "Layer in .png, .svg and .pdf files, counted from 1.", metavar="N", default_is="the last"
    )
    max_cells: int = option(
        "Maximum number of rows and columns of a picture; of longer texts some tokens are left out.",
        default=512,
        metavar="N",
    )


_ATTENTION_PAGE = CommandPage(
    AttentionOptions,
    """Draw the attention weights of each head of a model for a text. The default output is one HTML file that works
offline. It shows a grid of all heads, a matrix and lines for each head, and the weights under the pointer, and it can
save pictures. Files that end in .png, .svg or .pdf show one layer: the mean of its heads, and each of them.""",
    (
        'manyheads inspect attention runs/demo --text "I am hungry."',
        'manyheads inspect attention runs/demo --text "I am hungry." --target "Ich habe Hunger." --output look.html',
        'manyheads inspect attention runs/demo --text "I am hungry." --output a.png a.pdf --view cross --layer 2',
        'manyheads inspect attention runs/xl-demo --text "He opened the door and went in." --memory 10',
    ),
)


@inspect_command(_ATTENTION_PAGE, "attention")
def attention(options: AttentionOptions) -> int:
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


@dataclass(frozen=True, kw_only=True)
class BucketsOptions(ModelOptions):
    """Options of `manyheads inspect buckets`."""

    layer: int | None = option(
        "Layer, counted from 1 among the layers that hash.",
        default=None,
        metavar="N",
        default_is="the last that hashes",
    )
    head: int = option("Head whose sorted tokens are drawn, counted from 1.", default=1, metavar="N")
    output: tuple[str, ...] = picture_option("buckets.png")


_BUCKETS_PAGE = CommandPage(
    BucketsOptions,
    """Draw the buckets of the tokens of a text in a Reformer's hashed attention, for every head and round. Also draw
the tokens of one head in the order in which they are sorted by bucket, divided into chunks if the model attends by
chunks.""",
    (
        'manyheads inspect buckets runs/reformer --text "He opened the door and went in."',
        'manyheads inspect buckets runs/reformer --text "He opened the door." --layer 2 --head 3 --output buckets.svg',
    ),
)


@inspect_command(_BUCKETS_PAGE, "buckets")
def buckets(options: BucketsOptions) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    set_up_machine()
    check_kinds(options.output)
    from manyheads.extras.inspect.attending import text_buckets
    from manyheads.extras.inspect.drawings.attention import layer_buckets_figure

    model = options.open()
    found, labels = text_buckets(model, options.text)
    settings = model.model.config.lsh  # type: ignore[union-attr]
    write_figure(layer_buckets_figure(found, labels, settings, options.layer, options.head), options.output)
    return 0
