"""Whether a name that a page of documentation writes in code exists: a thing in Python, a setting, or a command."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import re
import shlex
from typing import Any

from manyheads.catalogue import COMMANDS, PRESETS
from manyheads.cli.main import main

__all__ = ["command_fault", "found_in", "is_known", "is_setting"]


def is_known(name: str) -> bool:
    """Below the package `manyheads`, among the settings of a run, or a line of the program."""
    if name.split(" ")[0] in COMMANDS:
        return not command_fault(shlex.split(name))
    return found_in("manyheads", name.removeprefix("manyheads.").split(".")) or is_setting(name)


def is_setting(name: str) -> bool:
    """Of one of the presets, as `section.key` in any spelling of the command line."""
    return name.removeprefix("--").replace("-", "_") in _settings()


def command_fault(arguments: list[str]) -> str:
    """What a command line names that the program has not: a command, an option or a setting; empty if nothing."""
    if arguments[0] not in COMMANDS:
        return f"there is no command {arguments[0]}"
    # The options of some commands depend on the task, which the options decide.
    command = (arguments[0],) if arguments[0] == "train" else tuple(arguments)
    code, page = _help(command)
    if code:
        return f"manyheads {' '.join(command)} --help gives {code}"
    for argument in arguments:
        option = argument.partition("=")[0]
        if not re.match(r"--?[a-z]", option):
            continue
        if "." in option and arguments[0] == "train":
            if not is_setting(option):
                return f"there is no setting {option}"
        elif not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", page):
            return f"{' '.join(command)} has no option {option}"
    return ""


def found_in(room: str, names: list[str]) -> bool:
    """Whether names lead from a module to a thing; the last may be an attribute of a class, or an argument."""
    found: Any = importlib.import_module(room)
    for place, name in enumerate(names):
        if inspect.ismodule(found) and not hasattr(found, name):
            try:
                found = importlib.import_module(f"{found.__name__}.{name}")
            except ModuleNotFoundError:
                return False
        elif inspect.isclass(found):
            return place == len(names) - 1 and name in _names_of(found)
        elif inspect.isfunction(found):
            return place == len(names) - 1 and name in inspect.signature(found).parameters
        else:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
    return True


@functools.cache
def _names_of(kind: type) -> frozenset[str]:
    """Whatever one may write after the dot, or give by name."""
    given = [set(inspect.signature(f).parameters) for f in (kind, getattr(kind, "forward", kind))]
    made = {
        name
        for base in kind.__mro__
        if base.__module__.startswith("manyheads")
        for name in re.findall(r"self\.(\w+)(?:: [^=\n]+)? =|self\.(\w+), ", inspect.getsource(base))
        for name in name
    }
    return frozenset(set(dir(kind)).union(*given, made))


@functools.cache
def _settings() -> frozenset[str]:
    """Every setting of every preset, `section.key`, and with kinds of a choice `section.kind.key`."""
    names: set[str] = set()

    def walk(value: Any, before: str) -> None:
        for field in dataclasses.fields(value):
            name = f"{before}{field.name}"
            names.add(name)
            inner = getattr(value, field.name)
            if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
                walk(inner, f"{name}.")

    for preset in PRESETS.values():
        walk(preset(), "")
    return frozenset(names)


@functools.cache
def _help(command: tuple[str, ...]) -> tuple[int, str]:
    """The exit code and the page of `manyheads COMMAND --help`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main([*command, "--help"])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue()
