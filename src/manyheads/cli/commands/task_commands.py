"""The commands `prepare`, `evaluate` and `score`, whose options depend on the task.

The task of a command line, and its options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.catalogue import TASKS, Task
from manyheads.cli.command_line.parsing import option_names, parse, read
from manyheads.cli.process import echo, printable, set_up_machine
from manyheads.cli.watching.phases import StoppedBySignalError, interruptible, showing_if_long, showing_phases
from manyheads.errors import ModelFileError
from manyheads.models.hub import is_hub_name, resolve_model_path
from manyheads.tasks.held_out import task_of_folder
from manyheads.tasks.preparation import check_output

if TYPE_CHECKING:
    from manyheads.config.options import CommandPage

_USUAL = "translation"


@dataclass(frozen=True)
class TaskCommand:
    """A command. Args: name: of it. run: arguments after the name -> the exit code."""

    name: str
    run: Callable[[Sequence[str]], int]

    @property
    def PAGES(self) -> list[CommandPage[Any]]:  # noqa: N802  (as modules of commands name them)
        """The pages for all tasks, each once; for tab completion."""
        return list(dict.fromkeys(page_of(name, self.name) for name in TASKS))


def parse_for_task(command: str, arguments: Sequence[str]) -> tuple[Task, Any]:
    """Return the task of a command line, and its options.

    It is the task that a folder among the arguments records; without one, the first task that knows all the options.

    Raises: ConfigError: as `parsing.parse`; an option of another task is named as such.
    """
    name = next(_recorded(arguments), None) or _of_hub(command, arguments) or _fitting(command, arguments)
    message = f"{{option}} is an option for the task {{tasks}}; this is about {name}."
    elsewhere = _messages(command, {name: name for name in TASKS}, message)
    return TASKS[name], parse(page_of(name, command), arguments, command, elsewhere)


def parse_for_named_task(command: str, arguments: Sequence[str]) -> tuple[Task, Any]:
    """The same for a command with the option `--task`, whose values are `Task.prepared_as`."""
    words = {name: task.prepared_as for name, task in TASKS.items() if task.prepared_as}
    given = read(page_of(_USUAL, command).options, arguments).options.get("task", words[_USUAL])
    if given not in words.values():
        for error in TASKS.refused.values():
            raise error
    name = next((name for name, word in words.items() if word == given), _USUAL)
    elsewhere = _messages(command, words, "{option} needs --task {tasks}.")
    shown = command if name == _USUAL else f"{command} --task {words[name]}"
    return TASKS[name], parse(page_of(name, command), arguments, shown, elsewhere)


def page_of(task: str, command: str) -> CommandPage[Any]:
    """Return the page of a command for a task."""
    page: CommandPage[Any] = getattr(TASKS[task].module("options"), command.upper())
    return page


def _messages(command: str, words: Mapping[str, str], message: str) -> dict[str, str]:
    """Option -> the message about it where a task does not have it. words: what each task is called."""
    tasks: dict[str, list[str]] = {}
    for name, word in words.items():
        for option in option_names(page_of(name, command).options):
            tasks.setdefault(option, []).append(word)
    return {option: message.format(option=option, tasks=" or ".join(named)) for option, named in tasks.items()}


def _recorded(arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments:
        if not argument.startswith("-") and (found := task_of_folder(argument, strictly=True)) is not None:
            yield found


def _of_hub(command: str, arguments: Sequence[str]) -> str | None:
    """The task of a model on the hub, which is downloaded; None: there is no such model, or only help is asked for."""
    given = read(page_of(_fitting(command, arguments), command).options, arguments)
    model = str(given.options.get("model", ""))
    if given.wants_help or Path(model).exists() or not is_hub_name(model):
        return None
    with suppress(ModelFileError):  # loading the model reports the reason, after the options are checked
        return task_of_folder(str(resolve_model_path(model)), strictly=True)
    return None


def _fitting(command: str, arguments: Sequence[str]) -> str:
    given = {one.partition("=")[0].replace("_", "-") for one in arguments if one.startswith("--")} - {"--help"}
    return next((name for name in TASKS if given <= option_names(page_of(name, command).options)), _USUAL)


def _prepare(arguments: Sequence[str]) -> int:
    """Prepare data. Returns: the exit code."""
    task, options = parse_for_named_task("prepare", arguments)
    output = Path(options.output)
    if not output.name:
        output = output.resolve()
    check_output(output, options.replace)
    from manyheads.files.commit import remove_stale

    prepare = partial(task.module("prepare").preparation(options), output, replace=options.replace)
    before = _identity(output)

    def tell_stopped() -> None:
        from manyheads.data.preparing import parts_folder

        found = _identity(output)
        left = f"nothing is left in {output}" if found is None else f"{output} is unchanged"
        if found not in (None, before):  # stopped while the system wrote it to the disk
            left = f"{output} was complete already"
        if (parts := parts_folder(output)).is_dir():
            left += f"; the same command continues from the finished parts in {parts}"
        echo(f"manyheads: stopped; {left}.", file=sys.stderr, flush=True)

    def abandon() -> None:
        from rich.console import Console

        Console(stderr=True).show_cursor()  # the bars have hidden it
        tell_stopped()
        remove_stale(output.absolute().parent, output.name)

    try:
        with showing_phases() as progress:
            manifest = interruptible(lambda progress: prepare(progress=progress), progress, abandon)
    except StoppedBySignalError as stopped:
        tell_stopped()
        return 128 + stopped.number
    for name in remove_stale(output.absolute().parent, output.name):
        left = output.with_name(name)
        echo(f"{left} stays: it does not bear the mark of a temporary file of this machine.", file=sys.stderr)
    echo(task.module("prepare").summary(output, manifest))
    tokenizer = getattr(getattr(options, "vocabulary", None), "tokenizer", None)
    if tokenizer is not None and TASKS.get(str(task_of_folder(tokenizer))) is task and _is_model(Path(tokenizer)):
        echo(f"or begin from that model (5 minutes): manyheads train --init {tokenizer} --data.path {output}")
    return 0


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return device and inode of a folder, which change if it is replaced; None if the folder does not exist."""
    with suppress(OSError):
        status = folder.stat()
        return status.st_dev, status.st_ino
    return None


