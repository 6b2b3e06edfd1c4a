"""Whole texts, binary files and images as training data for language models, and the forms of published corpora.

Papers: WikiText, Merity et al. 2016, arXiv:1609.07843; enwik8 and text8, Mahoney 2006 (splits as in Al-Rfou et
al. 2018, arXiv:1808.04444); Penn Treebank, Mikolov et al. 2010 (10,000 words, others <unk>); One Billion Word
Benchmark, Chelba et al. 2013, arXiv:1312.3005. Nothing is downloaded; the files must be on disk, plain or gzip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from manyheads.data.lines import OnBadUtf8, ReadReport, decoded_lines, describe, read_chunks, refuse_packed
from manyheads.data.preparing import Holdout
from manyheads.errors import ConfigError, DataError
from manyheads.files.safe_open import open_regular
from manyheads.installation import needing_extra
from manyheads.text.settings import ITEM_BYTES

BLOCK_BYTES = 2**20
MOST_NAMED = 3
LONGEST_MAGIC = 16  # number of first bytes that identify a packed file


class Text(Protocol):
    """The input of a split of a language model's data: `TextFiles` or `TextBlock`."""

    def read(self, *, as_bytes: bool, report: ReadReport | None = None) -> Iterator[tuple[bytes, bool]]:
        """Yield blocks of bytes in order, and whether a file ends with each.

        Args:
            as_bytes: the unchanged bytes; otherwise lines of UTF-8, each with its "\\n".
            report: counts lines that are not UTF-8.
        """

    def describe(self) -> str: ...


