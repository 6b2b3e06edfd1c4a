"""`manyheads COMMAND ...`: finds the command, and converts every error to one paragraph and an exit code.

No large module is imported before the command is known, so help is fast.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from manyheads import __version__
from manyheads.catalogue import COMMANDS, PLUGINS, entries_of, load
from manyheads.cli.process import StoppedBySystem, abandon_output, echo, set_up_streams, stoppable
from manyheads.config.checks import did_you_mean
from manyheads.errors import ManyHeadsError, RequestError, SaveError, is_out_of_memory, wants_traceback

EXIT_CODES = (
    "exit codes: 0 success, 2 an error in the input or a full disk, 1 a bug of manyheads, 3 another process of the run "
    "was lost, 4 the model of `make demo` did not learn,"
    " 129, 130 and 143 stopped by SIGHUP, Ctrl-C and SIGTERM"
)

_LIMIT = "--max-input-bytes"
_PLUGIN = "--plugin"
_MOST_LINES = 10
_LONGEST_LINE = 2000

_HELP = """usage: manyheads COMMAND [OPTIONS]     manyheads COMMAND --help     manyheads help COMMAND WORD

Transformer, Transformer-XL and Reformer: train, evaluate, translate, inspect.

commands:
{commands}

options:
  --version   print the version
  --debug     print a traceback after an error (or set MANYHEADS_DEBUG=1)
  --plugin MODULE
              add the architectures, tasks and others of a module of yours
  --max-input-bytes N
              the largest size of a packed text when it is unpacked, and of a
              stream that is read to its end [default: 8589934592]

examples:
  manyheads train --preset demo
  echo "I am hungry." | manyheads translate runs/demo
  manyheads help train dropout

{exit_codes}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns: the exit code (see `EXIT_CODES`)."""
    set_up_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # half a surrogate pair in JSON; letters in an ASCII locale
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        with stoppable():
            return guarded(lambda: _run_limited(_with_plugins(arguments)), debug=debug)
    except StoppedBySystem as stopped:
        return _fail(f"manyheads: {stopped}", 128 + stopped.number, debug)


def guarded(command: Callable[[], int], *, debug: bool = False) -> int:
    """Call `command`. Print its exception as a paragraph on stderr, and return an exit code."""
    try:
        return command()
    except ManyHeadsError as error:
        text = " ".join([error.for_command(), *getattr(error, "__notes__", ())])
        return _fail(f"manyheads: {text}", error.exit_code, debug)
    except BrokenPipeError:
        abandon_output()  # the reader has closed it, as `head` does
        return 0
    except OSError as error:  # not handled where it occurred; the system's reason tells the user what to do
        name = "" if error.filename is None else f" {error.filename}"
        return _fail(f"manyheads: cannot read or write{name}: {error.strerror or error}.", 2, debug)
    except KeyboardInterrupt:
        return _fail("manyheads: interrupted", 130, debug)
    except Exception as error:
        if is_out_of_memory(error):
            reason = str(error).split("\n", maxsplit=1)[0][-200:] or "out of memory"
            return _fail(f"manyheads: there was not enough memory ({reason}). Ask for less at once.", 2, debug)
        message = (
            f"manyheads: a bug of ours: {type(error).__name__}: {error}\n"
            "Run the same command with --debug and send us its output."
        )
        return _fail(message, 1, debug)


def _with_plugins(arguments: list[str]) -> list[str]:
    """Add the modules of --plugin MODULE to the tables, also of child processes. Returns: the other arguments.

    Raises: ConfigError: a module cannot be imported. RequestError: none is named.
    """
    others, named = [], []
    given = iter(arguments)
    for argument in given:
        name, has_value, value = argument.partition("=")
        if name != _PLUGIN:
            others.append(argument)
            continue
        named.append(value if has_value else next(given, ""))
        if not named[-1]:
            raise RequestError(f"{_PLUGIN} needs the name of a module, such as {_PLUGIN} my_models.")
        entries_of(named[-1])
    if named:
        os.environ[PLUGINS] = ",".join([*filter(None, [os.environ.get(PLUGINS)]), *named])
    return others


def _run_limited(arguments: list[str]) -> int:
    """Run the command, under the limit of --max-input-bytes if it is among the arguments."""
    names = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    if _LIMIT not in names:
        return _run(arguments)
    place = names.index(_LIMIT)
    has_value = "=" in arguments[place]
    value = arguments[place].partition("=")[2] if has_value else "".join(arguments[place + 1 : place + 2])
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise RequestError(f"{_LIMIT} is {value!r}; give a number of bytes, such as {_LIMIT} 20000000000.")
    from manyheads.data.lines import limited_input

    with limited_input(int(value)):
        return _run_limited(arguments[:place] + arguments[place + (1 if has_value else 2) :])


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    code = 0
    if name in ("-h", "--help"):
        print(_HELP.format(commands=_table(), exit_codes=EXIT_CODES))
    elif name in ("-V", "--version", "version"):
        echo(f"manyheads {__version__}")
    elif name in COMMANDS:
        _check_working_folder(arguments)
        _keep_compiled_code()
        code = module_of(name).run(arguments[1:])
    else:
        echo(f"manyheads: there is no command {name!r}.{did_you_mean(name, COMMANDS)}", file=sys.stderr)
        echo(f"Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_output()
        raise SaveError(f"Cannot write standard output: {error.strerror or error}.") from None
    return code


def _keep_compiled_code() -> None:
    """Set the folder of torch's compiler: among the user's caches instead of the folder for temporary files.

    torch makes this folder when it imports its compiler, also where nothing is compiled.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111  (help needs no pathlib)
    folder = existing = f"{caches}/manyheads/compiled"
    while existing and not os.path.exists(existing):  # noqa: PTH110
        existing = os.path.dirname(existing)  # noqa: PTH120
    if existing and os.access(existing, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)


def _check_working_folder(arguments: list[str]) -> None:
    """Refuse to work in a folder that was deleted: relative paths mean nothing there, and torch's libraries abort.

    Raises: RequestError: it was deleted, and not only help is asked for.
    """
    try:
        os.getcwd()  # noqa: PTH109  (help needs no pathlib)
    except FileNotFoundError:
        if "--help" not in arguments and "-h" not in arguments:
            raise RequestError(
                "the working folder does not exist any more: it was deleted or moved. Change into another one (cd)"
                " and run the command again."
            ) from None


def module_of(command: str) -> Any:
    """The module of a command, imported, or its object in a module."""
    module = COMMANDS[command].module
    return load(module) if ":" in module else importlib.import_module(module)


def _table() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())


def _fail(message: str, code: int, debug: bool) -> int:
    if debug or wants_traceback():
        import traceback  # imported here, because help does not need it

        traceback.print_exc()
    rank = os.environ.get("RANK", "0")
    if rank != "0":  # under a launcher all write to one place
        message = message.replace("manyheads:", f"manyheads (rank {rank}):", 1)
    echo(_shortened(message), file=sys.stderr)
    return code


def _shortened(message: str) -> str:
    """Return the message, shortened if it would fill a terminal because of long names from files."""
    lines = [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..." for line in message.split("\n")]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES - 1 :] = [f"... and {len(lines) - _MOST_LINES + 1} lines more"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
