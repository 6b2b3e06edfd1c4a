"""A conversation in a terminal: a prompt for each line until the end of the input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from manyheads.cli.process import echo
from manyheads.config.checks import did_you_mean
from manyheads.errors import ConfigError, ManyHeadsError


@dataclass(frozen=True)
class Command:
    """A line such as `:beam 8`.

    argument: the form of what follows the name. about: for `:help`. run: called with what follows the name; what it
    returns is printed.
    """

    argument: str
    about: str
    run: Callable[[str], str]


def is_conversation(source: str) -> bool:
    """Return whether a file name stands for a terminal in which a user types."""
    return source == "-" and sys.stdin is not None and sys.stdin.isatty()


def greet(model: str) -> None:
    """Announce a wait: torch and the model are loaded after this line."""
    echo(f"manyheads: loading {model} ...", file=sys.stderr, flush=True)


def converse(
    wanted: str,
    answer: Callable[[int, str], None],
    prompt: str = "> ",
    commands: Mapping[str, Command] | None = None,
) -> None:
    """Answer every line that the user types. An error in one line is printed, and the conversation continues.

    Ctrl-C clears the line, or stops the answer; Ctrl-D and `:quit` end the conversation. A text that begins with a
    colon needs a space before it.

    Args:
        wanted: what the user is asked to type.
        answer: called with the number of the line, from 0, and the line.
        prompt: shown before each line.
        commands: name without the colon -> command; `help` and `quit` are always there.
    """
    in_terminal = sys.stdout is not None and sys.stdout.isatty()
    if in_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (the arrow keys and the history of input())
    echo(f"Type {wanted} and Enter; :help lists commands; Ctrl-D ends.", file=sys.stderr)
    number = 0
    while True:
        try:
            # readline must know the prompt to redraw a line, and writes it to the terminal that is standard output
            if not in_terminal:
                echo(prompt, end="", file=sys.stderr, flush=True)
            line = input(prompt if in_terminal else "")
            line.encode("utf-8")  # in some locales bytes of another encoding become halves of surrogate pairs
            if line.strip() == ":quit":
                return
            if line.startswith(":"):
                echo(_obey(line, commands or {}), file=sys.stderr)
                continue
            number += 1
            answer(number - 1, line)
        except EOFError:
            echo(file=sys.stderr)
            return
        except KeyboardInterrupt:
            echo(file=sys.stderr)
        except UnicodeError as error:
            reason = error.reason if isinstance(error, UnicodeDecodeError) else "it is not UTF-8"
            echo(f"manyheads: what was typed is not in the terminal's encoding: {reason}.", file=sys.stderr)
        except ManyHeadsError as error:
            echo(f"manyheads: {error.for_command()}", file=sys.stderr)


def whole_number(name: str, text: str) -> int:
    """Return the argument of a command as a number. Raises: ConfigError: it is not one."""
    if not text.isdecimal():
        raise ConfigError(f":{name} needs a whole number, for example :{name} 4, but {text!r} was given.")
    return int(text)


def _obey(line: str, commands: Mapping[str, Command]) -> str:
    """Run a command. Returns: what to print. Raises: ConfigError: there is no such command; what the command raises."""
    name, _, argument = line[1:].strip().partition(" ")
    if name == "help":
        rows = [(f":{known} {one.argument}".rstrip(), one.about) for known, one in commands.items()]
        rows += [(":help", "this list"), (":quit", "end; so does Ctrl-D")]
        width = max(len(left) for left, _ in rows)
        rows.append(("Ctrl-C", "clear the line, or stop an answer"))
        return "\n".join(f"  {left:<{width}}  {about}" for left, about in rows)
    if name not in commands:
        names = [*commands, "help", "quit"]
        raise ConfigError(
            f"there is no command :{name}.{did_you_mean(name, names, prefix=':')} There are"
            f" {', '.join(f':{known}' for known in names)}. Type a space before a text that begins with a colon."
        )
    return commands[name].run(argument.strip())
