"""`manyheads inspect schedule`: learning rates over a run."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.cli.command_line.command import command
from manyheads.cli.commands.inspect.picture_files import check_kinds, picture_option, write_figure
from manyheads.config.options import CommandPage, argument, option
from manyheads.config.suggest import did_you_mean
from manyheads.errors import ConfigError

__all__ = ["PAGE", "ScheduleOptions", "run"]


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Options of `manyheads inspect schedule`."""

    presets: tuple[str, ...] = argument("Presets of `manyheads train`.", default=(), metavar="PRESET ...")
    d_model: tuple[int, ...] = option(
        "Widths, where no preset is given.", default=(), metavar="N ...", default_is="256 512"
    )
    warmup_steps: tuple[int, ...] = option(
        "Warm-ups, where no preset is given.", default=(), metavar="N ...", default_is="4000 8000"
    )
    steps: int | None = option("Length of the run.", default=None, metavar="N", default_is="the preset's, or 20000")
    output: tuple[str, ...] = picture_option("schedule.png")


PAGE = CommandPage(
    ScheduleOptions,
    """Draw learning rates over a run. With presets: theirs. Without: the rates of "Attention Is All You
Need", sec. 5.3, for widths and warm-ups, each width with each warm-up.""",
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
    curves = _of_presets(options) if options.presets else _of_paper(options)
    from manyheads.visualise.schedules import schedule_figure

    write_figure(
        schedule_figure(
            {name: rates for name, (_, rates) in curves.items()},
            steps={name: steps for name, (steps, _) in curves.items()},
        ),
        options.output,
    )
    return 0


def _of_paper(options: ScheduleOptions) -> dict[str, tuple[list[int], list[float]]]:
    from manyheads.nn.schedules import noam
    from manyheads.visualise.schedules import thinned_steps

    steps = thinned_steps(options.steps or 20_000)
    return {
        f"width {width}, warm-up {warmup:,}": (
            steps,
            [noam(step, factor=1.0, d_model=width, warmup_steps=warmup) for step in steps],
        )
        for width in options.d_model or (256, 512)
        for warmup in options.warmup_steps or (4000, 8000)
    }


def _of_presets(options: ScheduleOptions) -> dict[str, tuple[list[int], list[float]]]:
    from manyheads.tasks.presets import PRESETS
    from manyheads.training.optim.schedule import learning_rate
    from manyheads.visualise.schedules import thinned_steps

    curves = {}
    for name in options.presets:
        if name not in PRESETS:
            raise ConfigError(f"there is no preset {name!r}.{did_you_mean(name, PRESETS)}")
        config = PRESETS[name]()
        last = options.steps or config.training.max_steps
        if not last:
            raise ConfigError(f"preset {name} has a time limit and no number of steps; give --steps.")
        steps = thinned_steps(last)
        curves[name] = (
            steps,
            [
                learning_rate(
                    config.schedule,
                    peak=config.optimiser.learning_rate,
                    d_model=config.model.d_model,  # type: ignore[attr-defined]  # of every kind of run
                    step=step,
                    progress=step / last,
                )
                for step in steps
            ],
        )
    return curves
