"""`manyheads inspect attention|buckets|architecture|embeddings|shapes MODEL`: what a model computes."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from manyheads.cli.process import echo, say_or_json, set_up_machine
from manyheads.config.checks import between, check
from manyheads.config.options import CommandPage, Shared, argument, group, option, refuse_given
from manyheads.decoding.options import DeviceOptions
from manyheads.errors import ConfigError, RequestError
from manyheads.extras.inspect.options import (
    PICTURES,
    ModelOptions,
    check_kinds,
    inspect_command,
    picture_option,
    write_figure,
)
from manyheads.files.verify import json_text

if TYPE_CHECKING:
    from manyheads.extras.inspect.embeddings import EmbeddedWord, NamedEmbeddings, Neighbour
    from manyheads.extras.inspect.tracing import TracedTensor


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


@dataclass(frozen=True, kw_only=True)
class ArchitectureOptions:
    """Options of `manyheads inspect architecture`."""

    model: str = Shared.model()
    json: bool = Shared.json("Print a JSON object with blocks and operations.")
    output: tuple[str, ...] = picture_option("architecture.png")
    operations: tuple[str, ...] = option(
        f"Files for the operations of attention: .{', .'.join(PICTURES)}.",
        default=("operations.png",),
        metavar="FILE ...",
        default_is="operations.png",
    )


_ARCHITECTURE_PAGE = CommandPage(
    ArchitectureOptions,
    """Draw a model in the form of figures 1 and 2 of "Attention is all you need": its blocks from input to output, and
the operations of each kind of its attention. The model is run once; order, sizes, masks, norms and shared matrices are
read from this run.""",
    (
        "manyheads inspect architecture runs/demo",
        "manyheads inspect architecture runs/reformer --output blocks.svg --operations operations.svg",
        "manyheads inspect architecture runs/xl-demo --json",
    ),
)


@inspect_command(_ARCHITECTURE_PAGE, "architecture")
def architecture(options: ArchitectureOptions) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    set_up_machine()
    check_kinds(options.output)
    check_kinds(options.operations, given_by="--operations")
    from manyheads.extras.inspect.blocks import blocks_of
    from manyheads.extras.inspect.drawings.architecture import architecture_figure, operations_figure
    from manyheads.models.pretrained import load

    blocks = blocks_of(load(options.model))
    figure = architecture_figure(blocks, options.model)
    operations = operations_figure(blocks.operations, options.model) if blocks.operations else None
    if options.json:
        print(json_text(asdict(blocks), indent=2))
    write_figure(figure, options.output, as_json=options.json)
    if operations is not None:
        write_figure(operations, options.operations, as_json=options.json)
    return 0


_MOST_WORDS = 50
_MOST_NEIGHBOURS = 50
_MOST_TOKENS = 500


@dataclass(frozen=True, kw_only=True)
class EmbeddingsOptions:
    """Options of `manyheads inspect embeddings`."""

    model: str = Shared.model()
    words: tuple[str, ...] = option(
        "Words whose neighbours are printed and drawn. A word of several tokens is the mean of their vectors.",
        default=(),
        metavar="WORD ...",
        default_is="none",
    )
    ids: tuple[int, ...] = option(
        "The same for tokens, given by their ids.", default=(), metavar="N ...", default_is="none"
    )
    neighbours: int = option("Neighbours of each word.", default=8, metavar="N")
    tokens: int = option(
        "Number of frequent tokens on the map: the first words of the vocabulary.", default=80, metavar="N"
    )
    side: Literal["source", "target"] | None = option(
        "For a translator: the side whose embeddings are used.", default=None, default_is="source"
    )
    json: bool = Shared.json("Print a JSON object with the neighbours and the points of the map.")
    output: tuple[str, ...] = picture_option("embeddings.png")

    def __post_init__(self) -> None:
        check(self, "--", between(1, _MOST_NEIGHBOURS), "neighbours")
        check(self, "--", between(0, _MOST_TOKENS), "tokens")
        if len(self.words) + len(self.ids) > _MOST_WORDS:
            raise ConfigError(
                f"--words and --ids name {len(self.words) + len(self.ids)} words; give at most {_MOST_WORDS}."
            )


_EMBEDDINGS_PAGE = CommandPage(
    EmbeddingsOptions,
    """Print the tokens whose embeddings have the highest cosine similarity with those of the given words. Draw a map of
