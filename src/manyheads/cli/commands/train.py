"""`manyheads train`: builds the config from a preset, files and single settings, runs the training loop, and shows its
progress."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from manyheads.cli.command_line.parsing import read
from manyheads.cli.command_line.train_options import (
    PAGE,
    TrainOptions,
    read_arguments,
    settings_page,
    size_by_precision,
)
from manyheads.cli.machine import set_up_machine
from manyheads.cli.printing import say
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.files import Source, to_yaml
from manyheads.distributed.launch import start
from manyheads.distributed.process import Process, refuse_ranks, this_process
from manyheads.errors import ConfigError, RankLostError
from manyheads.training.settings import RunConfig

if TYPE_CHECKING:
    from manyheads.training.plan.first_step import FirstStep
    from manyheads.training.record.report import TrainResult

__all__ = ["PAGE", "run", "train_and_watch"]


def run(arguments: Sequence[str]) -> int:
    """Train. Returns: 0, or 128 + the number of the signal that stopped the run."""
    if {"-h", "--help"}.intersection(arguments):
        given = read(TrainOptions, arguments)  # reading the settings as well would take longer than printing the page
        print(settings_page(given.options.get("preset", "")))
        return 0
    process = this_process()
    options, config = read_arguments(arguments, plan=lambda typed: _planned_layer(typed, process))
    if process.world == 1:
        config = size_by_precision(arguments, options, config, options.resume)
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    set_up_machine()
    if options.fit:
        refuse_ranks("train --fit")
        say(_largest_steps(config, options.memory_mib))
        return 0
    if options.dry_run:
        trial = _try_step(config)
        if process.is_main:
            say(trial.describe())
        return 2 if trial.fault else 0
    result = train_and_watch(arguments, options, config, process)
    if process.is_main:
        from manyheads.cli.watching.training import summary

        say(summary(result))
    return 0 if result.signal_number is None else 128 + result.signal_number


def _planned_layer(typed: Source, process: Process) -> Source:
    """Plan a run. Its table goes to standard error, because --print-config needs the other stream.

    Args: typed: the settings of the command line. process: this one, with its rank.

    Returns: the layer of settings below the command line.
    Raises: ConfigError: there are several ranks; see also `tasks.planned.plan_layer`.
    """
    if process.world > 1:
        raise ConfigError(
            f"A plan is made by one process, but there are {process.world} ranks; write it to a file with"
            " `manyheads train ... --print-config > plan.yaml`, and give all ranks --config plan.yaml."
        )
    set_up_machine()
    from manyheads.tasks.planned import plan_layer

    with showing_if_long() as show:
        show("measuring training steps", 0, 0)
        found = plan_layer(typed)
    say(found.table, file=sys.stderr)
    return found.layer


def _largest_steps(config: RunConfig, memory_mib: int | None) -> str:
    """Describe the largest steps that fit into memory; see `Planner.describe_largest`."""
    from manyheads.training.plan.planner import Planner

    with showing_if_long() as show:
        show("trying steps", 0, 0)
        return Planner(config).describe_largest(memory_mib)


def _try_step(config: RunConfig) -> FirstStep:
    """Compute the first step of a run and save nothing."""
    from manyheads.training.plan.first_step import first_step
    from manyheads.training.record.log import PlainReporter

    with showing_if_long() as show:
        show("taking one step", 0, 0)
        return first_step(config, PlainReporter(sys.stderr).message)


def train_and_watch(
    arguments: Sequence[str], options: TrainOptions, config: RunConfig, process: Process
) -> TrainResult:
    """Train in this process, which may be one of several ranks: only the main rank shows its progress."""
    # The live display needs no torch, so something is shown while torch is imported.
    from manyheads.cli.watching.training import watching

    with watching(quiet=options.quiet, verbose=options.verbose) if process.is_main else nullcontext() as reporter:
        from manyheads.checkpoint.retain import list_checkpoints
        from manyheads.decoding.device import choose_device
        from manyheads.training.run.loop import train

        # A launcher that starts again runs the same command, which must not throw away the steps done so far.
        own = list_checkpoints(Path(config.run_dir) / "checkpoints") if process.restarts else []
        resume = "auto" if process.restarts and (own or options.resume == "none") else options.resume
        group = start(process, choose_device(config.device).type, options.timeout)
        try:
            if process.world > 1:
                config = size_by_precision(arguments, options, config, resume, group)
            if options.verbose and process.is_main:
                print(to_yaml(config), file=sys.stderr)
            result = train(config, resume=resume, reporter=reporter, group=group)
            group.close()
        except RankLostError:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # report the reason before the launcher ends the others
            raise
    return result
