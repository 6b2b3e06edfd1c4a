"""`manyheads inspect heads|pruning MODEL`, `manyheads prune MODEL`: what heads are worth, and a model without some."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.command_line.parsing import command
from manyheads.cli.lines.output import check_model_output
from manyheads.cli.process import echo, say_or_json, set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import CommandPage, Shared, argument, given_options, group, refuse_given
from manyheads.decoding.options import DeviceOptions
from manyheads.extras.inspect.options import (
    CurveOptions,
    HeadTextOptions,
    PruneOptions,
    check_kinds,
    inspect_command,
    picture_option,
    write_figure,
)


@dataclass(frozen=True, kw_only=True)
class HeadsOptions:
    """Options of `manyheads inspect heads`."""

    model: str = argument("A model folder or a run folder: a transformer or a transformer-xl.", metavar="MODEL")
    json: bool = Shared.json("Print a JSON object with the figures of every head.")
    output: tuple[str, ...] = picture_option("heads.png")
    text: HeadTextOptions = group(HeadTextOptions)
    run_on: DeviceOptions = group(DeviceOptions)

    def __post_init__(self) -> None:
        refuse_given({"--seed": "--seed" in given_options(self.text)}, "{} orders heads at random; leave it out.")


_HEADS_PAGE = CommandPage(
    HeadsOptions,
    """Measure every attention head of a model on a text, and draw the figures as maps.
importance: how much the loss changes with the head's factor, per token (Michel et al. 2019).
normalised: the importance divided by the norm of its layer.
ablation: by how many nats per token the loss rises without the head.
entropy: of its attention weights, in bits.
confidence: its largest attention weight.
position: the most frequent distance of the largest weight, and how frequent it is (Voita et al. 2019).""",
    (
        "manyheads inspect heads runs/demo",
        "manyheads inspect heads runs/demo --source test.en --reference test.de --pairs 500 --output heads.svg",
        "manyheads inspect heads runs/xl-demo --split test --json",
    ),
)


@inspect_command(_HEADS_PAGE, "heads")
def heads(options: HeadsOptions) -> int:
    """Judge, print and draw. Returns: the exit code. The table goes to standard output, so do paths without --json."""
    set_up_machine()
    check_kinds(options.output)
    from manyheads.extras.inspect.heads.judging import head_report, heads_figure, open_named_model

    with showing_if_long() as progress:
        named_model = open_named_model(options.model, options.run_on.load)
        named_model.check_options(options.text)
        report = head_report(named_model, named_model.text(options.text), progress)
    rows = report.rows()
    figure = heads_figure(rows, title=f"Heads of {options.model}, on {report.text}")
    record = {"text": report.text, "nats_per_token": report.nats, "heads": rows}
    say_or_json(record, report.table(), as_json=options.json)
    write_figure(figure, options.output, as_json=options.json)
    return 0


@dataclass(frozen=True, kw_only=True)
class PruningOptions(CurveOptions):
    """Options of `manyheads inspect pruning`."""

    json: bool = Shared.json("Print a JSON array of the points.")
    output: tuple[str, ...] = picture_option("pruning.png")
    run_on: DeviceOptions = group(DeviceOptions)


_PRUNING_PAGE = CommandPage(
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


@inspect_command(_PRUNING_PAGE, "pruning")
def pruning(options: PruningOptions) -> int:
    """Prune, measure and draw. Returns: the exit code. Points go to standard output, so do paths without --json."""
    set_up_machine()
    check_kinds(options.output)
    from manyheads.extras.inspect.heads.judging import open_named_model, pruning_figure
    from manyheads.extras.inspect.heads.pruning import pruning_curve

    record = Path(options.record or Path(options.output[0]).with_suffix(".jsonl"))
    with showing_if_long() as progress:
        curve = pruning_curve(open_named_model(options.model, options.run_on.load), options, record, progress)
    figure = pruning_figure(curve.points, note=f"{options.model}, on {curve.text}")
    say_or_json(curve.points, curve.table(), as_json=options.json)
    write_figure(figure, options.output, as_json=options.json)
    return 0


PAGE = CommandPage(
    PruneOptions,
    """Remove attention heads of a model and write a smaller one, which computes what the model computes when
these heads are masked. Each layer keeps at least one head. `manyheads inspect heads MODEL` shows how much each
head matters; `manyheads inspect pruning MODEL` shows the score by the share of removed heads.""",
    (
        "manyheads prune runs/demo --heads encoder.0.self:1,3 decoder.1.cross:0 --output models/pruned",
        "manyheads prune runs/demo --share 0.3 --output models/pruned",
        "manyheads prune runs/xl-demo --share 0.5 --by ablation --output models/pruned-xl",
    ),
)


@command(PAGE, "prune")
def run(options: PruneOptions) -> int:
    """Prune. Returns: the exit code."""
    set_up_machine()
    output = Path(options.output)
    check_model_output(output, options.replace)
    from manyheads.extras.inspect.heads.pruning import least_important, prune_folder

    removed = options.heads
    if options.share is not None:
        with showing_if_long() as progress:
            removed = tuple(least_important(options.model, options.share, options.by, options.text, progress))
    echo(prune_folder(options.model, removed, output, replace=options.replace).describe())
    return 0