words, neighbours and frequent tokens by their first two principal components. The embeddings are those that the layers
receive: in a Transformer-XL with adaptive widths, after the projection.""",
    (
        "manyheads inspect embeddings runs/demo --words man red walking",
        "manyheads inspect embeddings runs/demo --words Mann --side target --neighbours 20 --output map.svg",
        "manyheads inspect embeddings runs/xl-demo --ids 97 98 --tokens 60 --json",
    ),
)


@inspect_command(_EMBEDDINGS_PAGE, "embeddings")
def embeddings(options: EmbeddingsOptions) -> int:
    """Print and draw. Returns: the exit code. The table and the paths of pictures go to standard output."""
    set_up_machine()
    check_kinds(options.output)
    from manyheads.extras.inspect.embeddings import embedding_map, embedding_map_figure, neighbours_of, open_embeddings

    embeddings = open_embeddings(options.model, options.side)
    words = [*map(embeddings.word, options.words), *map(embeddings.token, options.ids)]
    found = neighbours_of(embeddings, words, options.neighbours)
    points, shares = embedding_map(embeddings, words, found, options.tokens)
    figure = embedding_map_figure(points, shares, title=f"Embeddings of {options.model}: {embeddings.name}")
    if options.json:
        record = {
            "table": embeddings.name,
            "shape": [embeddings.table.num_rows, embeddings.table.width],
            "words": _records(embeddings, words, found),
            "map": {"variance": shares, "points": [asdict(point) for point in points]},
        }
        print(json_text(record, indent=2))
    elif words:
        echo("\n".join(_lines(embeddings, words, found)))
    write_figure(figure, options.output, as_json=options.json)
    return 0


def _records(
    embeddings: NamedEmbeddings, words: Sequence[EmbeddedWord], found: Sequence[Sequence[Neighbour]]
) -> list[dict[str, object]]:
    return [
        {
            "word": word.text,
            "tokens": word.pieces,
            "ids": word.ids,
            "neighbours": [{"token": embeddings.label(one.id), "id": one.id, "cosine": one.cosine} for one in near],
        }
        for word, near in zip(words, found, strict=True)
    ]


def _lines(
    embeddings: NamedEmbeddings, words: Sequence[EmbeddedWord], found: Sequence[Sequence[Neighbour]]
) -> list[str]:
    """Return one line per word: its neighbours and their cosines."""
    from manyheads.extras.inspect.drawings.attention import shown_token

    lines = []
    for word, near in zip(words, found, strict=True):
        pieces = " ".join(map(shown_token, word.pieces))
        name = shown_token(word.text) + (f" (mean of {pieces})" if len(word.pieces) > 1 else "")
        lines.append(
            name + ": " + "  ".join(f"{shown_token(embeddings.label(one.id))} {one.cosine:.2f}" for one in near)
        )
    return lines


@dataclass(frozen=True, kw_only=True)
class ShapesOptions:
    """Options of `manyheads inspect shapes`."""

    model: str = argument(
        "A model folder, a run folder, or owner/name on the Hugging Face hub; or a module of the package with its"
        ' arguments, such as "nn.MultiHeadAttention(512, 8)".',
        metavar="MODEL",
    )
    text: str | None = option("What the model reads.", metavar="TEXT", default_is="needed for a model")
    target: str | None = option(
        "The translation; without it, the model's own.", default=None, metavar="TEXT", default_is="the model's own"
    )
    inputs: tuple[str, ...] = option(
        "What a module is called with: the shape of random numbers (2x4x100), or numbers in brackets ([3, 2]); with"
        " NAME= before it by name.",
        default=(),
        metavar="INPUT ...",
    )
    every_layer: bool = option("Print all layers, also those that repeat an earlier layer.", default=False)
    json: bool = Shared.json("Print a JSON array of objects with module, name, shape and equation.")
    run_on: DeviceOptions = group(DeviceOptions)

    @property
    def is_module(self) -> bool:
        """Whether MODEL is a call, not a model."""
        return self.model.endswith(")") and not Path(self.model).exists()

    def __post_init__(self) -> None:
        if self.is_module and (self.text is not None or self.target is not None or not self.inputs):
            raise ConfigError(f"{self.model} is one module: give --inputs, and neither --text nor --target.")
        if not self.is_module and (self.text is None or self.inputs):
            raise ConfigError(f"{self.model} is a model: give --text, and no --inputs, which are for one module.")


_SHAPES_PAGE = CommandPage(
    ShapesOptions,
    """Print every tensor that a model computes for a text, from input to output: the module, the name, the shape and
