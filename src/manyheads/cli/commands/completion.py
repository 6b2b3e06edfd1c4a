"""`manyheads completion bash|zsh|fish`: a script that completes commands, options, settings and presets."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Literal

from manyheads.catalogue import COMMANDS, PRESETS, RUNS
from manyheads.cli.command_line.parsing import command, make_parser
from manyheads.cli.main import module_of
from manyheads.config.options import CommandPage, argument


def program_parser() -> argparse.ArgumentParser:
    """A parser of all commands, for `shtab`; commands themselves make their own."""
    program = argparse.ArgumentParser("manyheads")
    program.add_argument("--version", action="store_true", help="print the version")
    commands = program.add_subparsers()
    for name, entry in COMMANDS.items():
        if name != "inspect":
            _add(commands, name, entry.summary, module_of(name))
            continue
        kinds = commands.add_parser(name, help=entry.summary).add_subparsers()
        for kind, shown in module_of(name).KINDS.items():
            _add(kinds, kind, shown, module_of(name).kind_of(kind))
    return program


def _add(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, about: str, module: Any) -> None:
    settings = list(RUNS.values()) if name == "train" else []
    pages = getattr(module, "PAGES", None) or [module.PAGE]
    parents = [make_parser(page.options, settings, complete=True) for page in pages]
    parser = commands.add_parser(name, help=about, parents=parents, add_help=False, conflict_handler="resolve")
    for action in parser._actions:
        if "--preset" in action.option_strings:
            action.choices = list(PRESETS)
        if name == "help" and action.dest == "command":
            action.choices = list(COMMANDS)


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Options of `manyheads completion`."""

    shell: Literal["bash", "zsh", "fish"] = argument("bash, zsh or fish.", metavar="SHELL")


PAGE = CommandPage(
    CompletionOptions,
    "Print a script for your shell that completes commands, options, settings and presets.",
    (
        "source <(manyheads completion bash)",
        "manyheads completion fish > ~/.config/fish/completions/manyheads.fish",
    ),
)


@command(PAGE, "completion")
def run(options: CompletionOptions) -> int:
    """Returns: 0."""
    import shtab

    print(shtab.complete(program_parser(), options.shell))
    return 0
