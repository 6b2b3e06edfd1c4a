"""`manyheads completion bash|zsh|fish`: a script that completes commands, options and presets."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from manyheads.cli.inspect import KINDS
from manyheads.cli.main import COMMANDS, module_of
from manyheads.cli.parsing import parse
from manyheads.training.presets import PRESETS

__all__ = ["CompletionOptions", "options_of", "run", "script"]

Shell = Literal["bash", "zsh", "fish"]

_DESCRIPTION = "Print a script for your shell that completes commands, options, settings and presets."
_EXAMPLES = (
    "source <(manyheads completion bash)",
    "manyheads completion fish > ~/.config/fish/completions/manyheads.fish",
)

_OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Options of `manyheads completion`."""

    shell: Annotated[Positional[Shell], arg(metavar="bash|zsh|fish")]
    """For which shell."""


def run(arguments: Sequence[str]) -> int:
    """Returns: 0."""
    options = parse(CompletionOptions, arguments, command="completion", description=_DESCRIPTION, examples=_EXAMPLES)
    print(script(options.shell), end="")
    return 0


def script(shell: Shell) -> str:
    """The script; to be sourced."""
    options = {name: options_of(name) for name in COMMANDS}
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](options)


def options_of(command: str) -> list[str]:
    """The options that a command's own help page lists, so that none is forgotten here."""
    page = io.StringIO()
    names = [command] + ([f"{command}_{kind}" for kind in KINDS] if command == "inspect" else [])
    for name in names:
        with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
            module_of(name).run(["--help"])
    return sorted({"--help", *_OPTION.findall(page.getvalue())})


def _bash(options: dict[str, list[str]]) -> str:
    cases = "\n".join(f"      {name}) words='{' '.join(found)}' ;;" for name, found in options.items())
    return f"""# manyheads completion for bash: source <(manyheads completion bash)
_manyheads() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=''
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    words='{" ".join(COMMANDS)} --help --version'
  elif [ "$before" = --preset ]; then
    words='{" ".join(PRESETS)}'
  elif [ "${{COMP_WORDS[1]}} $COMP_CWORD" = 'completion 2' ]; then
    words='bash zsh fish'
  elif [ "${{COMP_WORDS[1]}} $COMP_CWORD" = 'inspect 2' ]; then
    words='{" ".join(KINDS)}'
  elif [ "${{word:0:1}}" = - ]; then
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _manyheads manyheads
"""


def _zsh(options: dict[str, list[str]]) -> str:
    # A quote ends the string, and a colon would end the name.
    told = {name: what.replace("'", "'\\''").replace(":", "\\:") for name, what in COMMANDS.items()}
    commands = "\n".join(f"    '{name}:{what}'" for name, what in told.items())
    cases = "\n".join(f"      {name}) compadd -- {' '.join(found)} ;;" for name, found in options.items())
    return f"""#compdef manyheads
# manyheads completion for zsh: source <(manyheads completion zsh)
_manyheads() {{
  local -a commands
  commands=(
{commands}
  )
  if (( CURRENT == 2 )); then
    _describe command commands
  elif [[ "${{words[CURRENT-1]}}" == --preset ]]; then
    compadd -- {" ".join(PRESETS)}
  elif [[ "${{words[2]}}" == completion && CURRENT -eq 3 ]]; then
    compadd -- bash zsh fish
  elif [[ "${{words[2]}}" == inspect && CURRENT -eq 3 ]]; then
    compadd -- {" ".join(KINDS)}
  elif [[ "${{words[CURRENT]}}" == -* ]]; then
    case "${{words[2]}}" in
{cases}
    esac
  else
    _files
  fi
}}
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
compdef _manyheads manyheads
"""


def _fish(options: dict[str, list[str]]) -> str:
    lines = ["# manyheads completion for fish: manyheads completion fish | source"]
    for name, what in COMMANDS.items():
        told = what.replace("'", "\\'")
        lines.append(f"complete -c manyheads -n __fish_use_subcommand -f -a {name} -d '{told}'")
    for name, found in options.items():
        seen = f"complete -c manyheads -n '__fish_seen_subcommand_from {name}'"
        for option in found:
            values = f" -x -a '{' '.join(PRESETS)}'" if option == "--preset" else ""
            lines.append(f"{seen} -l {option.removeprefix('--')}{values}")
    lines.append("complete -c manyheads -n '__fish_seen_subcommand_from completion' -f -a 'bash zsh fish'")
    lines.append(f"complete -c manyheads -n '__fish_seen_subcommand_from inspect' -f -a '{' '.join(KINDS)}'")
    return "\n".join(lines) + "\n"
