"""`manyheads inspect pruning MODEL`: BLEU or perplexity by the share of heads that are pruned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.command_line.parsing import command
from manyheads.cli.process import say_or_json, set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import CommandPage, Shared, group
from manyheads.decoding.options import DeviceOptions
from manyheads.extras.inspect.heads.options import CurveOptions
from manyheads.extras.inspect.options import check_kinds, picture_option, write_figure


@dataclass(frozen=True, kw_only=True)
class PruningOptions(CurveOptions):
    """Options of `manyheads inspect pruning`."""

    json: bool = Shared.json("Print a JSON array of the points.")
    output: tuple[str, ...] = picture_option("pruning.png")
    run_on: DeviceOptions = group(DeviceOptions)


PAGE = CommandPage(
    PruningOptions,
    """Prune more and more heads of a model, the least important first, and draw BLEU (perplexity for a language model)
against the share of pruned heads (Michel et al. 2019, figure 3). Heads are measured on the validation data and the
score on the test data; if you name a text, both are measured on it. Each point is stored at once, so the same command
continues after an interruption.""",
    (
        "manyheads inspect pruning runs/demo",
        "manyheads inspect pruning runs/demo --by importance random --num-beams 1 --output pruning.svg",
        "manyheads inspect pruning runs/xl-demo --share 0 0.25 0.5 0.75 1",
    ),
)


@command(PAGE, "inspect pruning")
def run(options: PruningOptions) -> int:
    """Prune, measure and draw. Returns: the exit code. Points go to standard output, so do paths without --json."""
    set_up_machine()
    check_kinds(options.output)
    from manyheads.extras.inspect.drawings.heads import pruning_figure
    from manyheads.extras.inspect.heads.judging import open_named_model
    from manyheads.extras.inspect.heads.pruning import pruning_curve

    record = Path(options.record or Path(options.output[0]).with_suffix(".jsonl"))
    with showing_if_long() as progress:
        curve = pruning_curve(open_named_model(options.model, options.run_on.load), options, record, progress)
    figure = pruning_figure(curve.points, note=f"{options.model}, on {curve.text}")
    say_or_json(curve.points, curve.table(), as_json=options.json)
    write_figure(figure, options.output, as_json=options.json)
    return 0
