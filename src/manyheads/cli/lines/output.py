"""Output of results to standard output or a file: lines of UTF-8 that end in "\\n" on every system."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from manyheads.cli.printing import say
from manyheads.data.lines import describe
from manyheads.errors import CheckpointError, ConfigError, DataError, SaveError
from manyheads.files.output_safety import check_spares_folders

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
    from manyheads.files.locks import take

    file = path.open("ab")  # emptied only when nobody else writes it
    if not take(file.fileno()):
        file.close()
        raise ConfigError(f"another command writes {path} at the moment; wait for it, or choose another output.")
    if os.fstat(file.fileno()).st_size:
        say(f"manyheads: {describe(str(path))} existed already and is replaced.", file=sys.stderr)
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