@dataclass(frozen=True)
class TextBlock:
    """A text in memory, with a name for the manifest; it counts as one file."""

    name: str
    content: bytes

    def read(self, *, as_bytes: bool, report: ReadReport | None = None) -> Iterator[tuple[bytes, bool]]:
        """Yield all of it. The content is UTF-8 in either case; as lines, a last line gets its line break."""
        content = self.content if as_bytes or self.content.endswith(b"\n") else self.content + b"\n"
        yield content, True

    def describe(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files in a given order.

    Args: paths: at least one; `-` is standard input.

    Raises: ConfigError: there is no path, or standard input is named twice.
    """

    paths: Sequence[str | Path]
    needed: ClassVar[str] = "A text needs at least one file."

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError(self.needed)
        if [str(path) for path in self.paths].count("-") > 1:
            raise ConfigError("Standard input can be read once, but two files are -.")

    def describe(self) -> str:
        """Return the names of the files, for messages and manifests: the first few, and the number of others."""
        names = [describe(path) for path in self.paths[:MOST_NAMED]]
        more = f" and {len(self.paths) - MOST_NAMED} more" if len(self.paths) > MOST_NAMED else ""
        return " + ".join(names) + more


@dataclass(frozen=True, kw_only=True)
class TextFiles(Files):
    """The text of files, plain or gzip.

    Args:
        paths: see `Files`.
        on_bad_utf8: for lines that are not UTF-8: `fail`, `replace` bad bytes by U+FFFD, or `skip` the line; counted.
            Not used if the bytes are read unchanged.
    """

    on_bad_utf8: OnBadUtf8 = "fail"

    def read(self, *, as_bytes: bool, report: ReadReport | None = None) -> Iterator[tuple[bytes, bool]]:
        """See `Text.read`.

        Raises: DataError: a file cannot be read or decoded; file, line and byte offset are named.
        """
        report = report if report is not None else ReadReport()
        for path in self.paths:
            blocks = _unchanged(path) if as_bytes else self._lines(path, report)
            for block in blocks:
                yield block, False
            yield b"", True

    def _lines(self, path: str | Path, report: ReadReport) -> Iterator[bytes]:
        block: list[bytes] = []
        size = 0
        for line in decoded_lines(path, self.on_bad_utf8, report):
            if line is None:
                report.bad_utf8_skipped += 1
                continue
            block.append(line.encode("utf-8") + b"\n")
            size += len(block[-1])
            if size >= BLOCK_BYTES:
                yield b"".join(block)
                block, size = [], 0
        if block:
            yield b"".join(block)


def _unchanged(path: str | Path) -> Iterator[bytes]:
    head = b""
    chunks = read_chunks(path)
    while len(head) < LONGEST_MAGIC and (chunk := next(chunks, b"")):  # a first block can be two bytes long
        head += chunk
    refuse_packed(head[:LONGEST_MAGIC], describe(path))
    yield head
    yield from chunks


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


_BILLION = "1-billion-word-language-modeling-benchmark-r13output"
_HELD_OUT = "heldout-monolingual.tokenized.shuffled/news.en.heldout"
_TRAINING = "training-monolingual.tokenized.shuffled/news.en"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A corpus.

    Args:
        files: for each split the possible names of its files, in the order of preference; `*` matches several files.
        vocabulary: fields of `VocabularySettings` for this corpus.
        holdout: the part of a single file that is validation and test text.
        tokens: number of tokens of each split in the literature.
        inside: subfolders that can contain the files.
    """

    files: Mapping[str, tuple[str, ...]]
    vocabulary: Mapping[str, Any]
    holdout: Holdout | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    inside: tuple[str, ...] = ()


@dataclass(frozen=True)
class FoundLayout:
    """The files of a layout on this disk."""

    layout: Layout
    paths: Mapping[str, list[Path]]


def _wikitext(tokens: int) -> Layout:
    return Layout(
        files={split: (f"wiki.{split}.tokens", f"{split}.txt") for split in ("train", "valid", "test")},
        vocabulary={"level": "words"},
        tokens={"train": tokens, "valid": 217_646, "test": 245_569},
    )


def _hundred_million(name: str) -> Layout:
    return Layout(
        files={"train": (name,)},
        vocabulary={"level": "bytes"},
        holdout=Holdout(valid=5_000_000, test=5_000_000, whole=100_000_000),
        tokens={"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000},
    )


LAYOUTS: dict[str, Layout] = {
    "wikitext-2": _wikitext(2_088_628),
    "wikitext-103": _wikitext(103_227_021),
    "ptb": Layout(
        files={split: (f"ptb.{split}.txt", f"{split}.txt") for split in ("train", "valid", "test")},
        vocabulary={"level": "words"},
        tokens={"train": 929_589, "valid": 73_760, "test": 82_430},
        inside=("simple-examples/data", "data"),
    ),
    "enwik8": _hundred_million("enwik8"),
    "text8": _hundred_million("text8"),
    # The official script uses one held-out file as both validation and test text; here they are two files.
    "lm1b": Layout(
        files={
            "train": (f"{_TRAINING}-*-of-00100",),
            "valid": (f"{_HELD_OUT}-00001-of-00050",),
            "test": (f"{_HELD_OUT}-00000-of-00050",),
        },
        vocabulary={"level": "words", "documents": "lines", "line_end": "<S>", "min_count": 3},
        inside=(_BILLION,),
    ),
}


def find_layout(name: str, path: str | Path) -> FoundLayout:
    """Return the files of a corpus.

    Args:
        name: one of `LAYOUTS`.
        path: the folder that contains them, or the file if the corpus is one file.

    Raises: DataError: a file is missing; the message gives the names that were tried.
    """
    layout, path = LAYOUTS[name], Path(path)
    if path.exists() and not path.is_dir() and len(layout.files) == 1:
        return FoundLayout(layout, {"train": [path]})
    folders = [path, *(path / inside for inside in layout.inside)]
    paths: dict[str, list[Path]] = {}
    for split, names in layout.files.items():
        wanted = [wanted for plain in names for wanted in (plain, f"{plain}.gz")]
        tried = (sorted(folder.glob(one)) for folder in folders for one in wanted)
        paths[split] = next((found for found in tried if found), [])
        if not paths[split]:
            raise DataError(
                f"{path} does not hold {name}: there is no {' or '.join(wanted)} in it. Unpack the corpus there, name"
                " its folder, or give the files by --corpus, --valid-corpus and --test-corpus without --layout."
            )
    return FoundLayout(layout, paths)
