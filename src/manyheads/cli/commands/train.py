"""The command line of `manyheads train`: its options, and the settings of a run by their dotted names.

`manyheads train`: builds the config from a preset, files and single settings, runs the training loop, and shows its
progress.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from manyheads.catalogue import HOOKS, LOGGERS, PRESETS, RUNS, SIZED_BY_PRECISION, load
from manyheads.cli.command_line.parsing import Given, fill, help_page, option_lines, option_rows, read
from manyheads.cli.process import echo, set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.checks import at_least, check, not_among
from manyheads.config.files import Source, to_yaml
from manyheads.config.options import CommandPage, describe, option
from manyheads.distributed.launch import DEFAULT_TIMEOUT
from manyheads.distributed.process import Process, refuse_ranks, this_process
from manyheads.errors import ConfigError
from manyheads.tasks.settings_resolution import likely_architecture, resolve_run

if TYPE_CHECKING:
    from manyheads.distributed.group import Group
    from manyheads.training.settings import RunConfig


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `manyheads train` besides the settings of the run."""

    preset: str | None = option("Name of a complete run; see below.", None, metavar="NAME")
    architecture: str | None = option(
        "Train this kind of model instead of the one in the preset or the files, with the same sizes. "
        "(--model.architecture does not keep the sizes.)",
        None,
        metavar="NAME",
    )
    config: tuple[str, ...] = option(
        "YAML files of settings. Later files override earlier ones.", (), metavar="FILE ..."
    )
    init: str | None = option(
        "Begin from this model, with its weights, tokenizer and sizes, a new optimiser and a lower learning rate: a"
        " model folder, a run folder, or owner/name on the hub. Prepare the data with `prepare --tokenizer MODEL`. The"
        " same as --initial.model.",
        None,
        metavar="MODEL",
    )
    resume: str = option(
        "Checkpoint to resume from. auto: the newest intact one in the run's folder, if there is one; latest; best; or "
        "the path of a checkpoint. none: begin again (the files of the earlier run are moved to previous-N/).",
        "auto",
        metavar="auto|latest|best|PATH|none",
    )
    minutes: float | None = option(
        "The same as --training.max_minutes. On prepared data without a preset, a file or a model, the settings are "
        "planned for this time.",
        metavar="M",
        default_is="20 for a planned run; otherwise the preset's",
    )
    same_arithmetic: bool = option("The same as --training.same_arithmetic.", False)
    force: bool = option("The same as --training.ignore_memory: train although memory seems too small.", False)
    timeout: float = option(
        "With several ranks (torchrun): a rank that shows no sign of life for this many seconds is "
        "lost, and the other ranks end.",
        DEFAULT_TIMEOUT,
        metavar="S",
    )
    print_config: bool = option("Print the resulting settings as YAML, and end.", False)
    dry_run: bool = option("Show data, shapes, parameters and memory, take one step, save nothing, and end.", False)
    fit: bool = option(
        "Find the largest --data.max-tokens (or lanes, or segment length) whose training on a CPU fits into the free"
        " memory, print the settings, and end.",
        False,
    )
    memory_mib: int | None = option(
        "With --fit: use N MiB of memory.", metavar="N", default_is="nine tenths of the free memory"
    )
    loggers: tuple[str, ...] = option(
        "Log the numbers of metrics.jsonl there, too: csv, tensorboard, wandb, mlflow, trackio, or one of a plug-in. A"
        " resumed run goes on there if the same loggers are given again.",
        (),
        metavar="NAME ...",
    )
    quiet: bool = option("Print only warnings and the result.", False, aliases=("-q",))
    verbose: bool = option("Also print the settings and a line for every logged step.", False, aliases=("-v",))

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise ConfigError("--quiet and --verbose contradict each other; give one of them.")
        if self.memory_mib is not None and not self.fit:
            raise ConfigError(f"--memory-mib {self.memory_mib} needs --fit.")
        check(self, "--", at_least(1), "memory_mib")
        for name in self.loggers:
            if name not in LOGGERS:
                raise ConfigError(not_among("--loggers is", name, LOGGERS))


PAGE = CommandPage(
    TrainOptions,
    "Train a model. Settings come from a preset, then from files, then from single options; later ones override "
    "earlier ones. Without a preset, a file or a model, sizes and schedule are planned for the data, the minutes and "
    "this machine. To continue a stopped run, give the same command again. `manyheads help train WORD` shows the "
    "settings about a word.",
    (
        "manyheads train --preset debug",
        "manyheads train --preset demo --minutes 2 --run-dir runs/short --model.dropout 0.2",
        "manyheads train --data.path data/mine --minutes 10",
        "manyheads train --init runs/demo --data.path data/mine --run-dir runs/mine",
    ),
)


