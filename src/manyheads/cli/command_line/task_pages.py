"""Commands whose options depend on the task, such as `evaluate`: the task of a command line, and its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.catalogue import TASKS, Task
from manyheads.cli.command_line.parsing import option_names, parse, read
from manyheads.errors import ModelFileError
from manyheads.models.hub import is_hub_name, resolve_model_path
from manyheads.tasks.table import task_of_folder

if TYPE_CHECKING:
    from manyheads.config.options import CommandPage

_USUAL = "translation"


def pages_of(command: str) -> list[CommandPage[Any]]:
    """The pages of a command for all tasks, each once; for tab completion."""
    return list(dict.fromkeys(_page(name, command) for name in TASKS))


def parse_for_task(command: str, arguments: Sequence[str]) -> tuple[Task, Any]:
    """Return the task of a command line, and its options.

    It is the task that a folder among the arguments records; without one, the first task that knows all the options.

    Raises: ConfigError: as `parsing.parse`; an option of another task is named as such.
    """
    name = next(_recorded(arguments), None) or _of_hub(command, arguments) or _fitting(command, arguments)
    message = f"{{option}} is an option for the task {{tasks}}; this is about {name}."
    elsewhere = _messages(command, {name: name for name in TASKS}, message)
    return TASKS[name], parse(_page(name, command), arguments, command, elsewhere)


def parse_for_named_task(command: str, arguments: Sequence[str]) -> tuple[Task, Any]:
    """The same for a command with the option `--task`, whose values are `Task.prepared_as`."""
    words = {name: task.prepared_as for name, task in TASKS.items() if task.prepared_as}
    given = read(_page(_USUAL, command).options, arguments).options.get("task", words[_USUAL])
    if given not in words.values():
        for error in TASKS.refused.values():
            raise error
    name = next((name for name, word in words.items() if word == given), _USUAL)
    elsewhere = _messages(command, words, "{option} needs --task {tasks}.")
    shown = command if name == _USUAL else f"{command} --task {words[name]}"
    return TASKS[name], parse(_page(name, command), arguments, shown, elsewhere)


def _page(task: str, command: str) -> CommandPage[Any]:
    page: CommandPage[Any] = getattr(TASKS[task].module("options"), command.upper())
    return page


def _messages(command: str, words: Mapping[str, str], message: str) -> dict[str, str]:
    """Option -> the message about it where a task does not have it. words: what each task is called."""
    tasks: dict[str, list[str]] = {}
    for name, word in words.items():
        for option in option_names(_page(name, command).options):
            tasks.setdefault(option, []).append(word)
    return {option: message.format(option=option, tasks=" or ".join(named)) for option, named in tasks.items()}


def _recorded(arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments:
        if not argument.startswith("-") and (found := task_of_folder(argument, strictly=True)) is not None:
            yield found


def _of_hub(command: str, arguments: Sequence[str]) -> str | None:
    """The task of a model on the hub, which is downloaded; None: there is no such model, or only help is asked for."""
    given = read(_page(_fitting(command, arguments), command).options, arguments)
    model = str(given.options.get("model", ""))
    if given.wants_help or Path(model).exists() or not is_hub_name(model):
        return None
    with suppress(ModelFileError):  # loading the model reports the reason, after the options are checked
        return task_of_folder(str(resolve_model_path(model)), strictly=True)
    return None


def _fitting(command: str, arguments: Sequence[str]) -> str:
    given = {one.partition("=")[0].replace("_", "-") for one in arguments if one.startswith("--")} - {"--help"}
    return next((name for name in TASKS if given <= option_names(_page(name, command).options)), _USUAL)