def _is_model(folder: Path) -> bool:
    return any((place / "model.safetensors").is_file() for place in (folder, folder / "model"))


def _evaluate(arguments: Sequence[str]) -> int:
    """Evaluate. Returns: the exit code."""
    from manyheads.cli.lines.output import LineWriter, check_files
    from manyheads.decoding.inputs_and_results import tell_bad_lines
    from manyheads.files.verify import json_text

    set_up_machine()
    task, options = parse_for_task("evaluate", arguments)
    options.run_on.announce()
    if options.output is not None:
        check_files(options.output, *options.inputs)
    with showing_if_long() as progress:
        report = task.module("evaluate").evaluate(options, progress)
    if report is None:
        return 0  # the main rank has the results of all ranks
    if options.output is not None:
        with LineWriter(options.output) as writer:
            writer.write(report.output)
    with LineWriter("-") as writer:
        if options.json:
            writer.write([json_text(report.to_json(), indent=2)])
        else:
            writer.write(map(printable, report.to_lines()))
    # Pages and pictures come last: one that cannot be written must not cost the figures.
    report.save()
    tell_bad_lines(report.read)
    return 0


def _score(arguments: Sequence[str]) -> int:
    """Score lines. Returns: the exit code."""
    from manyheads.cli.lines.output import check_files, write_lines

    set_up_machine()
    task, options = parse_for_task("score", arguments)
    check_files(options.output, *options.inputs)
    with showing_if_long() as progress:
        write_lines(task.module("score").score(options, progress), options.output, progress)
    return 0


PREPARE = TaskCommand("prepare", _prepare)
EVALUATE = TaskCommand("evaluate", _evaluate)
SCORE = TaskCommand("score", _score)
