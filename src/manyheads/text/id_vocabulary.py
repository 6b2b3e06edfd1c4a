"""A vocabulary of numbers from binary files, such as images, sound or events, which do not stand for text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from manyheads.errors import DataError
from manyheads.text.settings import ITEM_BYTES
from manyheads.text.vocabulary import Documents, Vocabulary

__all__ = ["CHANNELS", "IdVocabulary"]

CHANNELS = 3


class IdVocabulary(Vocabulary):
    """Ids 0 to num_ids - 1 are the numbers themselves. With documents, one more id begins a document.

    Args:
        num_ids: upper bound (exclusive) of the ids in the files.
        form: encoding of an id in the files: `bytes` (uint8), or `u16` (uint16, little-endian).
        documents: `none`, `files`, or `fixed`: all documents have the same length, so no token marks their end.
        document_len: that length, in ids.
        image_size: side of the square images in pixels, in raster order, three bytes per pixel; 0: the ids are not
            images.

    Raises: DataError: the numbers contradict one another.
    """

    kind = "ids"
    unk_id = None
    is_text = False

    def __init__(
        self,
        num_ids: int,
        form: Literal["bytes", "u16"] = "bytes",
        documents: Documents = "none",
        *,
        document_len: int = 0,
        image_size: int = 0,
    ) -> None:
        most = 256 ** ITEM_BYTES[form]
        if not 1 <= num_ids <= most:
            raise DataError(f"the number of ids is {num_ids}; in the form {form!r} it must be from 1 to {most:,}.")
        if documents == "lines" or (documents == "fixed") != (document_len > 0) or document_len < 0:
            raise DataError(
                f"documents is {documents!r} and document_len is {document_len}; documents of ids cannot be 'lines',"
                " and document_len is above 0 if documents is 'fixed', and 0 otherwise."
            )
        if image_size and (document_len != CHANNELS * image_size**2 or (num_ids, form) != (256, "bytes")):
            raise DataError(
                f"image_size is {image_size}; each image must be a document of {CHANNELS * image_size**2} bytes."
            )
        self.num_ids = num_ids
        self.form: Literal["bytes", "u16"] = form
        self.documents = documents
        self.document_len = document_len
        self.image_size = image_size
        self.end_id = num_ids if documents == "files" else None
        self.line_id = 0 if documents == "none" else num_ids

    @property
    def vocab_size(self) -> int:
        """num_ids, or num_ids + 1 with documents."""
        return self.num_ids + (self.begin_id is not None)

    @property
    def begin_id(self) -> int | None:
        """The id that is read before a document. It also ends a document, unless all have the same length."""
        return None if self.documents == "none" else self.num_ids

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Return nothing for empty lines. Raises: DataError: a line contains text."""
        if any(lines):
            raise DataError(
                "This model reads numbers, not text; give it ids from a file: manyheads generate MODEL --input FILE."
            )
        return [[] for _ in lines]

    def read_ids(self, content: bytes, name: str = "The content") -> list[int]:
        """Return the ids in a file's content.

        Args: name: the name of the content in messages.

        Raises: DataError: the content ends within an id, or an id is outside the vocabulary.
        """
        size = ITEM_BYTES[self.form]
        if len(content) % size:
            raise DataError(
                f"{name} has {len(content):,} bytes, which is not a multiple of {size}, the size of an id. Is it"
                " incomplete?"
            )
        ids = np.frombuffer(content, self.dtype)
        above = np.flatnonzero(ids >= self.num_ids)
        if len(above):
            raise DataError(
                f"{name} has the id {ids[above[0]]} at index {above[0]:,}; ids of this vocabulary are 0 to"
                f" {self.num_ids - 1:,}."
            )
        return [int(index) for index in ids]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type of an id in a file."""
        return np.dtype("u1" if self.form == "bytes" else "<u2")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of a file with these ids; ids that begin or end a document give nothing."""
        known = np.array([index for index in self._checked(ids) if index < self.num_ids], self.dtype)
        return known.tobytes()

    def picture(self, ids: Sequence[int]) -> NDArray[np.uint8]:
        """Return the pixels of an image, (image_size, image_size, 3). Missing pixels at the end stay black.

        Raises: DataError: the ids are not images, or there are more than one image has.
        """
        content = self.decode_bytes(ids)
        if not self.image_size or len(content) > self.document_len:
            raise DataError(
                f"{len(content):,} bytes are not an image of this vocabulary, whose images have {self.document_len:,}."
            )
        pixels = np.frombuffer(content.ljust(self.document_len, b"\0"), np.uint8)
        return pixels.reshape(self.image_size, self.image_size, CHANNELS)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the numbers as text, and `<eod>` for the id that begins and ends documents."""
        return [str(index) if index < self.num_ids else "<eod>" for index in self._checked(ids)]

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        return self._render(
            num_ids=self.num_ids, form=self.form, document_len=self.document_len, image_size=self.image_size
        )

    def describe(self) -> dict[str, object]:
        """Return the properties to show to users."""
        sizes = {"document_len": self.document_len, "image_size": self.image_size}
        return {**super().describe(), "form": self.form, **{name: size for name, size in sizes.items() if size}}
