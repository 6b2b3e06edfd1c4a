"""Lines that commands read and write: output to a file or a pipe, and a conversation in a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar

from manyheads.cli.process import StoppedBySystem, echo
from manyheads.config.checks import did_you_mean
from manyheads.data.lines import Source, describe
from manyheads.decoding.inputs_and_results import counted_truncations, naming_lines, repeats_itself, tell_bad_lines
from manyheads.distributed import sharded_lines
from manyheads.distributed.process import this_process
from manyheads.errors import CheckpointError, ConfigError, DataError, ManyHeadsError, SaveError
from manyheads.files.output_safety import check_spares_folders

if TYPE_CHECKING:
    from manyheads.cli.watching.phases import Phases
    from manyheads.tasks.report import LineWork


# Without tab and line feed. The last two ranges are marks that change the direction of the text after them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class LineWriter:
    """Writes lines and flushes after every call. A file is opened only when the first result is there.

    So an error in the input does not change an older output file.

    Args: path: a file, or `-` for standard output.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    @property
    def is_in_terminal(self) -> bool:
        """Whether the lines appear on a screen."""
        return self._path == "-" and sys.stdout is not None and sys.stdout.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.write([])  # without input the file is created, but empty
        if self._file is not None and self._path != "-":
            with suppress(OSError):  # after an error of `_put`, which has named the file
                self._file.close()

    def write(self, lines: Iterable[str]) -> None:
        """Write each line and a line feed.

        Raises: SaveError: the disk is full or refuses. BrokenPipeError: the reader of standard output has closed it.
        """
        self._put("".join(f"{line}\n" for line in lines))

    def write_text(self, text: str) -> None:
        """Write a text as it is. Raises: as `write`."""
        self._put(text)

    def write_pieces(self, pieces: Iterable[str]) -> None:
        """Write pieces of one text as soon as they arrive, and a line feed at the end. Raises: as `write`."""
        for piece in pieces:
            self._put(piece)
        self._put("\n")

    def _put(self, text: str) -> None:
        try:
            if self._path == "-" and sys.stdout is None:
                raise SaveError("Standard output is closed; name a file by --output.")
            if self._file is None:
                self._file = sys.stdout.buffer if self._path == "-" else _open_file(Path(self._path))
            self._file.write((_visible(text) if self.is_in_terminal else text).encode("utf-8"))
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._path == "-":  # Python would try to write the rest once more at exit, and fail again
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            name = "standard output" if self._path == "-" else self._path
            raise SaveError(f"Cannot write {name}: {error.strerror or error}.") from None


