"""`manyheads train`: a preset, files and single settings make a config; then the loop runs and is watched."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
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
from manyheads.distributed.place import Place, find_place, refuse_ranks
from manyheads.errors import ConfigError, RankLostError
from manyheads.training.settings import RunConfig

if TYPE_CHECKING:
    from manyheads.training.record.report import TrainResult

__all__ = ["PAGE", "run"]


def run(arguments: Sequence[str]) -> int:
    """Train. Returns: 0, or 128 + the number of the signal that stopped the run."""
    if {"-h", "--help"}.intersection(arguments):
        given = read(TrainOptions, arguments)  # to read the settings, too, would take longer than the page
        print(settings_page(given.options.get("preset", "")))
        return 0
    place = find_place()
    options, config = read_arguments(arguments, plan=lambda typed: _plan(typed, place))
    if place.world == 1:
        config = size_by_precision(arguments, options, config, options.resume)
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
        say(found)
        return 0
    if options.dry_run:
        from manyheads.tasks.runs import dry_run
        from manyheads.training.record.log import PlainReporter

        with showing_if_long() as show:
            show("taking one step", 0, 0)
            trial = dry_run(config, PlainReporter(sys.stderr).message)
        if place.is_main:
            say(trial.describe())
        return 2 if trial.fault else 0
    result = _train(arguments, options, config, place)
    if place.is_main:
        from manyheads.cli.watching.training import summary

        say(summary(result))
    return 0 if result.signal_number is None else 128 + result.signal_number


def _plan(typed: Source, place: Place) -> Source:
    """The layer of a planned run; its table goes to standard error, since --print-config needs the other stream.

    Raises: ConfigError: several ranks would measure different rates; or see `tasks.planned.plan_layer`.
    """
    if place.world > 1:
        raise ConfigError(
            f"A plan is made by one process, but there are {place.world} ranks; write it to a file with"
            " `manyheads train ... --print-config > plan.yaml`, and give all ranks --config plan.yaml."
        )
    set_up_machine()
    from manyheads.tasks.planned import plan_layer

    with showing_if_long() as show:
        show("measuring training steps", 0, 0)
        found = plan_layer(typed)
    say(found.table, file=sys.stderr)
    return found.layer


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
                config = size_by_precision(arguments, options, config, resume, group)
            if options.verbose and place.is_main:
                print(to_yaml(config), file=sys.stderr)
            result = train(config, resume=resume, reporter=reporter, group=group)
            group.close()
        except RankLostError:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends what is left; first say why
            raise
    return result
