"""Every change that a block of code makes below a folder, seen, refused or cut off: the layer under R1, R2 and R3.

`Watch` stands between Python and the operating system (`os` functions, `open`, and the one system call that
`data.preparing` makes by itself). It records the changes with their bytes, so that a crash after any of them can be
replayed; and it asks `before` first, which may raise an OSError or kill the process.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from manyheads.files import commit

HAS_PROC = Path("/proc/self/fd").exists()
REAL_OPEN = io.open
_CALLS = ("open", "fsync", "rename", "replace", "mkdir", "unlink", "remove", "rmdir", "ftruncate", "truncate", "pwrite")


@dataclass(frozen=True)
class Operation:
    """One change. kind: open (of a file, for reading), create (or empty it), write, truncate, fsync, rename, swap,
    mkdir, unlink, rmdir. target: of rename and swap. offset, data: of write; offset is the size for truncate."""

    kind: str
    path: Path
    target: Path | None = None
    offset: int = 0
    data: bytes = b""


class Watch:
    """Context manager: what happens below `root` inside the block.

    Args:
        root: other places are left alone.
        before: called with each operation, and its number from 0, before it is done.

    Attributes: operations: those that were done, in order.
    """

    def __init__(self, root: Path, before: Callable[[int, Operation], None] | None = None) -> None:
        self.root = root.resolve()
        self.operations: list[Operation] = []
        self.count = 0
        self._before = before
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Watch:
        for name in _CALLS:
            self._patch.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))
        self._patch.setattr(io, "open", self._open_file)
        self._patch.setattr(builtins, "open", self._open_file)
        self._patch.setattr(commit, "swap", self._swap(commit.swap))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patch.undo()

    def do(self, operation: Operation, act: Callable[[], Any]) -> Any:
        """Announce, act, record."""
        if not operation.path.is_relative_to(self.root):
            return act()
        number, self.count = self.count, self.count + 1
        if self._before is not None:
            self._before(number, operation)
        result = act()
        self.operations.append(operation)
        return result

    def path_of(self, path: Any, dir_fd: int | None = None) -> Path:
        """Absolute, links in its folder resolved."""
        if isinstance(path, int):
            return Path(f"/proc/self/fd/{path}").readlink()
        whole = Path(os.fsdecode(path))
        if dir_fd is not None:
            whole = self.path_of(dir_fd) / whole
        return whole.parent.resolve() / whole.name

    def _simple(self, kind: str) -> Callable[[Any], Any]:
        def patch(real: Any) -> Any:
            def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
                if dir_fd is not None:
                    kwargs["dir_fd"] = dir_fd
                return self.do(Operation(kind, self.path_of(path, dir_fd)), lambda: real(path, *args, **kwargs))

            return call

        return patch

    def __getattr__(self, name: str) -> Any:
        kinds = {"_mkdir": "mkdir", "_unlink": "unlink", "_remove": "unlink", "_rmdir": "rmdir", "_fsync": "fsync"}
        if name not in kinds:
            raise AttributeError(name)
        return self._simple(kinds[name])

    def _open(self, real: Any) -> Any:
        def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            place = self.path_of(path, dir_fd)
            fresh = flags & os.O_TRUNC or (flags & os.O_CREAT and not place.exists())
            kind = "create" if fresh else "open"
            opened: int = self.do(Operation(kind, place), lambda: real(path, flags, mode, dir_fd=dir_fd))
            return opened

        return call

    def _rename(self, real: Any) -> Any:
        def call(old: Any, new: Any, **kwargs: Any) -> None:
            self.do(Operation("rename", self.path_of(old), self.path_of(new)), lambda: real(old, new, **kwargs))

        return call

    _replace = _rename

    def _swap(self, real: Any) -> Any:
        def call(new: Path, old: Path) -> bool:
            done: bool = self.do(Operation("swap", self.path_of(new), self.path_of(old)), lambda: real(new, old))
            return done

        return call

    def _ftruncate(self, real: Any) -> Any:
        def call(handle: Any, size: int) -> None:
            self.do(Operation("truncate", self.path_of(handle), offset=size), lambda: real(handle, size))

        return call

    _truncate = _ftruncate

    def _pwrite(self, real: Any) -> Any:
        def call(handle: int, data: bytes, offset: int) -> int:
            written: int = self.do(
                Operation("write", self.path_of(handle), offset=offset, data=bytes(data)),
                lambda: real(handle, data, offset),
            )
            return written

        return call

    def _open_file(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """As `open`; what is opened for writing gets a raw file whose writes are seen."""
        if isinstance(file, int) or not self.path_of(file).is_relative_to(self.root):
            return REAL_OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
        place = self.path_of(file)
        if not set(mode) & set("wax+"):
            if opener is not None:  # it calls os.open, which is watched
                return REAL_OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
            return self.do(
                Operation("open", place), lambda: REAL_OPEN(file, mode, buffering, encoding, errors, newline)
            )
        raw_mode = mode.replace("b", "").replace("t", "")
        kind = "create" if "w" in mode or "x" in mode or not place.exists() else "open"
        if opener is not None:
            raw = _Raw(file, raw_mode, opener=opener)
        else:
            raw = self.do(Operation(kind, place), lambda: _Raw(file, raw_mode))
        raw.watch, raw.place, raw.appends = self, place, "a" in mode
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)


class _Raw(io.FileIO):
    """A file that tells its `watch` before it writes."""

    watch: Watch
    place: Path
    appends: bool

    def write(self, data: Any) -> int:
        content = bytes(data)
        offset = os.fstat(self.fileno()).st_size if self.appends else self.tell()
        real = super().write
        written: int = self.watch.do(Operation("write", self.place, offset=offset, data=content), lambda: real(content))
        return written

    def truncate(self, size: int | None = None) -> int:
        real = super().truncate
        wanted = self.tell() if size is None else size
        done: int = self.watch.do(Operation("truncate", self.place, offset=wanted), lambda: real(wanted))
        return done


class Faults:
    """For `Watch(before=...)`: an error at the chosen operation, or at it and all after it.

    Args:
        number: of the operation, from 0; -1 never.
        code: errno.
        lasting: the disk does not recover.
    """

    def __init__(self, number: int, code: int, *, lasting: bool = False) -> None:
        self.number, self.code, self.lasting = number, code, lasting
        self.struck: list[Operation] = []

    def __call__(self, number: int, operation: Operation) -> None:
        if number == self.number or (self.lasting and 0 <= self.number < number):
            self.struck.append(operation)
            raise OSError(self.code, os.strerror(self.code), str(operation.path))
