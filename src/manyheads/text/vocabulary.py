"""The vocabulary of a language model: conversion between one text of any length and ids.

There are three levels with one file each, `bytes`, `bpe` and `words`; `symbols` for a list of another implementation;
and `ids` for data that is not text. Each is stored in one tokenizer.json, which contains no code. This file contains
the common part: a text consists of lines, a document can end, and ids decode to bytes.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

from manyheads.text.pipeline import LANGUAGE_FORMAT
from manyheads.text.tokenizer_file import TokenizerFile

__all__ = ["FORMAT_VERSION", "Documents", "Vocabulary"]

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
    """

    kind: ClassVar[Literal["bytes", "bpe", "words", "symbols", "ids"]]

    documents: Documents
    line_id: int
    end_id: int | None
    unk_id: int | None
    document_len: int = 0
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
