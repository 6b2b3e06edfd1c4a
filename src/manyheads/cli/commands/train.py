"""`manyheads train`: a preset, files and single settings make a config; then the loop runs and is watched."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from manyheads.cli.command_line.pages import program
from manyheads.cli.command_line.parsing import read
from manyheads.cli.command_line.train_options import PAGE, TrainOptions, read_arguments, settings_page
from manyheads.cli.machine import set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.files import to_yaml
from manyheads.distributed.launch import start
from manyheads.distributed.place import Place, find_place, refuse_ranks
from manyheads.errors import RankLostError
from manyheads.tasks.presets import SIZED_BY_PRECISION
from manyheads.training.settings import RunConfig

if TYPE_CHECKING:
    from manyheads.distributed.group import Group
    from manyheads.training.record.report import TrainResult

__all__ = ["PAGE", "run", "summary"]


def run(arguments: Sequence[str]) -> int:
    """Train. Returns: 0, or 128 + the number of the signal that stopped the run."""
    if {"-h", "--help"}.intersection(arguments):
        given = read(TrainOptions, arguments)  # to read the settings, too, would take longer than the page
        print(settings_page(given.options.get("preset", "")))
        return 0
    options, config = read_arguments(arguments)
    place = find_place()
    if place.world == 1:
        config = _sized(arguments, options, config, options.resume)
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    set_up_machine()
    if options.fit:
        refuse_ranks("train --fit")
        from manyheads.tasks.runs import planner

        with showing_if_long() as show:
            show("trying steps", 0, 0)
            found = planner(config).describe_largest(options.memory_mib)
        print(found)
        return 0
    if options.dry_run:
        from manyheads.tasks.runs import dry_run

        with showing_if_long() as show:
            show("taking one step", 0, 0)
            trial = dry_run(config, _tell)
        if place.is_main:
            print(trial.describe())
        return 2 if trial.fault else 0
    result = _train(arguments, options, config, place)
    if place.is_main:
        print(summary(result))
    return 0 if result.signal_number is None else 128 + result.signal_number


def _tell(text: str, level: str) -> None:
    print(f"warning: {text}" if level == "warning" else text, file=sys.stderr)


def _sized(
    arguments: Sequence[str], options: TrainOptions, config: RunConfig, resume: str, group: Group | None = None
) -> RunConfig:
    """The settings with the sizes that the preset has for the precision in which this run began, or will begin.

    Args: resume: see `TrainOptions`. group: the ranks of the run, of which the main one decides.
    """
    if options.preset not in SIZED_BY_PRECISION:
        return config
    set_up_machine()
    from manyheads.decoding.device import choose_device
    from manyheads.training.run.precision import resolve_precision, stored_precision
    from manyheads.training.run.run_folder import RunFolder

    def decide() -> str:
        stored = stored_precision(RunFolder(Path(config.run_dir)).checkpoints, resume)
        return stored or resolve_precision(config, choose_device(config.device)).precision

    return read_arguments(arguments, decide() if group is None else group.from_main(decide))[1]


def _train(arguments: Sequence[str], options: TrainOptions, config: RunConfig, place: Place) -> TrainResult:
    """Train in this process, which may be one rank of several: the main one is watched, the others work in silence."""
    # The live display needs no torch, so something is shown while torch is imported.
    from manyheads.cli.watching.training import watching

    # A launcher that starts again runs the same command, which must not throw away the steps done so far.
    resume = "auto" if place.restarts else options.resume
    with watching(quiet=options.quiet, verbose=options.verbose) if place.is_main else nullcontext() as reporter:
        from manyheads.decoding.device import choose_device
        from manyheads.tasks.runs import train

        group = start(place, choose_device(config.device).type, options.timeout)
        try:
            if place.world > 1:
                config = _sized(arguments, options, config, resume, group)
            if options.verbose and place.is_main:
                print(to_yaml(config), file=sys.stderr)
            result = train(config, resume=resume, reporter=reporter, group=group)
            group.close()
        except RankLostError:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends what is left; first say why
            raise
    return result


def summary(result: TrainResult) -> str:
    """The summary at the end of a run, and the next command."""
    lines = [("run", str(result.run_dir))]
    best = result.best()
    if best is not None:
        lines.append(("best", best))
    if result.plots:
        lines.append(("curve", "  ".join(map(str, result.plots))))
    if result.signal_number is not None:
        name = signal.Signals(result.signal_number).name
        lines.append(("stopped", f"by {name} at step {result.step:,}; the same command goes on from there"))
    if result.model_dir is not None:
        lines.append(("next", f"{program()} {result.next_command.format(run=result.run_dir)}"))
    return "\n".join(f"{name:<8} {text}" for name, text in lines)
