"""`manyheads train`: a preset, files and single settings make a config; then the loop runs and is watched."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from manyheads.cli.command_line.pages import help_page, option_lines, program
from manyheads.cli.command_line.parsing import fill, option_rows, read
from manyheads.cli.machine import set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.build import resolve
from manyheads.config.describe import describe
from manyheads.config.files import Source, load_yaml, to_plain, to_yaml
from manyheads.config.merge import field_types, tag_of, variants
from manyheads.config.options import option
from manyheads.config.suggest import did_you_mean
from manyheads.distributed.launch import DEFAULT_TIMEOUT, start
from manyheads.distributed.place import Place, find_place, refuse_ranks
from manyheads.errors import ConfigError, RankLostError
from manyheads.tasks.presets import PRESETS, SIZED_BY_PRECISION
from manyheads.tasks.table import RUNS
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.settings import RunConfig

if TYPE_CHECKING:
    from manyheads.distributed.group import Group
    from manyheads.training.record.report import TrainResult

__all__ = ["TrainOptions", "read_arguments", "run", "summary"]

DESCRIPTION = (
    "Train a model. Settings come from a preset, then from files, then from single options; later ones win."
    " The same command again goes on where a stopped run was."
)
EXAMPLES = (
    "manyheads train --preset debug",
    "manyheads train --preset demo --minutes 2 --run-dir runs/short --model.dropout 0.2",
)
T = TypeVar("T")
SEQ2SEQ = "-seq2seq"
SIZES = (
    "d_model",
    "num_heads",
    "head_dim",
    "d_ff",
    "num_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "dropout",
    "attention_dropout",
)
NOTHING = """nothing to train yet. Start from one of the presets,
  manyheads train --preset demo             a translator from embedded sentences, in minutes
