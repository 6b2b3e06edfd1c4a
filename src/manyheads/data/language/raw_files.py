"""Binary files and images as sources of ids, for models of data that is not text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from manyheads.data.byte_lines import read_chunks
from manyheads.data.language.texts import Files
from manyheads.data.lines import describe
from manyheads.errors import ConfigError, DataError, needing_extra
from manyheads.files.guarded import open_regular
from manyheads.text.settings import ITEM_BYTES

PACKED = (".gz", ".xz", ".bz2", ".zip", ".zst")


class IdSource(Protocol):
    """The input of a split: `RawFiles` or `Pictures`."""

    def read(self) -> Iterator[tuple[str, bytes, bool]]:
        """Yield a file's name, some of its bytes, and whether it ends with them."""

    def describe(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class RawFiles(Files):
    """The unchanged bytes of files.

    Args:
        paths: see `Files`.
        form: encoding of the ids in them: `bytes` or `u16`.

    Raises: ConfigError: see `Files`; or the name of a file is that of a packed file.
    """

    form: str = "bytes"
    needed = "Ids need at least one file."

    def __post_init__(self) -> None:
        super().__post_init__()
        packed = next((str(path) for path in self.paths if str(path).endswith(PACKED)), None)
        if packed is not None:
            raise ConfigError(f"{packed} is packed, and its packed bytes would be learned; unpack it first.")

    def read(self) -> Iterator[tuple[str, bytes, bool]]:
        """See `IdSource.read`.

        Raises: DataError: a file cannot be read, or ends within an id.
        """
        for path in self.paths:
            name, size = describe(path), 0
            for block in read_chunks(path, unpack=False, expected="a file of ids (for pictures: --layout images)"):
                size += len(block)
                yield name, block, False
            if size % ITEM_BYTES[self.form]:
                raise DataError(
                    f"{name} has {size:,} bytes, which is not a multiple of {ITEM_BYTES[self.form]}, the size of an id."
                    " Is the file incomplete, or are its ids bytes (--format bytes)?"
                )
            yield name, b"", True


@dataclass(frozen=True, kw_only=True)
class Pictures(Files):
    """Square RGB images as bytes: row by row, pixel by pixel, red, green and blue (raster order).

    Grey and palette images are converted to RGB; of 16 bits the upper 8 count; transparency is ignored.

    Args:
        paths: PNG files, and folders, of which every `*.png` at any depth is read, sorted by name.
        size: side in pixels.
        resize: take the middle square of images of other sizes and scale it; each new pixel is the mean of those that
            it covers. Otherwise such images are refused.

    Raises: ConfigError: there is no path, or the size is below 1.
    """

    size: int
    resize: bool = False
    needed = "Pictures need a folder of PNG files, or files."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 1:
            raise ConfigError(f"--image-size is {self.size}; give the side in pixels, such as 64.")

    def read(self) -> Iterator[tuple[str, bytes, bool]]:
        """See `IdSource.read`; one block per picture.

        Raises:
            DataError: a picture is missing, damaged, or of another size.
            MissingExtraError: Pillow is not installed.
        """
        with needing_extra("Reading pictures needs Pillow", "images"):
            from PIL import Image, UnidentifiedImageError
        for path in self._files():
            try:
                with open_regular(path) as file, Image.open(file, formats=["PNG"]) as image:
                    content = self._pixels(image, path)
            except UnidentifiedImageError:
                raise DataError(f"{path} cannot be read as a PNG picture: its content is of another kind.") from None
            except (OSError, SyntaxError, ValueError, IndexError, Image.DecompressionBombError) as error:
                raise DataError(f"{path} cannot be read as a PNG picture: {error}.") from None
            yield str(path), content, True

    def _files(self) -> Iterator[Path]:
        for given in map(Path, self.paths):
            if not given.exists():
                raise DataError(f"There is no file or folder {given}; name a folder of PNG pictures.")
            found = [given]
            if given.is_dir():
                found = sorted(path for path in given.rglob("*") if path.suffix.lower() == ".png")
            if not found:
                raise DataError(f"There is no *.png in {given} or below; name a folder of PNG pictures.")
            yield from found

    def _pixels(self, image: Any, path: Path) -> bytes:
        from PIL import Image

        if image.mode.startswith("I"):  # 16 bits of grey; `convert` would cut them off at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        width, height = image.size
        if (width, height) != (self.size, self.size):
            if not self.resize:
                raise DataError(
                    f"{path} is a picture of {width} x {height} pixels, but --image-size is {self.size}; give"
                    " --resize, which cuts out the middle and scales it."
                )
            side = min(width, height)
            left, top = (width - side) // 2, (height - side) // 2
            image = image.convert("RGB").crop((left, top, left + side, top + side))
            image = image.resize((self.size, self.size), Image.Resampling.BOX)
        return np.asarray(image.convert("RGB"), np.uint8).tobytes()
