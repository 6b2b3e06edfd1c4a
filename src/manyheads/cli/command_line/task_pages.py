"""Commands whose options depend on the task, such as `evaluate`: the task of a command line, and its options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from manyheads.cli.command_line.parsing import option_names, parse
from manyheads.config.options import CommandPage
from manyheads.tasks.table import TASKS, Task, task_of_folder

__all__ = ["pages_of", "parse_for_task"]

_USUAL = "translation"


def pages_of(command: str) -> list[type]:
    """The options of a command for all tasks, each class once; for tab completion."""
    return list(dict.fromkeys(_page(task, command).options for task in TASKS.values()))


def parse_for_task(command: str, arguments: Sequence[str]) -> tuple[Task, Any]:
    """The task that a command line is about, and its options.

    It is the task that a folder among the arguments records; without one, the first task that knows all the options.

    Raises: ConfigError: as `parsing.parse`; an option of another task is named as such.
    """
    name = next(_recorded(arguments), None) or _fitting(command, arguments)
    page = _page(TASKS[name], command)
    others = {
        option: f"{option} is an option for the task {other}; this is about {name}."
        for other, task in TASKS.items()
        for option in option_names(_page(task, command).options)
    }
    options: Any = parse(
        page.options,
        arguments,
        command=command,
        description=page.description,
        examples=page.examples,
        elsewhere=others,
    )
    return TASKS[name], options


def _page(task: Task, command: str) -> CommandPage:
    page: CommandPage = getattr(task.module("options"), command.upper())
    return page


def _recorded(arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments:
        if not argument.startswith("-") and (found := task_of_folder(argument)) is not None:
            yield found


def _fitting(command: str, arguments: Sequence[str]) -> str:
    given = {one.partition("=")[0].replace("_", "-") for one in arguments if one.startswith("--")} - {"--help"}
    return next((name for name, task in TASKS.items() if given <= option_names(_page(task, command).options)), _USUAL)
