"""Options of `manyheads inspect`: those that several kinds have, and those of kinds with many of their own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from manyheads.cli.process import echo
from manyheads.config.checks import between, check
from manyheads.config.options import CommandPage, Shared, argument, group, option
from manyheads.decoding.options import DeviceOptions
from manyheads.errors import ConfigError
from manyheads.nn.smoothing import SmoothingKind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from manyheads.decoding.generator import Generator
    from manyheads.decoding.translator import Translator

PICTURES = ("png", "svg", "pdf")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model, and the text that it reads."""

    model: str = Shared.model()
    text: str = option("What the model reads.", metavar="TEXT")
    run_on: DeviceOptions = group(DeviceOptions)

    def open(self) -> Translator | Generator:
        """Load the model. Raises: see `extras.inspect.attending.open_model`."""
        from manyheads.extras.inspect.attending import open_model

        return open_model(self.model, self.run_on.device, self.run_on.fixed_precision())


def picture_option(default: str, kinds: Sequence[str] = PICTURES) -> Any:
    """The option `--output` of a command that writes pictures."""
    text = f"Files to write; the ends of their names select the format: .{', .'.join(kinds)}."
    return option(text, default=(default,), metavar="FILE ...", default_is=default, aliases=("-o",))


def check_kinds(names: Sequence[str], kinds: Sequence[str] = PICTURES, *, given_by: str = "--output") -> None:
    """Check the names of the files that an option gives.

    Raises: ConfigError: there is no file for `--output`, or one of another kind. MissingExtraError: matplotlib is not
        installed.
    """
    if not names and given_by == "--output":
        raise ConfigError(f"--output names no file; give one that ends in .{', .'.join(kinds)}.")
    for name in names:
        if Path(name).suffix[1:].lower() not in kinds:
            raise ConfigError(f"{given_by} {name}: it must end in .{', .'.join(kinds)}.")
    if any(Path(name).suffix[1:].lower() in PICTURES for name in names):
        from manyheads.extras.inspect.drawings.figure import check_plots

        check_plots()


def write_figure(figure: Figure, names: Sequence[str], *, as_json: bool = False) -> None:
    """Write a figure to each of these files, and print their paths.

    Args: as_json: standard output is JSON, so the paths go to standard error.

    Raises: SaveError: one cannot be written.
    """
    from manyheads.extras.inspect.drawings.figure import save_by_name

    for name in names:
        echo(save_by_name(figure, name), file=sys.stderr if as_json else None)


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


ATTENTION_PAGE = CommandPage(
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


@dataclass(frozen=True, kw_only=True)
class SmoothingOptions:
    """Options of `manyheads inspect smoothing`."""

    smoothing: tuple[float, ...] = option(
        "Smoothing: the probability that is shared among tokens. The last value is also drawn as a "
        "distribution. [0 0.1 0.4]",
        default=(0.0, 0.1, 0.4),
        metavar="X ...",
        default_is="",
    )
    kind: SmoothingKind = option(
        "The tokens that share it: all; all but padding (without_padding); or all but padding and the "
        "correct one (others).",
        default="all",
    )
    vocab_size: int = option("Tokens.", default=5, metavar="N")
    pad_id: int = option("Id of the padding token, which is never a target.", default=0, metavar="N", default_is="0")
    targets: tuple[int, ...] = option(
        "Ids of the correct tokens; padding gives an empty row. [2 1 0 3]",
        default=(2, 1, 0, 3),
        metavar="N ...",
        default_is="",
    )
    output: tuple[str, ...] = picture_option("smoothing.png")


SMOOTHING_PAGE = CommandPage(
    SmoothingOptions,
    """Draw label smoothing ("Attention Is All You Need", sec. 5.4), as the Annotated Transformer plots it:
the target distribution at some positions, and the loss as the probability of the correct token grows.""",
    (
        "manyheads inspect smoothing --smoothing 0 0.1 0.4",
        "manyheads inspect smoothing --kind others --vocab-size 5 --targets 2 1 0 3 3 --output smoothing.svg",
    ),
)


@dataclass(frozen=True, kw_only=True)
class MasksOptions:
    """Options of `manyheads inspect masks`."""

    kinds: tuple[str, ...] = argument(
        "One or more of padding, causal, target (causal and padding), window, memory (of a Transformer-XL) and blocks "
        "(of a Reformer's local layers).",
        default=(),
        metavar="KIND ...",
        default_is="all",
    )
    length: int = option("Positions.", default=8, metavar="N")
    lengths: tuple[int, ...] = option(
        "Number of real tokens of each row, for padding and target.",
        default=(),
        metavar="N ...",
        default_is="all, and 5 of 8",
    )
    left: int = option("Number of keys before a query in the window.", default=2, metavar="N")
    right: int = option("Number of keys after a query in the window.", default=0, metavar="N", default_is="0")
    memory: int = option("Positions of the memory.", default=4, metavar="N")
    block: int = option("Positions of a block.", default=3, metavar="N")
    before: int = option("Number of blocks that a query sees before its own.", default=1, metavar="N")
    after: int = option(
        "Number of blocks that a query sees after its own; with 0, no query sees a later key.",
        default=0,
        metavar="N",
        default_is="0",
    )
    json: bool = Shared.json("Print the masks as JSON.")
    output: tuple[str, ...] = picture_option("masks.png")


MASKS_PAGE = CommandPage(
    MasksOptions,
    """Draw masks, and print them as numbers: each row is a query, each column a key; 1 = may attend. The classes and
layers of the models compute them.""",
    (
        "manyheads inspect masks",
        "manyheads inspect masks padding target --length 10 --lengths 10 7 3",
        "manyheads inspect masks memory blocks --memory 6 --block 4 --json --output masks.svg",
    ),
)


@dataclass(frozen=True, kw_only=True)
class PositionsOptions:
    """Options of `manyheads inspect positions`."""

    model: str | None = Shared.model(None)
    d_model: int | None = option("Width, if no model is given.", metavar="N", default_is="64")
    layout: Literal["interleaved", "halves"] | None = option(
        "Order of sines and cosines if no model is given: interleaved as in the paper, or all sines first.",
        default_is="interleaved",
    )
    length: int = option("Positions.", default=100, metavar="N")
    features: tuple[int, ...] = option(
        "Features drawn as curves.", default=(), metavar="N ...", default_is="four neighbours"
    )
    output: tuple[str, ...] = picture_option("positions.png")

    def __post_init__(self) -> None:
        check(self, "--", between(1, 20_000), "length")
        check(self, "--", between(1, 4096), "d_model")
        if self.model is not None and (self.d_model is not None or self.layout is not None):
            raise ConfigError("--d-model and --layout come from the model; leave them out, or leave out MODEL.")


POSITIONS_PAGE = CommandPage(
    PositionsOptions,
    """Draw position encodings: the table, and some of its features as curves, as in the Annotated Transformer. With
MODEL, those of the model (sinusoidal or trained); without it, sinusoidal ones of a given width.""",
    (
        "manyheads inspect positions --d-model 20 --length 100 --features 4 5 6 7",
        "manyheads inspect positions runs/demo --length 64 --output positions.svg",
    ),
)
