"""Binary files and pictures as sources of ids for models of what is no text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np

from manyheads.data.lines import describe
from manyheads.errors import ConfigError, DataError, MissingExtraError
from manyheads.text.settings import ITEM_BYTES

__all__ = ["IdSource", "Pictures", "RawFiles"]

BLOCK_BYTES = 2**20
MOST_NAMED = 3
PACKED = (".gz", ".xz", ".bz2", ".zip", ".zst")


class IdSource(Protocol):
    """Where a split's ids come from: `RawFiles` or `Pictures`."""

    def read(self) -> Iterator[tuple[str, bytes, bool]]:
        """A file's name, some of its bytes, and whether it ends with them."""
        ...

    def describe(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class RawFiles:
    """The bytes of some files as they are, in the order given.

    Args:
        paths: at least one; `-` is standard input.
        form: of the ids in them: `bytes` or `u16`.

    Raises: ConfigError: there is no path, standard input is named twice, or a file is packed by its name.
    """

    paths: Sequence[str | Path]
    form: str = "bytes"

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("Ids need at least one file.")
        if [str(path) for path in self.paths].count("-") > 1:
            raise ConfigError("Standard input can be read once, but two files are -.")
        packed = next((str(path) for path in self.paths if str(path).endswith(PACKED)), None)
        if packed is not None:
            raise ConfigError(f"{packed} is packed, and would be learned as it is packed; unpack it first.")

    def read(self) -> Iterator[tuple[str, bytes, bool]]:
        """See `IdSource.read`.

        Raises: DataError: a file cannot be read, or ends within an id.
        """
        for path in self.paths:
            name, size = describe(path), 0
            for block in self._blocks(path, name):
                size += len(block)
                yield name, block, False
            if size % ITEM_BYTES[self.form]:
                raise DataError(
                    f"{name} has {size:,} bytes, no whole number of ids of {ITEM_BYTES[self.form]} bytes each. Is it"
                    " cut off, or are its ids bytes (--format bytes)?"
                )
            yield name, b"", True

    def _blocks(self, path: str | Path, name: str) -> Iterator[bytes]:
        try:
            if str(path) == "-":
                if sys.stdin is None:
                    raise DataError("Standard input is closed; name a file, or give the ids through a pipe.")
                yield from _parts(cast(IO[bytes], sys.stdin.buffer))
            else:
                with Path(path).open("rb") as file:
                    yield from _parts(file)
        except IsADirectoryError:
            raise DataError(f"{name} is a directory; a file of ids was expected (pictures: --layout images).") from None
        except (OSError, ValueError) as error:
            raise DataError(f"Cannot read {name}: {getattr(error, 'strerror', None) or error}.") from None

    def describe(self) -> str:
        """The files' names, for messages and manifests; of many the first few and their number."""
        return _named([describe(path) for path in self.paths])


def _parts(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Square RGB pictures as bytes: row by row, pixel by pixel, red, green and blue (raster order).

    Grey and palette pictures become RGB; how transparent a pixel is does not count.

    Args:
        paths: PNG files, and folders, of which every `*.png` at any depth is taken, in the order of their names.
        size: pixels a side.
        resize: cut the middle square out of pictures of other sizes and scale it, each new pixel being the mean of
            those below it; without it they are refused.

    Raises: ConfigError: there is no path, or the size is none.
    """

    paths: Sequence[str | Path]
    size: int
    resize: bool = False

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("Pictures need a folder of PNG files, or files.")
        if self.size < 1:
            raise ConfigError(f"--image-size is {self.size}; give pixels a side, such as 64.")

    def read(self) -> Iterator[tuple[str, bytes, bool]]:
        """See `IdSource.read`; one block a picture.

        Raises: DataError: a picture is missing, damaged, or of another size. MissingExtraError: Pillow is not there.
        """
        try:
            from PIL import Image
        except ImportError as error:
            raise MissingExtraError("Reading pictures needs Pillow: pip install 'manyheads[images]'.") from error
        for path in self._files():
            try:
                with Image.open(path, formats=["PNG"]) as image:
                    content = self._pixels(image, path)
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                raise DataError(f"{path} cannot be read as a PNG picture: {error}.") from None
            yield str(path), content, True

    def _files(self) -> Iterator[Path]:
        for given in map(Path, self.paths):
            if not given.exists():
                raise DataError(f"There is no file or folder {given}; name a folder of PNG pictures.")
            found = sorted(given.rglob("*.png")) if given.is_dir() else [given]
            if not found:
                raise DataError(f"There is no *.png in {given} or below; name a folder of PNG pictures.")
            yield from found

    def _pixels(self, image: Any, path: Path) -> bytes:
        from PIL import Image

        width, height = image.size
        if (width, height) != (self.size, self.size):
            if not self.resize:
                raise DataError(
                    f"{path} is a picture of {width} x {height} pixels, but {self.size} x {self.size} are asked for"
                    " (--image-size); give --resize, which cuts out the middle and scales it."
                )
            side = min(width, height)
            left, top = (width - side) // 2, (height - side) // 2
            image = image.convert("RGB").crop((left, top, left + side, top + side))
            image = image.resize((self.size, self.size), Image.Resampling.BOX)
        return np.asarray(image.convert("RGB"), np.uint8).tobytes()

    def describe(self) -> str:
        """The names given."""
        return _named([str(path) for path in self.paths])


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return " + ".join(names[:MOST_NAMED]) + more
