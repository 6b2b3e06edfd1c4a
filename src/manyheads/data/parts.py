"""Finished parts of a long preparation, for the same command after a kill.

They are files in `OUTPUT.preparing/` until the output is complete. The name of a part is the SHA-256 of all that it is
made of, so that other options, changed inputs and other versions never get it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import tokenizers

from manyheads.data.progress import Progress
from manyheads.errors import ConfigError, ManyHeadsError
from manyheads.files.commit import make_folder, remove_folder, write_file, write_text
from manyheads.files.guarded import read_limited
from manyheads.files.locks import locked

VERSION = "1"  # raise it if the same input gives other parts
MARK = "README.txt"
ABOUT = "Finished parts of `manyheads prepare`. The same command continues from them, and removes them at its end.\n"
MOST_BYTES = 2**30
_DIGEST_BYTES = 32


def parts_folder(output: Path) -> Path:
    """Return the folder of the parts of an output."""
    return output.absolute().with_name(f"{output.name}.preparing")


class Parts:
    """The folder of finished parts, made with the first of them.

    It is removed at the end of the block, also after an error that names a cause. It stays after a kill or a signal.

    Args: output: the folder that is prepared. progress: told how many parts were found.
    """

    def __init__(self, output: Path, progress: Progress) -> None:
        self._folder, self._output, self._progress = parts_folder(output), output, progress
        self._held = ExitStack()
        self._is_claimed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held, suppress(ManyHeadsError):
            if kind is None and not self._is_claimed and (self._folder / MARK).is_file():
                self._claim()
            if self._is_claimed and (kind is None or issubclass(kind, ManyHeadsError)):
                remove_folder(self._folder)

    def kept(self, made_of: Iterable[str], make: Callable[[], bytes]) -> bytes:
        """Return a part: the one that an earlier command has left, or else the result of `make`, which is kept.

        Args: made_of: everything that determines the result, besides the versions of the code.

        Raises: ConfigError: the folder is not one of parts, or another command uses it. SaveError: see `write_file`.
        """
        if not self._is_claimed:
            self._claim()
        name = hashlib.sha256()
        for text in (VERSION, tokenizers.__version__, *made_of):
            name.update(f"{len(text)}:{text}".encode())
        path = self._folder / name.hexdigest()
        with suppress(OSError):
            found = read_limited(path, MOST_BYTES)
            if found[:_DIGEST_BYTES] == hashlib.sha256(found[_DIGEST_BYTES:]).digest():
                return found[_DIGEST_BYTES:]
        content = make()
        write_file(path, hashlib.sha256(content).digest() + content)
        return content

    def _claim(self) -> None:
        def in_use(owner: str) -> ConfigError:
            return ConfigError(
                f"process {owner} prepares {self._output} at the moment; wait, or choose another folder."
            )

        if self._folder.exists() and not (self._folder / MARK).is_file():
            raise ConfigError(
                f"{self._folder} would keep finished parts, but it holds something else; move it, or choose another"
                " output."
            )
        make_folder(self._folder)
        write_text(self._folder / MARK, ABOUT)
        self._held.enter_context(locked(self._folder / ".lock", in_use))
        self._is_claimed = True
        if found := sum(len(path.name) == 2 * _DIGEST_BYTES for path in self._folder.iterdir()):
            self._progress(f"finished parts found in {self._folder}", found, found)
