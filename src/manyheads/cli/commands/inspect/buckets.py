"""`manyheads inspect buckets MODEL --text TEXT`: how a Reformer's hashing sorts a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyheads.cli.command_line.command import command
from manyheads.cli.commands.inspect.picture_files import check_kinds, picture_option, write_figure
from manyheads.cli.machine import set_up_machine
from manyheads.config.options import CommandPage, argument, group, option
from manyheads.decoding.options import InspectionDeviceOptions
from manyheads.errors import RequestError

if TYPE_CHECKING:
    from manyheads.nn.attention.lsh_settings import LSHSettings

__all__ = ["PAGE", "BucketsOptions", "run"]


@dataclass(frozen=True, kw_only=True)
class BucketsOptions:
    """Options of `manyheads inspect buckets`."""

    model: str = argument("A model folder, a run folder, or owner/name on the Hugging Face hub.", metavar="MODEL")
    text: str = option("What the model reads.", metavar="TEXT")
    layer: int | None = option(
        "Which of the layers that hash, counted from 1.", default=None, metavar="N", default_is="the last that hashes"
    )
    head: int = option("The head whose tokens are drawn sorted, counted from 1.", default=1, metavar="N")
    output: tuple[str, ...] = picture_option("buckets.png")
    run_on: InspectionDeviceOptions = group(InspectionDeviceOptions)


PAGE = CommandPage(
    BucketsOptions,
    """Draw into which buckets a Reformer's hashed attention puts the tokens of a text, in every head and
round, and how one head's tokens stand when they are sorted by bucket; cut into chunks, if chunks are what they see.""",
    (
        'manyheads inspect buckets runs/reformer --text "He opened the door and went in."',
        'manyheads inspect buckets runs/reformer --text "He opened the door." --layer 2 --head 3 --output buckets.svg',
    ),
)


@command(PAGE, "inspect buckets")
def run(options: BucketsOptions) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    set_up_machine()
    check_kinds(options.output)
    from manyheads.decoding.attending import open_model, text_buckets
    from manyheads.visualise.buckets import buckets_figure

    model = open_model(options.model, options.run_on.device, options.run_on.fixed_precision())
    found, labels = text_buckets(model, options.text)
    names = list(found)
    layer = len(names) if options.layer is None else options.layer
    if not 1 <= layer <= len(names):
        raise RequestError(f"--layer {layer}: {len(names)} layers hash, which count from 1: {', '.join(names)}.")
    buckets = found[names[layer - 1]]
    if not 1 <= options.head <= len(buckets):
        raise RequestError(f"--head {options.head}: there are heads 1 to {len(buckets)}.")
    lsh: LSHSettings = model.model.config.lsh  # type: ignore[union-attr]
    chunk_len = lsh.chunk_len if lsh.visible == "chunk" else 0
    title = f"Buckets of {names[layer - 1]}"
    figure = buckets_figure(buckets, tokens=labels, chunk_len=chunk_len, head=options.head - 1, title=title)
    write_figure(figure, options.output)
    return 0
