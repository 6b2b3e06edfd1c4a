"""`manyheads inspect masks|segments|positions|schedule|smoothing`: what formulas of the papers say."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

import manyheads
from manyheads.cli.process import echo
from manyheads.config.checks import between, check, not_among
from manyheads.config.options import CommandPage, Shared, argument, given_options, option
from manyheads.errors import ConfigError
from manyheads.extras.inspect.options import check_kinds, inspect_command, picture_option, write_figure
from manyheads.files.verify import json_text
from manyheads.nn.smoothing import SmoothingKind, spread

_MOST_POSITIONS = 512
_MOST_ROWS = 16
_KINDS_OF_SIZES = {
    "--lengths": ("padding", "target"),
    **dict.fromkeys(("--left", "--right"), ("window",)),
    "--memory": ("memory",),
    **dict.fromkeys(("--block", "--before", "--after"), ("blocks",)),
}
"""The size of an option matters to these kinds only."""


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


_MASKS_PAGE = CommandPage(
    MasksOptions,
    """Draw masks, and print them as numbers: each row is a query, each column a key; 1 = may attend. The classes and
layers of the models compute them.""",
    (
        "manyheads inspect masks",
        "manyheads inspect masks padding target --length 10 --lengths 10 7 3",
        "manyheads inspect masks memory blocks --memory 6 --block 4 --json --output masks.svg",
    ),
)


@inspect_command(_MASKS_PAGE, "masks")
def masks(options: MasksOptions) -> int:
    """Draw and print. Returns: the exit code. Numbers and the paths of pictures go to standard output."""
    check_kinds(options.output)
    check(options, "--", between(1, _MOST_POSITIONS), "length", "block")
    check(options, "--", between(0, _MOST_POSITIONS), "left", "right", "memory", "before", "after")
    lengths = options.lengths or (options.length, max(1, options.length * 5 // 8))
    if len(lengths) > _MOST_ROWS or not all(0 <= real <= options.length for real in lengths):
        raise ConfigError(
            f"--lengths {' '.join(map(str, lengths))}: give at most {_MOST_ROWS} numbers from 0 to --length"
            f" {options.length}."
        )
    from manyheads.extras.inspect.drawings.formulas import MASK_KINDS, MaskSizes, mask_examples

    for kind in options.kinds:
        if kind not in MASK_KINDS:
            raise ConfigError(not_among("there is no mask", kind, MASK_KINDS))
    _check_drawn(options)
    sizes = MaskSizes(
        length=options.length,
        lengths=lengths,
        left=options.left,
        right=options.right,
        memory_len=options.memory,
        chunk_len=options.block,
        before=options.before,
        after=options.after,
    )
    examples = mask_examples(tuple(dict.fromkeys(options.kinds)) or MASK_KINDS, sizes)
    from manyheads.extras.inspect.drawings.formulas import mask_record, mask_text, masks_figure

    figure = masks_figure([(one.title, one.formula, one.allowed, one.num_memory) for one in examples])
    if options.json:
        print(json_text([mask_record(one) for one in examples]))
    else:
        echo("\n\n".join(mask_text(one) for one in examples))
    write_figure(figure, options.output, as_json=options.json)
    return 0


def _check_drawn(options: MasksOptions) -> None:
    """Raises: ConfigError: a size is given of kinds that are not drawn."""
    for name in given_options(options):
        kinds = _KINDS_OF_SIZES.get(name)
        if kinds and options.kinds and not {*kinds} & {*options.kinds}:
            raise ConfigError(
                f"{name} is for masks of the kind {' or '.join(kinds)}, but only {', '.join(options.kinds)} is drawn;"
                f" leave out {name}, or name that kind as well."
            )


_MOST_SEGMENTS = 64
_MOST_LAYERS = 16


@dataclass(frozen=True, kw_only=True)
class SegmentsOptions:
    """Options of `manyheads inspect segments`."""

    layers: int = option("Layers.", default=3, metavar="N")
    segment: int = option("Positions of a segment in training.", default=4, metavar="N")
    memory: int = option("Positions of the memory in training.", default=4, metavar="N")
    eval_segment: int = option("Positions of a segment in evaluation.", default=2, metavar="N")
    eval_memory: int = option("Positions of the memory in evaluation.", default=6, metavar="N")
    count: int = option("Segments of training.", default=3, metavar="N")
    json: bool = Shared.json("Print the examples as JSON.")
    output: tuple[str, ...] = picture_option("segments.png")


_SEGMENTS_PAGE = CommandPage(
    SegmentsOptions,
    """Draw what the last output of a language model depends on, without and with memory, in training and in evaluation
