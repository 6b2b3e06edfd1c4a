"""The vocabulary of a language model: conversion between one text of any length and ids.

There are three levels with one file each, `bytes`, `bpe` and `words`; `symbols` for a list of another implementation;
and `ids` for data that is not text. Each is stored in one tokenizer.json, which contains no code. This file contains
the common part: a text consists of lines, a document can end, and ids decode to bytes. It also contains the
vocabularies of bytes, where id n is byte n, so that no text is unknown and decoding restores every file exactly, and of
numbers from binary files, such as images, sound or events, which do not stand for text.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from manyheads.errors import DataError
from manyheads.text.pipeline import LANGUAGE_FORMAT, TokenizerFile, check_encodable
from manyheads.text.settings import ITEM_BYTES

FORMAT_VERSION = 1
Documents = Literal["none", "files", "lines", "fixed"]


class Vocabulary(TokenizerFile):
    """Conversion between text and ids for a language model; immutable.

    Attributes:
        kind: `bytes`, `bpe`, `words`, `symbols`, or `ids` for data that is not text.
        documents: what counts as a document (see `VocabularySettings` and `IdSettings`).
        line_id: id of a line break.
        end_id: id of the end of a document; None without documents. If documents are lines, it equals `line_id`.
        unk_id: id of unknown words; None if no text is unknown.
        is_text: whether ids stand for readable text.
        reads_bytes: whether any bytes can be encoded; otherwise a file must hold UTF-8.
        document_len: number of tokens of each document if all have the same number, otherwise 0.
        in_pieces: the `Tokenizer` whose ids these are; None: there is none.
    """

    kind: ClassVar[Literal["bytes", "bpe", "words", "symbols", "ids"]]

    documents: Documents
    line_id: int
    end_id: int | None
    unk_id: int | None
    document_len: int = 0
    in_pieces: Any | None = None
    is_text: ClassVar[bool] = True
    reads_bytes: bool = False

    @property
    def begin_id(self) -> int | None:
        """The id that is read before the first token of a document, the end of a document; None without documents."""
        return self.end_id

    @property
    def start_id(self) -> int:
        """The id that is read before a text without context: the end of a document, or of a line."""
        return self.line_id if self.begin_id is None else self.begin_id

    @abstractmethod
    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each line, without an id for its line break.

        Args: lines: without "\\n".

        Raises: DataError: a line contains an unpaired surrogate.
        """

    def encode_many(self, lines: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return all ids that `encode_lines` gives, in a row, and the number of ids of each line."""
        lists = self.encode_lines(lines)
        return np.fromiter(chain.from_iterable(lists), np.int32), np.array([*map(len, lists)], np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text. A last line without a line break gets no id for one.

        Raises: DataError: a text contains an unpaired surrogate.
        """
        split = [text.split("\n") for text in texts]
        known = iter(self.encode_lines([line for lines in split for line in lines]))
        return [_joined([next(known) for _ in lines], self.line_id) for lines in split]

    def encode_content(self, content: bytes) -> list[int]:
        """Return the ids of a file's content. Raises: DataError, UnicodeDecodeError: it cannot be encoded."""
        return self.encode(content.decode("utf-8"))

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of the ids, even if they are not complete characters.

        Raises: DataError: an id is outside the vocabulary.
        """

    def spaced_ids(self) -> tuple[list[int], list[int]]:
        """Return the ids of pieces that are only spaces, and of those that begin with a space before other text.

        In a text nearly every space belongs to the word after it. A vocabulary without such pieces has none of both.
        """
        return [], []

    def continuation(self, before: Sequence[int], ids: Sequence[int]) -> bytes:
        """Return the bytes that `ids` add after `before`: `decode_bytes(before + ids)` without the bytes of `before`.

        Cost: proportional to the number of new ids plus the preceding ids without visible text, so a text can be shown
            token by token.
        """
        last: list[int] = []
        for index in reversed(before):  # an id without bytes does not determine whether a new line begins after it
            last.insert(0, index)
            if self.decode_bytes([index]):
                break
        return self.decode_bytes([*last, *ids])[len(self.decode_bytes(last)) :]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids; incomplete characters become U+FFFD.

        Raises: DataError: an id is outside the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of ids, see `decode`."""
        return [self.decode(ids) for ids in batch]

    @abstractmethod
    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return a readable form of each id, on one line.

        Raises: DataError: an id is outside the vocabulary.
        """

    def describe(self) -> dict[str, object]:
        """Return the properties to show to users."""
        return {"vocab_size": self.vocab_size, "documents": self.documents}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vocab_size} ids, documents={self.documents}, {self.digest[:12]})"

    def _render(self, **content: Any) -> str:
        head = {
            "format": LANGUAGE_FORMAT,
            "format_version": FORMAT_VERSION,
            "level": self.kind,
            "documents": self.documents,
        }
        return json.dumps({**head, **content}, ensure_ascii=False, indent=1) + "\n"


def _joined(parts: Iterable[list[int]], between: int) -> list[int]:
    ids: list[int] = []
    for number, part in enumerate(parts):
        if number:
            ids.append(between)
        ids += part
    return ids


NUM_BYTES = 256


class ByteVocabulary(Vocabulary):
    """Ids 0 to 255 are bytes. With documents, id 256 ends a document.

    Args: documents: what counts as a document.
    """

    kind = "bytes"
    unk_id = None
    reads_bytes = True

    def __init__(self, documents: Documents = "none") -> None:
        self.documents = documents
        self.end_id = None if documents == "none" else NUM_BYTES
        self.line_id = NUM_BYTES if documents == "lines" else ord("\n")

    @property
    def vocab_size(self) -> int:
        """256, or 257 with documents."""
        return NUM_BYTES + (self.end_id is not None)

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the UTF-8 bytes of each line. Raises: DataError: a line contains an unpaired surrogate."""
        check_encodable(lines)
        return [list(line.encode("utf-8")) for line in lines]

    def encode_content(self, content: bytes) -> list[int]:
        """Return the bytes."""
        return list(content)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes. The end of a document gives "\\n" if documents are lines, otherwise nothing."""
        end = b"\n" if self.documents == "lines" else b""
        return b"".join(bytes([index]) if index < NUM_BYTES else end for index in self._checked(ids))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return visible ASCII as it is, a space as `▁`, other bytes as `<0xE2>`, the end of a document as `<eod>`."""
        return [_shown(index) for index in self._checked(ids)]

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        return self._render()


def _shown(index: int) -> str:
    if index == NUM_BYTES:
        return "<eod>"
    if index == ord(" "):
        return "▁"
    return chr(index) if 32 < index < 127 else f"<0x{index:02X}>"


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
                "This model reads numbers, not text; give it ids.",
                in_command="From a file: manyheads generate MODEL --input FILE.",
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
