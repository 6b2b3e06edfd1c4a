"""`manyheads inspect segments`: what a language model reads, without and with memory, in training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.cli.command_line.parsing import command
from manyheads.cli.process import echo
from manyheads.config.checks import between, check
from manyheads.config.options import CommandPage, Shared, option
from manyheads.extras.inspect.options import check_kinds, picture_option, write_figure
from manyheads.files.verify import json_text

__all__ = ["PAGE", "run"]

_MOST_POSITIONS = 64
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


PAGE = CommandPage(
    SegmentsOptions,
    """Draw what the last output of a language model depends on, without and with memory, in training and in evaluation
("Transformer-XL", figures 1 and 2), and print it: # is read for the last output, a bar begins a segment.""",
    (
        "manyheads inspect segments",
        "manyheads inspect segments --layers 4 --segment 3 --memory 3 --eval-segment 1 --eval-memory 5 --output xl.svg",
    ),
)


@command(PAGE, "inspect segments")
def run(options: SegmentsOptions) -> int:
    """Draw and print. Returns: the exit code. Rows and the paths of pictures go to standard output."""
    check_kinds(options.output)
    check(options, "--", between(1, _MOST_LAYERS), "layers")
    check(options, "--", between(1, _MOST_POSITIONS), "segment", "eval_segment")
    check(options, "--", between(0, _MOST_POSITIONS), "memory", "eval_memory")
    check(options, "--", between(1, _MOST_POSITIONS // options.segment), "count")
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