def read_arguments(
    arguments: Sequence[str], precision: str = "bf16", plan: Callable[[Source], Source] | None = None
) -> tuple[TrainOptions, RunConfig]:
    """The options and the config of a command line.

    Args:
        precision: for presets whose sizes depend on it.
        plan: see `tasks.settings_resolution.resolve_run`.

    Raises: ConfigError: unknown options, and all that `tasks.settings_resolution.resolve_run` refuses, in one message.
    """
    given = _read(arguments)
    try:
        options = fill(TrainOptions, given)
    except ConfigError as error:  # continue with the options that are certain, to find further mistakes
        given.mistakes.append(str(error))
        options = TrainOptions(preset=given.options.get("preset"), config=given.options.get("config", ()))
    same_as = {
        ("training", "max_minutes"): options.minutes,
        ("training", "same_arithmetic"): options.same_arithmetic or None,
        ("training", "ignore_memory"): options.force or None,
        ("initial", "model"): options.init,
    }
    for (section, name), value in same_as.items():
        if value is not None:
            given.settings.values.setdefault(section, {})[name] = value
    config = resolve_run(
        given.settings,
        preset=options.preset,
        files=options.config,
        architecture=options.architecture,
        precision=precision,
        resume=options.resume,
        plan=plan,
        mistakes=given.mistakes,
    )
    return options, config


def _read(arguments: Sequence[str]) -> Given:
    """Sort the arguments. The settings of other architectures are imported only if those of the likely one are not all
    that is given, or there is a mistake, for which a name of any of them may be suggested."""
    options = read(TrainOptions, arguments).options
    name = likely_architecture(options.get("preset"), options.get("config", ()))
    given = read(TrainOptions, arguments, (RUNS[name],), architecture=name)
    return read(TrainOptions, arguments, tuple(RUNS.values())) if given.mistakes else given


def size_by_precision(
    arguments: Sequence[str], options: TrainOptions, config: RunConfig, resume: str, group: Group | None = None
) -> RunConfig:
    """The settings again, with the sizes that the preset has for the precision of this run.

    Args: resume: see `TrainOptions`. group: the ranks of the run, of which the main one decides.
    """
    if options.preset not in SIZED_BY_PRECISION:
        return config
    set_up_machine()
    from manyheads.training.run.device import starting_precision

    return read_arguments(arguments, starting_precision(config, resume, group))[1]


def settings_page(preset: str) -> str:
    """The help page of `train`. preset: whose settings are the defaults in it; empty for none."""
    presets = option_lines((name, (make.__doc__ or "").partition("\n")[0]) for name, make in PRESETS.items())
    sections = [("options", option_lines(option_rows(TrainOptions))), ("presets", presets)]
    defaults: RunConfig = PRESETS[preset]() if preset in PRESETS else RUNS[next(iter(RUNS))]()
    chosen = f"preset {preset}" if preset in PRESETS else "without a preset"
    by_section: dict[str, list[tuple[str, str]]] = {}
    for setting in describe(type(defaults), defaults):
        section, dot, _ = setting.path.partition(".")
        # --run-dir, --seed ... are written as the options of commands.
        name = setting.path if dot else setting.path.replace("_", "-")
        is_flag = setting.kind == "true|false" and setting.default == "false"
        default = f" [{setting.default}]" if setting.default not in ("", "null", "false", "[]") else ""
        row = f"--{name}{'' if is_flag else f' {setting.kind}'}", f"{setting.help}{default}"
        by_section.setdefault(section if dot else "run", []).append(row)
    sections += [(f"{name} [defaults {chosen}]", option_lines(rows)) for name, rows in by_section.items()]
    return help_page("manyheads train [OPTIONS] [--SECTION.KEY VALUE ...]", PAGE.description, PAGE.examples, sections)


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
        echo(_largest_steps(config, options.memory_mib))
        return 0
    if options.dry_run:
        synthetic_run = _try_step(config)
        if process.is_main:
            echo(synthetic_run.describe())
        return 2 if synthetic_run.fault else 0
    # The live display needs no torch, so something is shown while torch is imported.
    from manyheads.cli.watching.training import summary, train_and_watch

    result = train_and_watch(
        config,
        options.resume,
        process,
        options.loggers,
        timeout=options.timeout,
        quiet=options.quiet,
        verbose=options.verbose,
        sized=partial(size_by_precision, arguments, options),
    )
    if process.is_main:
        echo(summary(result))
    return 0 if result.signal_number is None else 128 + result.signal_number


def _planned_layer(typed: Source, process: Process) -> Source:
    """Plan a run. Its table goes to standard error, because --print-config needs the other stream.

    Args: typed: the settings of the command line. process: this one, with its rank.

    Returns: the layer of settings below the command line.
    Raises: ConfigError: there are several ranks; see also `extras.planning.plan.plan_layer`.
    """
    if process.world > 1:
        raise ConfigError(
            f"A plan is made by one process, but there are {process.world} ranks; write it to a file with"
            " `manyheads train ... --print-config > plan.yaml`, and give all ranks --config plan.yaml."
        )
    set_up_machine()
    with showing_if_long() as show:
        show("measuring training steps", 0, 0)
        found = load(HOOKS["plan of a run"])(typed)
    echo(found.table, file=sys.stderr)
    layer: Source = found.layer
    return layer


def _largest_steps(config: RunConfig, memory_mib: int | None) -> str:
    """Describe the largest steps that fit into memory; see `Planner.describe_largest`."""
    with showing_if_long() as show:
        show("trying steps", 0, 0)
        return str(load(HOOKS["planner"])(config).describe_largest(memory_mib))


def _try_step(config: RunConfig) -> Any:
    """Compute the first step of a run and save nothing."""
    from manyheads.training.record.log import PlainReporter

    with showing_if_long() as show:
        show("taking one step", 0, 0)
        return load(HOOKS["first step"])(config, PlainReporter(sys.stderr).message)
