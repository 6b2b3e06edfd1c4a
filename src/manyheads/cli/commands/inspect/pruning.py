"""`manyheads inspect pruning MODEL`: BLEU by the share of heads that are pruned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.command_line.parsing import parse
from manyheads.cli.commands.inspect.picture_files import check_kinds, picture_option, write_figure
from manyheads.cli.machine import set_up_machine
from manyheads.cli.printing import say
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import CommandPage, argument, group, option
from manyheads.decoding.options import InspectionDeviceOptions
from manyheads.errors import ConfigError
from manyheads.tasks.translation.head_options import PairsOptions

__all__ = ["PAGE", "PruningOptions", "run"]

_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)


@dataclass(frozen=True, kw_only=True)
class PruningOptions:
    """Options of `manyheads inspect pruning`."""

    model: str = argument("A model folder or a run folder of a translator (architecture transformer).", metavar="MODEL")
    keep: tuple[float, ...] = option(
        "Shares of the heads that are kept, from 0 to 1.", default=_SHARES, metavar="X ...", default_is="1 0.9 ... 0"
    )
    bleu_pairs: int = option("Pairs of the test data on which BLEU is measured.", default=1000, metavar="N")
    record: str | None = option(
        "JSON Lines with the points; those that it has are not computed again.",
        default=None,
        metavar="FILE",
        default_is="the picture's name with .jsonl",
    )
    json: bool = option("Print a JSON array of the points.", default=False)
    output: tuple[str, ...] = picture_option("pruning.png")
    text: PairsOptions = group(PairsOptions)
    run_on: InspectionDeviceOptions = group(InspectionDeviceOptions)


PAGE = CommandPage(
    PruningOptions,
    """Prune more and more heads of a translator, the least important first, and draw BLEU against the share
of pruned heads (Michel et al. 2019, figure 3). Importance is measured on the validation data, BLEU on the test data;
with --source and --reference both on these. Each point is stored at once: the same command goes on where it was
stopped.""",
    (
        "manyheads inspect pruning runs/demo",
        "manyheads inspect pruning runs/demo --keep 1 0.75 0.5 0.25 0 --bleu-pairs 200 --output pruning.svg",
    ),
)


def run(arguments: Sequence[str]) -> int:
    """Prune, translate and draw. Returns: the exit code. Points and the paths of pictures go to standard output."""
    set_up_machine()
    options = parse(PAGE, arguments, "inspect pruning")
    check_kinds(options.output)
    if options.bleu_pairs < 1:
        raise ConfigError(f"--bleu-pairs is {options.bleu_pairs}; it must be at least 1.")
    from dataclasses import replace

    from manyheads.tasks.translation.heads import pairs_of, pruning_curve, translator_of
    from manyheads.visualise.heads import pruning_figure

    pairs = pairs_of(options.text, options.model)
    judged = pairs_of(replace(options.text, pairs=options.bleu_pairs), options.model, "test")
    record = Path(options.record or Path(options.output[0]).with_suffix(".jsonl"))
    with showing_if_long() as show:
        translator = translator_of(options.model, options.run_on.load)
        points = pruning_curve(translator, options.model, pairs, judged, options.keep, record, show)
    figure = pruning_figure(points)
    if options.json:
        say(json.dumps(points, indent=2))
    else:
        lines = ["heads   kept   parameters   BLEU"]
        lines += [
            f"{point['num_heads']:>5}  {100 * point['share']:>4.0f}%  {point['parameters']:>11,}  {point['bleu']:>5.2f}"
            for point in points
        ]
        say("\n".join(lines))
    write_figure(figure, options.output)
    return 0