("Transformer-XL", figures 1 and 2), and print it: # is read for the last output, a bar begins a segment.""",
    (
        "manyheads inspect segments",
        "manyheads inspect segments --layers 4 --segment 3 --memory 3 --eval-segment 1 --eval-memory 5 --output xl.svg",
    ),
)


@inspect_command(_SEGMENTS_PAGE, "segments")
def segments(options: SegmentsOptions) -> int:
    """Draw and print. Returns: the exit code. Rows and the paths of pictures go to standard output."""
    check_kinds(options.output)
    check(options, "--", between(1, _MOST_LAYERS), "layers")
    check(options, "--", between(1, _MOST_SEGMENTS), "segment", "eval_segment")
    check(options, "--", between(0, _MOST_SEGMENTS), "memory", "eval_memory")
    check(options, "--", between(1, _MOST_SEGMENTS // options.segment), "count")
    from manyheads.extras.inspect.drawings.segments import (
        SegmentSizes,
        segment_examples,
        segment_record,
        segment_text,
        segments_figure,
    )

    sizes = SegmentSizes(
        layers=options.layers,
        segment_len=options.segment,
        memory_len=options.memory,
        eval_segment_len=options.eval_segment,
        eval_memory_len=options.eval_memory,
        segments=options.count,
    )
    examples = segment_examples(sizes)
    figure = segments_figure(examples, options.layers)
    if options.json:
        print(json_text([segment_record(example, options.layers) for example in examples]))
    else:
        echo("\n\n".join(segment_text(example, options.layers) for example in examples))
    write_figure(figure, options.output, as_json=options.json)
    return 0


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


_POSITIONS_PAGE = CommandPage(
    PositionsOptions,
    """Draw position encodings: the table, and some of its features as curves, as in the Annotated Transformer. With
MODEL, those of the model (sinusoidal or trained); without it, sinusoidal ones of a given width.""",
    (
        "manyheads inspect positions --d-model 20 --length 100 --features 4 5 6 7",
        "manyheads inspect positions runs/demo --length 64 --output positions.svg",
    ),
)


@inspect_command(_POSITIONS_PAGE, "positions")
def positions(options: PositionsOptions) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    check_kinds(options.output)
    from manyheads.extras.inspect.drawings.formulas import first_table, positions_figure, sinusoidal_positions

    if options.model is None:
        shown = sinusoidal_positions(options.length, options.d_model or 64, options.layout or "interleaved")
    else:
        shown = first_table(manyheads.load(options.model), options.model, options.length)
    write_figure(positions_figure(*shown, features=options.features or None), options.output)
    return 0


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Options of `manyheads inspect schedule`."""

    curves: tuple[str, ...] = argument(
        "Presets of `manyheads train`, or a width and its warm-up steps, as 512:4000.",
        default=(),
        metavar="PRESET|WIDTH:STEPS ...",
    )
    d_model: tuple[int, ...] = option(
        "Widths, each with each warm-up, if no curve is named.", default=(), metavar="N ...", default_is="256 512"
    )
    warmup_steps: tuple[int, ...] = option(
        "Warm-up steps, if no curve is named.", default=(), metavar="N ...", default_is="4000 8000"
    )
    steps: int | None = option("Length of the run.", default=None, metavar="N", default_is="the preset's, or 20000")
    output: tuple[str, ...] = picture_option("schedule.png")


_SCHEDULE_PAGE = CommandPage(
    ScheduleOptions,
    """Draw the learning rate over a run: of presets, or the rates of "Attention Is All You Need", sec. 5.3, of the
widths with their warm-up steps that are named, such as 512:4000. Without a name, each width has each warm-up.""",
    (
        "manyheads inspect schedule 512:4000 512:8000 256:4000",
        "manyheads inspect schedule --d-model 256 512 --warmup-steps 4000 8000",
        "manyheads inspect schedule base big --steps 100000 --output rates.svg",
    ),
)


@inspect_command(_SCHEDULE_PAGE, "schedule")
def schedule(options: ScheduleOptions) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    check_kinds(options.output)
    pairs = [_pair(name) for name in options.curves if ":" in name]
    asked = (*options.d_model, *options.warmup_steps, *(number for pair in pairs for number in pair))
    if min((1, *asked, 1 if options.steps is None else options.steps)) < 1:
        raise ConfigError(
            "widths, warm-up steps (--d-model, --warmup-steps, WIDTH:STEPS) and --steps must be at least 1."
        )
    if options.curves and (options.d_model or options.warmup_steps):
        raise ConfigError(
            "--d-model and --warmup-steps are for a picture without named curves; leave them out, or leave out"
            f" {' '.join(options.curves)}."
        )
    from manyheads.extras.inspect.drawings.formulas import rates_of_paper, rates_of_presets, schedule_figure

    if not options.curves:
        pairs = list(product(options.d_model or (256, 512), options.warmup_steps or (4000, 8000)))
    presets = [name for name in options.curves if ":" not in name]
    curves = rates_of_paper(pairs, options.steps) | rates_of_presets(presets, options.steps)
    write_figure(schedule_figure(curves), options.output)
    return 0


def _pair(name: str) -> tuple[int, int]:
    """Raises: ConfigError: it is not two whole numbers with a colon between them."""
    width, _, warmup = name.partition(":")
    if not (width.isascii() and width.isdigit() and warmup.isascii() and warmup.isdigit()):
        raise ConfigError(f"{name} names no curve; write a preset, or a width and its warm-up steps, such as 512:4000.")
    return int(width), int(warmup)


_MOST_SMOOTHING = 1000


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


_SMOOTHING_PAGE = CommandPage(
    SmoothingOptions,
    """Draw label smoothing ("Attention Is All You Need", sec. 5.4), as the Annotated Transformer plots it:
the target distribution at some positions, and the loss as the probability of the correct token grows.""",
    (
        "manyheads inspect smoothing --smoothing 0 0.1 0.4",
        "manyheads inspect smoothing --kind others --vocab-size 5 --targets 2 1 0 3 3 --output smoothing.svg",
    ),
)


@inspect_command(_SMOOTHING_PAGE, "smoothing")
def smoothing(options: SmoothingOptions) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    check_kinds(options.output)
    if not options.smoothing or not all(0 <= share < 1 for share in options.smoothing):
        raise ConfigError(f"--smoothing {options.smoothing}: give shares from 0 to below 1.")
    if not 2 <= options.vocab_size <= _MOST_SMOOTHING:
        raise ConfigError(
            f"--vocab-size is {options.vocab_size}; it must be from 2 to {_MOST_SMOOTHING:,}, because each token is"
            " drawn."
        )
    if not options.targets or not all(0 <= target < options.vocab_size for target in options.targets):
        raise ConfigError(f"--targets {options.targets}: give ids from 0 to below --vocab-size {options.vocab_size}.")
    if not 0 <= options.pad_id < options.vocab_size:
        raise ConfigError(
            f"--pad-id is {options.pad_id}; it must be from 0 to below --vocab-size {options.vocab_size}."
        )
    for share in options.smoothing:
        spread(options.kind, share, options.vocab_size)  # raises its own error
    from manyheads.extras.inspect.drawings.formulas import smoothing_figure

    figure = smoothing_figure(
        options.smoothing, options.targets, vocab_size=options.vocab_size, kind=options.kind, pad_id=options.pad_id
    )
    write_figure(figure, options.output)
    return 0