or from your own data with the default settings (the Transformer paper's base model),
  manyheads prepare --help                  text files -> data/mine
  manyheads train --data.path data/mine
or from a file of settings,
  manyheads train --config my.yaml
Presets: {presets}. All settings: manyheads train --help."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `manyheads train` besides the settings of the run."""

    preset: str | None = option("A whole run by name, see below.", None, metavar="NAME")
    architecture: str | None = option(
        "Train another kind of model than the preset's or the files', of the same sizes. --model.architecture does not"
        " keep the sizes.",
        None,
        metavar="NAME",
    )
    config: tuple[str, ...] = option(
        "YAML files of settings; of several, later ones win.", (), metavar="FILE ...", repeats=True
    )
    resume: str = option(
        "auto: from the newest intact checkpoint of the run's folder if there is one; latest, best, or the path of a"
        " checkpoint; none: begin again (the earlier run's files move to previous-N/).",
        "auto",
        metavar="auto|latest|best|PATH|none",
    )
    minutes: float | None = option("The same as --training.max_minutes.", None, metavar="M")
    timeout: float = option(
        "With several ranks (torchrun): seconds without a sign of life after which a rank is lost and the others end.",
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
        "With --fit: use N MiB of memory.", None, metavar="N", default_is="nine tenths of the free memory"
    )
    quiet: bool = option("Print warnings and the result only.", False, aliases=("-q",))
    verbose: bool = option("Also print the settings, and keep every logged step in sight.", False, aliases=("-v",))

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise ConfigError("--quiet and --verbose contradict each other; give one of them.")
        if self.memory_mib is not None and not self.fit:
            raise ConfigError(f"--memory-mib {self.memory_mib} needs --fit.")
        if self.memory_mib is not None and self.memory_mib < 1:
            raise ConfigError(f"--memory-mib is {self.memory_mib}; it must be at least 1.")


OPTIONS = (TrainOptions,)


def run(arguments: Sequence[str]) -> int:
    """Train. Returns: 0, or 128 + the number of the signal that stopped the run."""
    if {"-h", "--help"}.intersection(arguments):
        given = read(TrainOptions, arguments)  # to read the settings, too, would take longer than the page
        print(_help(given.options.get("preset", "")))
        return 0
    options, config = read_arguments(arguments)
    place = find_place()
    if place.world == 1:
        config = _sized(arguments, options, config)
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
    if place.world > 1:
        return _run_in_group(arguments, options, config, place)
    if options.verbose:
        print(to_yaml(config), file=sys.stderr)
    # The live display knows nothing of torch, so something is to be seen while torch is imported.
    from manyheads.cli.watching.training import watching

    with watching(quiet=options.quiet, verbose=options.verbose) as reporter:
        from manyheads.tasks.runs import train

        result = train(config, resume=options.resume, reporter=reporter)
    print(summary(result))
    return _exit_code(result)


def _tell(text: str, level: str) -> None:
    print(f"warning: {text}" if level == "warning" else text, file=sys.stderr)


def _sized(
    arguments: Sequence[str], options: TrainOptions, config: RunConfig, resume: str = "", group: Group | None = None
) -> RunConfig:
    """The settings with the sizes that the preset has for the precision in which this run began, or will begin.

    Args: resume: in place of the option. group: the ranks of the run, of which the main one decides.
    """
    if options.preset not in SIZED_BY_PRECISION:
        return config
    set_up_machine()
    from manyheads.decoding.device import choose_device
    from manyheads.training.run.precision import resolve_precision, stored_precision
    from manyheads.training.run.run_folder import RunFolder

    def decide() -> str:
        stored = stored_precision(RunFolder(Path(config.run_dir)).checkpoints, resume or options.resume)
        return stored or resolve_precision(config, choose_device(config.device)).precision

    return read_arguments(arguments, decide() if group is None else group.from_main(decide))[1]


def _run_in_group(arguments: Sequence[str], options: TrainOptions, config: RunConfig, place: Place) -> int:
    """One rank of several: the main one is watched and prints, the others work in silence."""
    from manyheads.cli.watching.training import watching
    from manyheads.decoding.device import choose_device
    from manyheads.tasks.runs import train

    # A launcher that begins again runs the same command; what was reached is not to be thrown away by it.
    resume = "auto" if place.restarts else options.resume
    with nullcontext() if not place.is_main else watching(quiet=options.quiet, verbose=options.verbose) as reporter:
        group = start(place, choose_device(config.device).type, options.timeout)
        try:
            config = _sized(arguments, options, config, resume, group)
            if options.verbose and place.is_main:
                print(to_yaml(config), file=sys.stderr)
            result = train(config, resume=resume, reporter=reporter, group=group)
            group.close()
        except RankLostError:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends what is left; first say why
            raise
    if place.is_main:
        print(summary(result))
    return _exit_code(result)


def _exit_code(result: TrainResult) -> int:
    return 128 + result.signal_number if result.signal_number is not None else 0


def read_arguments(arguments: Sequence[str], precision: str = "bf16") -> tuple[TrainOptions, RunConfig]:
    """The options and the config of a command line.

    Args: precision: for presets whose sizes depend on it.

    Raises: ConfigError: unknown options and presets, files that cannot be read, values of the wrong type or out of
        range; all of them in one message.
    """
    given = read(TrainOptions, arguments, tuple(RUNS.values()))
    mistakes, typed = given.mistakes, given.settings
    options = _noting(mistakes, lambda: fill(TrainOptions, given))
    if options is None:  # go on with what cannot be wrong, to find what else is
        options = TrainOptions(preset=given.options.get("preset"), config=given.options.get("config", ()))
    if options.minutes is not None:
        typed.values.setdefault("training", {})["max_minutes"] = options.minutes
    sources = [*_base(options, typed, precision, mistakes), typed]
    _use_all_of_other_data(sources)
    if options.architecture is not None:
        sources.insert(-1, _of_architecture(options.architecture, sources, mistakes))
    if len(sources) == 1 + bool(options.architecture) and not mistakes and not typed.values.get("data", {}).get("path"):
        raise ConfigError(NOTHING.format(presets=", ".join(PRESETS)))
    kind = _kind_of_run(sources, mistakes)
    # Without its preset or a file, the rest of a run may contain mistakes that the user did not write.
    named = bool(options.preset) + bool(options.architecture) + len(options.config)
    whole = len(sources) == 1 + named or not mistakes
    config = _noting(mistakes, lambda: resolve(kind, sources)) if whole else None
    if mistakes or config is None:
        raise ConfigError("\n".join(mistakes))
    return options, config


def _base(options: TrainOptions, typed: Source, precision: str, mistakes: list[str]) -> list[Source]:
    """The layers below the command line: preset and files, or else the settings of the run that is to go on."""
    sources = []
    if options.preset in PRESETS:
        sized = [precision] if options.preset in SIZED_BY_PRECISION else []
        sources.append(Source(to_plain(PRESETS[options.preset](*sized)), f"preset {options.preset}"))
    elif options.preset is not None:
        near = did_you_mean(options.preset, PRESETS)
        mistakes.append(f"there is no preset {options.preset!r}; there are: {', '.join(PRESETS)}.{near}")
    files = [(Path(name), True) for name in options.config]
    if options.preset is None and not files and isinstance(typed.values.get("run_dir"), str):
        earlier = Path(typed.values["run_dir"]) / "config.yaml"
        files = [(earlier, False)] if earlier.is_file() else []
    for file, typed_by_user in files:
        read = partial(load_yaml, file, may_be_pipe=typed_by_user)
        source = _noting(mistakes, read)
        sources += [source] if source is not None else []
    return sources


def _use_all_of_other_data(sources: Sequence[Source]) -> None:
    """A preset's data.num_train_pairs is about its own data; where another source names other data, all is used."""
    preset, later = sources[0], sources[1:]
    paths = [source.values["data"]["path"] for source in later if "path" in _section(source, "data")]
    if preset.name.startswith("preset ") and paths and paths[-1] != _section(preset, "data").get("path"):
        _section(preset, "data").pop("num_train_pairs", None)


def _of_architecture(name: str, sources: Sequence[Source], mistakes: list[str]) -> Source:
    """The layer that --architecture puts between the base and single settings: the name, and sizes of the base."""
    kinds = {source.values["model"].get("architecture") for source in sources if _is_section(source, "model")}
    paths = [source.values["data"].get("path") for source in sources if _is_section(source, "data")]
    path = next((path for path in reversed(paths) if isinstance(path, str)), "")
    translates = any(RUNS.get(str(kind)) is TrainConfig for kind in kinds)
    translates = translates or (not kinds - {None} and _is_of_pairs(path))
    name = f"{name}{SEQ2SEQ}" if translates and f"{name}{SEQ2SEQ}" in RUNS else name
    if name not in RUNS:
        near = did_you_mean(name, RUNS)
        mistakes.append(f"--architecture is {name!r}; there are: {', '.join(RUNS)}.{near}")
        return Source({}, "--architecture")
    kind: type = RUNS[name]
    config = tag_of(variants(field_types(kind)["model"]))[1][name]
    known: dict[str, Any] = {}
    for source in sources[:-1]:
        known |= source.values["model"] if _is_section(source, "model") else {}
    kept = {size: known[size] for size in SIZES if size in known and size in field_types(config)}
    layer: dict[str, Any] = {"model": {**kept, "architecture": name}}
    if name == "reformer" and any(_is_section(source, "reading") for source in sources[:-1]):
        layer["reading"] = dict.fromkeys(("memory_len", "clamp_len", "same_length"))  # it has no memory to set
    return Source(layer, "--architecture")


def _is_section(source: Source, name: str) -> bool:
    return isinstance(source.values.get(name), dict)


def _section(source: Source, name: str) -> dict[str, Any]:
    """A section's settings; none where it is missing or no section."""
    section = source.values.get(name)
    return section if isinstance(section, dict) else {}


def _is_of_pairs(path: str) -> bool:
    """Whether data of that name is for translators or parsers, as far as can be told without opening it."""
    from manyheads.data.prepared import TATOEBA, prepared_task
    from manyheads.data.preparing import LANGUAGE_TASK

    if path in (TATOEBA, "copy-task"):
        return True
    return (Path(path) / "manifest.json").is_file() and bool(path) and prepared_task(Path(path)) != LANGUAGE_TASK


def _kind_of_run(sources: Sequence[Source], mistakes: list[str]) -> type[RunConfig]:
    """The config class for the sources' model.architecture; a translator's if none is named."""
    named: dict[str, str] = {}
    for source in sources:
        model = source.values.get("model")
        name = model.get("architecture") if isinstance(model, dict) else None
        if isinstance(name, str):
            named.setdefault(name, source.name)
            if name not in RUNS:
                near = did_you_mean(name, RUNS)
                mistakes.append(f"{source.name}: model.architecture is {name!r}; there are: {', '.join(RUNS)}.{near}")
    if len({RUNS[name] for name in named if name in RUNS}) > 1:
        listed = ", ".join(f"{name} by {where}" for name, where in named.items())
        mistakes.append(f"model.architecture is set twice ({listed}), and their runs have other settings; drop one.")
    return RUNS.get(next(iter(named), ""), TrainConfig)


def _noting(mistakes: list[str], make: Callable[[], T]) -> T | None:
    try:
        return make()
    except ConfigError as error:
        mistakes.append(str(error))
        return None


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


def _help(preset: str) -> str:
    """The help page. preset: whose settings are the defaults in it; empty for none."""
    presets = option_lines((name, (make.__doc__ or "").partition("\n")[0]) for name, make in PRESETS.items())
    sections = [("options", option_lines(option_rows(TrainOptions))), ("presets", presets)]
    defaults: RunConfig = PRESETS[preset]() if preset in PRESETS else TrainConfig()
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
    return help_page("manyheads train [OPTIONS] [--SECTION.KEY VALUE ...]", DESCRIPTION, EXAMPLES, sections)
