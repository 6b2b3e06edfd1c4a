"""`manyheads completion bash|zsh|fish`: a script that completes commands, options, settings and presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.cli.command_line.command import command
from manyheads.cli.command_line.program_parser import program_parser
from manyheads.config.options import CommandPage, argument


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