def _visible(text: str) -> str:
    """Return a text whose control characters are replaced, so that it cannot control the terminal or change the reading
    order."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def _open_file(path: Path) -> IO[bytes]:
    """Open a file for writing. The content of an earlier file is lost, and a line on standard error says so.

    Raises: ConfigError: another command writes it at the moment.
    """
    if path.exists() and not path.is_file():
        return path.open("wb")
    from manyheads.files.output_safety import take

    file = path.open("ab")  # emptied only when nobody else writes it
    if not take(file.fileno()):
        file.close()
        raise ConfigError(f"another command writes {path} at the moment; wait for it, or choose another output.")
    if os.fstat(file.fileno()).st_size:
        echo(f"manyheads: {describe(str(path))} existed already and is replaced.", file=sys.stderr)
        file.truncate(0)
    return file


def _refuse_same_file(output: str, *inputs: str | None) -> None:
    """Raises: ConfigError: the output file is one of the inputs, which writing would destroy."""
    for path in inputs:
        if path is None or "-" in (path, output):
            continue
        try:
            same = os.path.isfile(path) and os.path.samefile(path, output)  # noqa: PTH113, PTH121
        except (OSError, ValueError):
            continue  # the file does not exist or is not accessible; reading or writing it will report that
        if same:
            raise ConfigError(f"--output {output} is the file {describe(path)} that is read; choose another file.")


def check_files(output: str, *inputs: str | None) -> None:
    """Check the names of files before a model is loaded.

    Raises: ConfigError: the output is one of the inputs, a file of a model or of prepared data, or it cannot be
        written. DataError: an input cannot be read.
    """
    _refuse_same_file(output, *inputs)
    if output != "-":
        check_spares_folders(Path(output))
    for path in inputs:
        if path is not None and path != "-":
            try:
                if Path(path).is_file() or not Path(path).exists():  # a pipe is opened once, by its reader
                    Path(path).open("rb").close()
            except OSError as error:
                raise DataError(f"Cannot read {describe(path)}: {error.strerror or error}.") from None
    folder = Path(output).absolute().parent
    if output != "-" and not folder.is_dir():
        raise ConfigError(f"Cannot write {output}: there is no folder {folder}; make it first, or choose another file.")
    if output != "-" and Path(output).is_dir():
        raise ConfigError(f"--output {output} is a folder; name a file.")


def check_model_output(output: Path, replace: bool) -> None:
    """Refuse to replace a folder that holds something else.

    Raises: ConfigError: the folder exists, and is no model folder, was not to be replaced, or holds other files too.
    """
    check_spares_folders(output, is_folder=True)
    if not os.path.lexists(output):
        return
    is_model = (output / "config.json").is_file() and (output / "model.safetensors").is_file()
    if not replace or not is_model:
        hint = "or give --replace" if is_model else "it is no model folder, so it is not replaced"
        raise ConfigError(f"{output} exists already; choose another folder, {hint}.")
    from manyheads.files.verify import MANIFEST, unlisted_files

    try:
        others = unlisted_files(output) if (output / MANIFEST).exists() else []
    except (CheckpointError, OSError):
        others = []  # the model is damaged, and is to be replaced for that
    if others:
        raise ConfigError(
            f"{output} also holds {others[0]}, which is not of the model and which --replace would delete; move it, or"
            " choose another folder."
        )


# If more outputs than this are bad, the cause is the model, not a few unusual inputs.
_MANY = 0.2
_MOST_NAMED = 5
_SHORTEST_TEXT = 10


class OutputCheck:
    """Counts what a command writes.

    Args:
        name: what the outputs are called: `translations`, `texts`.
        learn_more: advice if many are bad.
        forbid: advice if few are bad: options that prevent such outputs.
    """

    def __init__(self, name: str, *, learn_more: str, forbid: str) -> None:
        self._name = name
        self._learn_more = learn_more
        self._forbid = forbid
        self._total = self._num_empty = self._num_repeating = 0
        self._named: list[int] = []  # of the first bad lines: a stream has no end
        self._told = False

    def see(self, number: int, source: str, output: str) -> None:
        """Note one output. If the source repeats itself, so may the output.

        Args: number: of the line, from 1.
        """
        self._total += 1
        if not output.strip():
            self._num_empty += 1
        elif repeats_itself(output) and not repeats_itself(source):
            self._num_repeating += 1
        else:
            return
        if len(self._named) < _MOST_NAMED:
            self._named.append(number)

    def see_text(self, number: int, prompt: str, text: str, *, may_be_empty: bool) -> None:
        """Note a text that goes on from a prompt. A few characters may well be blank.

        Args: may_be_empty: if a stop text comes at once there is no text, and this is not an error of the model.
        """
        if len(text) >= _SHORTEST_TEXT or not (text or may_be_empty):
            self.see(number, prompt, text)

    def report(self) -> None:
        """Print one warning if any output was empty or repeated itself; never a second one."""
        if self._named and not self._told:
            self._told = True
            echo(f"manyheads: warning: {self.describe()}", file=sys.stderr)

    def describe(self) -> str:
        """The counts, the lines they are of, and what to do."""
        num_bad = self._num_empty + self._num_repeating
        empty = "is empty" if num_bad == 1 else "are empty"
        repeating = f"repeat{'s' if num_bad == 1 else ''} the same words again and again"
        if self._num_empty and self._num_repeating:
            what = f"are empty ({self._num_empty:,}) or {repeating} ({self._num_repeating:,})"
        else:
            what = empty if self._num_empty else repeating
        named = ", ".join(map(str, self._named)) + (", ..." if num_bad > _MOST_NAMED else "")
        told = f"{num_bad:,} of {self._total:,} {self._name} {what} (line{'s' if num_bad > 1 else ''} {named})."
        is_model = num_bad >= _MANY * self._total
        return f"{told} {f'The model has hardly learned: {self._learn_more}' if is_model else self._forbid}"


_PACKED = ("config", "decoding", "environment", "counts")
"""Records of many small values."""


def lines_of(record: dict[str, Any], indent: str = "") -> list[str]:
    """A record as `name  value` lines; inner records indented below their names, settings packed into few lines."""
    known = {name: value for name, value in record.items() if value is not None}
    if known.get("last_validation") == known.get("best"):
        known.pop("last_validation", None)
    width = max((len(name) for name, value in known.items() if not isinstance(value, dict)), default=0)
    lines = []
    for name, value in known.items():
        shown = name.replace("_", " ")
        if not isinstance(value, dict):
            lines.append(f"{indent}{shown:<{width}}  {_shown(name, value)}".rstrip())
        elif name in _PACKED:
            lines += [f"{indent}{shown}", *_packed(value, f"{indent}  ")]
        elif value:
            lines += [f"{indent}{shown}", *lines_of(value, f"{indent}  ")]
    return lines


def _packed(record: dict[str, Any], indent: str) -> list[str]:
    """Return one paragraph with all plain values, then a paragraph for each inner record."""
    inner = {name: value for name, value in record.items() if isinstance(value, dict)}
    plain = {name: value for name, value in record.items() if name not in inner}
    width = max(map(len, inner), default=0)
    lines = _paragraph("", plain, indent)
    for name, values in inner.items():
        flat = {key: value.get("kind") if isinstance(value, dict) else value for key, value in values.items()}
        lines += _paragraph(f"{name:<{width}}  ", flat, indent)
    return lines


def _paragraph(lead: str, values: dict[str, Any], indent: str) -> list[str]:
    text = ", ".join(f"{name}\0{_shown(name, value)}".replace(" ", "\0") for name, value in values.items())
    wrapped = textwrap.wrap(
        text,
        min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120),
        initial_indent=indent + lead,
        subsequent_indent=indent + " " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in wrapped]  # a name and its value stay on one line


def _shown(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int) and name not in ("seed", "format_version"):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(_shown(name, item) for item in value) or "none"
    return str(value)


T = TypeVar("T")


def write_lines(lines: LineWork[T], output: str, show: Phases | None = None) -> None:
    """Write all lines; then print how many inputs were cut or were not UTF-8. For `output` and `show` see `run_lines`.

    Raises: RequestError: an input does not fit; the message names its file and line.
    """
    with counted_truncations(), naming_lines(**lines.names):
        is_main = run_lines(lines.source, lines.work, output=output, identity=lines.identity, show=show)
    if is_main:
        tell_bad_lines(lines.source.report)


def run_lines(
    source: Source[T],
    work: Callable[[int, list[T]], Iterable[str]],
    *,
    output: str,
    identity: Mapping[str, Any],
    show: Phases | None = None,
) -> bool:
    """Write the output lines of every block to a file; see `sharded_lines.run_lines`.

    From files to a file, finished blocks are kept until all are there, and the same command continues after a kill.

    Args:
        output: a file; `-` is standard output.
        show: the progress display. It is hidden while lines are written to the same terminal, and while the command
            waits for input from a pipe.

    Returns: whether this process is the one that reports what was found in the input (`source.report`).
    """
    waits = show is not None and "-" in source.files
    writer = LineWriter(output)

    def write(lines: list[str]) -> None:
        if show is None:
            writer.write(lines)
            return
        with show.hidden(writer.is_in_terminal):
            writer.write(lines)
        if waits:
            show.rest()

    resumable = is_resumable(output, *source.files)

    def continued(count: int) -> None:
        echo(f"manyheads: continued after line {count:,}, from {output}.shards", file=sys.stderr)

    with ExitStack() as stack:
        if this_process().is_main:
            stack.enter_context(writer)  # also creates the output of an empty input
        if show is not None and waits:
            show.rest()
        stack.enter_context(telling_what_is_kept(output, resumable))
        return sharded_lines.run_lines(
            source, work, write, output=output, identity=identity, resumable=resumable, continued=continued
        )


def is_resumable(output: str, *inputs: str) -> bool:
    """Return whether finished blocks can be kept: the inputs can be read again, and the output is an ordinary file.

    Raises: ConfigError: the folder of the blocks is one of a model or of prepared data.
    """
    if "-" in (output, *inputs) or not inputs or not all(Path(path).is_file() for path in inputs):
        return False
    if Path(output).exists() and not Path(output).is_file():
        return False
    check_spares_folders(Path(f"{output}.shards"), is_folder=True)
    return True


@contextmanager
def telling_what_is_kept(output: str, resumable: bool) -> Iterator[None]:
    """Say where the finished part is if the command is stopped within the block."""
    try:
        yield
    except (KeyboardInterrupt, StoppedBySystem):
        if resumable and Path(f"{output}.shards").is_dir():
            kept = f"the finished part is in {output}.shards; the same command continues from there."
            echo(f"manyheads: {kept}", file=sys.stderr)
        raise


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
