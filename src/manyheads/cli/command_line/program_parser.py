"""One parser of all commands, for tab completion."""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

from manyheads.cli.command_line.parsing import make_parser
from manyheads.cli.main import COMMANDS, module_of
from manyheads.extras.inspect.commands import KINDS
from manyheads.tasks.presets import PRESETS
from manyheads.tasks.table import RUNS

__all__ = ["program_parser"]


def program_parser() -> argparse.ArgumentParser:
    """A parser of all commands, for `shtab`; commands themselves make their own."""
    program = argparse.ArgumentParser("manyheads")
    program.add_argument("--version", action="store_true", help="print the version")
    commands = program.add_subparsers()
    for name, about in COMMANDS.items():
        if name != "inspect":
            _add(commands, name, about, module_of(name))
            continue
        kinds = commands.add_parser(name, help=about).add_subparsers()
        for kind, shown in KINDS.items():
            module = importlib.import_module(f"manyheads.extras.inspect.commands.{kind}")
            _add(kinds, kind, shown, module)
    return program


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, about: str, module: ModuleType
) -> None:
    settings = list(RUNS.values()) if name == "train" else []
    pages = getattr(module, "PAGES", None) or [module.PAGE]
    parents = [make_parser(page.options, settings, complete=True) for page in pages]
    parser = commands.add_parser(name, help=about, parents=parents, add_help=False, conflict_handler="resolve")
    for action in parser._actions:
        if "--preset" in action.option_strings:
            action.choices = list(PRESETS)
        if name == "help" and action.dest == "command":
            action.choices = list(COMMANDS)