the equation. A layer that repeats an earlier one of its stack is summarised in one line. With a module and --inputs,
print what one call of this module computes, step by step.""",
    (
        'manyheads inspect shapes runs/demo --text "I am hungry."',
        'manyheads inspect shapes runs/xl-demo --text "He opened the door." --every-layer',
        'manyheads inspect shapes "nn.MultiHeadAttention(512, 8)" --inputs 2x10x512 2x7x512',
    ),
)


@inspect_command(_SHAPES_PAGE, "shapes")
def shapes(options: ShapesOptions) -> int:
    """Print the table. Returns: the exit code."""
    set_up_machine()
    from manyheads.extras.inspect.tracing import folded, table

    lines = _of_module(options) if options.is_module else _of_model(options)
    if not options.every_layer:
        lines = folded(lines)
    say_or_json([asdict(line) for line in lines], "\n".join(table(lines)), as_json=options.json)
    return 0


def _of_model(options: ShapesOptions) -> list[TracedTensor]:
    from manyheads.extras.inspect.attending import shapes_of

    assert options.text is not None
    one = ModelOptions(model=options.model, text=options.text, run_on=options.run_on)
    return shapes_of(one.open(), options.text, options.target)


def _of_module(options: ShapesOptions) -> list[TracedTensor]:
    from manyheads.extras.inspect.tracing import trace_call

    module = module_of(options.model)
    given = [_tensor(*_parted(one)) for one in options.inputs]
    try:
        return trace_call(
            module.eval(), *(x for name, x in given if not name), **{name: x for name, x in given if name}
        )
    except (RuntimeError, TypeError, IndexError, ValueError, AttributeError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(
            f"{options.model} cannot be called with --inputs {' '.join(options.inputs)}: {error}"
        ) from error


def module_of(call: str) -> Any:
    """Return a new module for a call with plain numbers, such as "nn.MultiHeadAttention(512, 8, dropout=0.1)".

    Only names below the package `manyheads` are looked up, and nothing but the class is called.

    Raises: ConfigError: it is no such call, there is no such module, or it refuses the arguments.
    """
    from torch import nn

    found = re.fullmatch(r"((?:[a-z]\w*\.)*[a-z]\w*)\.([A-Z]\w*)\(.*\)", call, re.DOTALL)
    try:
        parsed = ast.parse(call, mode="eval").body
        assert isinstance(parsed, ast.Call)
        given = [ast.literal_eval(value) for value in parsed.args]
        named = {str(one.arg): ast.literal_eval(one.value) for one in parsed.keywords}
        assert found is not None
    except (SyntaxError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"{call} is no module with plain arguments, such as nn.MultiHeadAttention(512, 8, dropout=0.1)."
        ) from error
    try:
        kind = getattr(importlib.import_module(f"manyheads.{found[1]}"), found[2], None)
    except ModuleNotFoundError:
        kind = None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ConfigError(f"manyheads.{found[1]}.{found[2]} is no module of the package; see docs/attention.md.")
    try:
        return kind(*given, **named)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{call} cannot be made: {error}") from error


def _parted(text: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    return (name, rest) if equals else ("", text)


def _tensor(name: str, text: str) -> tuple[str, Any]:
    """Return an input and its name; random numbers are the same in every call of the command."""
    import torch

    if re.fullmatch(r"\d+(x\d+)*", text):
        return name, torch.randn([int(size) for size in text.split("x")], generator=torch.Generator().manual_seed(0))
    try:
        values = ast.literal_eval(text)
        assert isinstance(values, list)
        return name, torch.tensor(values)
    except (SyntaxError, ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"--inputs {text}: give a shape such as 2x4x100, or numbers such as [3, 2].") from error
