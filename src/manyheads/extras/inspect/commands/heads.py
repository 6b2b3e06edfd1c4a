"""`manyheads inspect heads MODEL`: how much each head matters, and to which positions it attends."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.cli.command_line.parsing import command
from manyheads.cli.process import say_or_json, set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import CommandPage, Shared, argument, given_options, group, refuse_given
from manyheads.decoding.options import DeviceOptions
from manyheads.extras.inspect.heads.options import HeadTextOptions
from manyheads.extras.inspect.options import check_kinds, picture_option, write_figure


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


PAGE = CommandPage(
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


@command(PAGE, "inspect heads")
def run(options: HeadsOptions) -> int:
    """Judge, print and draw. Returns: the exit code. The table goes to standard output, so do paths without --json."""
    set_up_machine()
    check_kinds(options.output)
    from manyheads.extras.inspect.drawings.heads import heads_figure
    from manyheads.extras.inspect.heads.judging import head_report, open_named_model

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
