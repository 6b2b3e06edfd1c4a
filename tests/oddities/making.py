"""Files that are odd as files: a way to each, made afresh in a folder for every command."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from io import BytesIO, TextIOWrapper
from pathlib import Path
from unittest import mock

__all__ = ["Make", "at", "closed_stdin", "fifo", "link", "link_to_itself", "stdin", "unreadable", "written"]

Make = Callable[[Path, ExitStack], tuple[str, str]]
"""Makes what a command is to read. Returns: the source's path and the target's."""

NOBODY = 65534


def written(source: bytes, target: bytes, names: tuple[str, str] = ("odd.en", "odd.de")) -> Make:
    """Two plain files."""

    def make(folder: Path, stack: ExitStack) -> tuple[str, str]:
        paths = tuple(os.path.join(folder, name) for name in names)  # noqa: PTH118  (a name may be no Unicode)
        for path, content in zip(paths, (source, target), strict=True):
            Path(path).write_bytes(content)
        return paths[0], paths[1]

    return make


def at(source: str, target: str) -> Make:
    """Paths as they are, `{}` for the folder; nothing is written."""
    return lambda folder, stack: (source.format(folder), target.format(folder))


def link(source: bytes, target: bytes) -> Make:
    """The source behind a symbolic link."""

    def make(folder: Path, stack: ExitStack) -> tuple[str, str]:
        first, second = written(source, target)(folder, stack)
        (folder / "link.en").symlink_to(first)
        return str(folder / "link.en"), second

    return make


def link_to_itself(folder: Path, stack: ExitStack) -> tuple[str, str]:
    """A loop of symbolic links."""
    (folder / "odd.en").symlink_to(folder / "odd.de")
    (folder / "odd.de").symlink_to(folder / "odd.en")
    return str(folder / "odd.en"), str(folder / "odd.de")


def fifo(source: bytes, target: bytes) -> Make:
    """The source comes through a named pipe, from a thread that writes it once."""

    def make(folder: Path, stack: ExitStack) -> tuple[str, str]:
        _, second = written(b"", target)(folder, stack)
        path = folder / "fifo.en"
        os.mkfifo(path)

        def write() -> None:
            try:
                path.write_bytes(source)
            except OSError:  # nobody wanted it
                return

        writer = threading.Thread(target=write, daemon=True)
        writer.start()

        def close() -> None:
            if writer.is_alive():  # it waits for a reader, which never came
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            writer.join()

        stack.callback(close)
        return str(path), second

    return make


def stdin(source: bytes, target: bytes) -> Make:
    """The source is standard input."""

    def make(folder: Path, stack: ExitStack) -> tuple[str, str]:
        _, second = written(b"", target)(folder, stack)
        stream = TextIOWrapper(BytesIO(source), encoding="utf-8")
        stack.enter_context(mock.patch.object(sys, "stdin", stream))
        return "-", second

    return make


def closed_stdin(target: bytes) -> Make:
    """Standard input is closed, as by `<&-`."""

    def make(folder: Path, stack: ExitStack) -> tuple[str, str]:
        _, second = written(b"", target)(folder, stack)
        stack.enter_context(mock.patch.object(sys, "stdin", None))
        return "-", second

    return make


def unreadable(source: bytes, target: bytes) -> Make:
    """The source may not be read. As root may read everything, it becomes nobody for the time of the command."""

    def make(folder: Path, stack: ExitStack) -> tuple[str, str]:
        first, second = written(source, target)(folder, stack)
        Path(first).chmod(0)
        if os.geteuid() == 0:
            folder.chmod(0o777)
            os.seteuid(NOBODY)
            stack.callback(os.seteuid, 0)
        return first, second

    return make
