"""The vocabulary of a language model: one text, of any length, to ids and back.

Three levels, a file each: `bytes`, `bpe` and `words`; and `ids`, for what is no text. All are kept in one
tokenizer.json that holds no code. What they share is here: a text is lines, a document may end, and ids give back the
bytes that they stand for.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from manyheads.errors import DataError, SaveError
from manyheads.text.pipeline import LANGUAGE_FORMAT

__all__ = ["FORMAT_VERSION", "Documents", "Vocabulary"]

FORMAT_VERSION = 1
Documents = Literal["none", "files", "lines", "fixed"]


class Vocabulary(ABC):
    """Text to ids and back, for a language model; it never changes.

    Attributes:
        kind: `bytes`, `bpe`, `words`, or `ids` of what is no text.
        documents: what a document is (see `VocabularySettings` and `IdSettings`).
        line_id: stands for a line break.
        end_id: ends a document; None if there are no documents. With `lines` it is `line_id`.
        unk_id: stands for what is not known; None where everything is.
        document_len: tokens of every document, where all have the same number; 0 where they have not.
    """

    kind: ClassVar[Literal["bytes", "bpe", "words", "ids"]]

    documents: Documents
    line_id: int
    end_id: int | None
    unk_id: int | None
    document_len: int = 0

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def is_text(self) -> bool:
        """Whether ids stand for text that can be read and shown."""
        return True

    @property
    def begin_id(self) -> int | None:
        """What is read before the first token of a document: the end of another one; None without documents."""
        return self.end_id

    @property
    def start_id(self) -> int:
        """What is read before a text that nothing precedes: the end of a document, or of a line."""
        return self.line_id if self.begin_id is None else self.begin_id

    @abstractmethod
    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of each line, without any for its line break.

        Args: lines: without "\\n".

        Raises: DataError: a line holds half a surrogate pair.
        """

    def encode(self, text: str) -> list[int]:
        """The ids of a text; a last line without a line break gets none.

        Raises: DataError: the text holds half a surrogate pair.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, see `encode`."""
        split = [text.split("\n") for text in texts]
        known = iter(self.encode_lines([line for lines in split for line in lines]))
        return [_joined([next(known) for _ in lines], self.line_id) for lines in split]

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes that ids stand for, even where they are not whole characters.

        Raises: DataError: an id is outside the vocabulary.
        """

    def continuation(self, before: Sequence[int], ids: Sequence[int]) -> bytes:
        """What ids add to the bytes of those before them: `decode_bytes(before + ids)` without its beginning.

        Cost: that of the ids and one more, or as many more as show nothing; a text can be shown token by token.
        """
        last: list[int] = []
        for index in reversed(before):  # what shows nothing does not say whether a line begins after it
            last.insert(0, index)
            if self.decode_bytes([index]):
                break
        return self.decode_bytes([*last, *ids])[len(self.decode_bytes(last)) :]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; what is no whole character becomes U+FFFD.

        Raises: DataError: an id is outside the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of ids, see `decode`."""
        return [self.decode(ids) for ids in batch]

    @abstractmethod
    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each id for people to read, on one line.

        Raises: DataError: an id is outside the vocabulary.
        """

    @abstractmethod
    def to_json(self) -> str:
        """The content of tokenizer.json; `vocabularies.vocabulary_from_json` reads it."""

    def files(self) -> dict[str, bytes]:
        """tokenizer.json and its content."""
        return {"tokenizer.json": self.to_json().encode("utf-8")}

    @property
    def digest(self) -> str:
        """SHA-256 of the file's bytes, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode("utf-8")).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json (plainly: whoever commits a folder of files sees to its durability).

        Raises: SaveError: the path cannot be written.
        """
        try:
            Path(path).write_bytes(self.to_json().encode("utf-8"))
        except OSError as error:
            raise SaveError(f"Cannot write the tokenizer {path}: {error.strerror or error}.") from error

    def describe(self) -> dict[str, object]:
        """What people may want to know."""
        return {"vocab_size": self.vocab_size, "documents": self.documents}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vocab_size} ids, documents={self.documents}, {self.digest[:12]})"

    def _checked(self, ids: Sequence[int]) -> list[int]:
        known = [int(index) for index in ids]
        if known and not (min(known) >= 0 and max(known) < self.vocab_size):
            wrong = next(index for index in known if not 0 <= index < self.vocab_size)
            raise DataError(f"Id {wrong} is outside the vocabulary; ids are 0 to {self.vocab_size - 1}.")
        return known

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
