"""`manyheads train`: builds the config from a preset, files and single settings, runs the training loop, and shows its
progress."""

from __future__ import annotations

from collections.abc import Sequence

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
from manyheads.cli.training import largest_steps, planned_layer, train_and_watch, try_step
from manyheads.config.files import to_yaml
from manyheads.distributed.process import refuse_ranks, this_process

__all__ = ["PAGE", "run"]


def run(arguments: Sequence[str]) -> int:
    """Train. Returns: 0, or 128 + the number of the signal that stopped the run."""
    if {"-h", "--help"}.intersection(arguments):
        given = read(TrainOptions, arguments)  # reading the settings as well would take longer than printing the page
        print(settings_page(given.options.get("preset", "")))
        return 0
    process = this_process()
    options, config = read_arguments(arguments, plan=lambda typed: planned_layer(typed, process))
    if process.world == 1:
        config = size_by_precision(arguments, options, config, options.resume)
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    set_up_machine()
    if options.fit:
        refuse_ranks("train --fit")
        say(largest_steps(config, options.memory_mib))
        return 0
    if options.dry_run:
        trial = try_step(config)
        if process.is_main:
            say(trial.describe())
        return 2 if trial.fault else 0
    result = train_and_watch(arguments, options, config, process)
    if process.is_main:
        from manyheads.cli.watching.training import summary

        say(summary(result))
    return 0 if result.signal_number is None else 128 + result.signal_number
