"""`manyheads inspect schedule`: learning rates over a run."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.cli.command_line.parsing import command
from manyheads.config.options import CommandPage, argument, option
from manyheads.errors import ConfigError
from manyheads.extras.inspect.options import check_kinds, picture_option, write_figure


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Options of `manyheads inspect schedule`."""

    presets: tuple[str, ...] = argument("Presets of `manyheads train`.", default=(), metavar="PRESET ...")
    d_model: tuple[int, ...] = option(
        "Widths, if no preset is given.", default=(), metavar="N ...", default_is="256 512"
    )
    warmup_steps: tuple[int, ...] = option(
        "Warm-up steps, if no preset is given.", default=(), metavar="N ...", default_is="4000 8000"
    )
    steps: int | None = option("Length of the run.", default=None, metavar="N", default_is="the preset's, or 20000")
    output: tuple[str, ...] = picture_option("schedule.png")


PAGE = CommandPage(
    ScheduleOptions,
    """Draw the learning rate over a run. With presets, their rates. Without, the rates of "Attention Is All You Need",
sec. 5.3, for each width with each warm-up.""",
    (
        "manyheads inspect schedule --d-model 256 512 --warmup-steps 4000 8000",
        "manyheads inspect schedule base big --steps 100000 --output rates.svg",
    ),
)


@command(PAGE, "inspect schedule")
def run(options: ScheduleOptions) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    check_kinds(options.output)
    if min((1, *options.d_model, *options.warmup_steps, 1 if options.steps is None else options.steps)) < 1:
        raise ConfigError("--d-model, --warmup-steps and --steps must be at least 1.")
    if options.presets and (options.d_model or options.warmup_steps):
        raise ConfigError("--d-model and --warmup-steps come from the preset; leave them out, or leave out PRESET.")
    from manyheads.extras.inspect.drawings.formulas import rates_of_paper, rates_of_presets, schedule_figure

    if options.presets:
        curves = rates_of_presets(options.presets, options.steps)
    else:
        curves = rates_of_paper(options.d_model or (256, 512), options.warmup_steps or (4000, 8000), options.steps)
    write_figure(schedule_figure(curves), options.output)
    return 0
