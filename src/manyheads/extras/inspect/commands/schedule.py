"""`manyheads inspect schedule`: learning rates over a run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from manyheads.cli.command_line.parsing import command
from manyheads.config.options import CommandPage, argument, option
from manyheads.errors import ConfigError
from manyheads.extras.inspect.options import check_kinds, picture_option, write_figure


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


PAGE = CommandPage(
    ScheduleOptions,
    """Draw the learning rate over a run: of presets, or the rates of "Attention Is All You Need", sec. 5.3, of the
widths with their warm-up steps that are named, such as 512:4000. Without a name, each width has each warm-up.""",
    (
        "manyheads inspect schedule 512:4000 512:8000 256:4000",
        "manyheads inspect schedule --d-model 256 512 --warmup-steps 4000 8000",
        "manyheads inspect schedule base big --steps 100000 --output rates.svg",
    ),
)


@command(PAGE, "inspect schedule")
def run(options: ScheduleOptions) -> int:
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
