"""The file tokenizer.json: the common part of the tokenizers of translators and the vocabularies of language models."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manyheads.errors import DataError, SaveError
from manyheads.files.guarded import read_limited

MAX_FILE_BYTES = 64 * 2**20


class TokenizerFile(ABC):
    """Conversion between text and ids that is stored in one tokenizer.json, which contains no code."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, including special ones."""

    @abstractmethod
    def to_json(self) -> str:
        """Return the content of tokenizer.json."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, see `encode`."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without ids for its beginning and end.

        Raises: DataError: the text contains an unpaired surrogate.
        """
        return self.encode_batch([text])[0]

    @property
    def digest(self) -> str:
        """SHA-256 of the file's bytes, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode("utf-8")).hexdigest()

    def files(self) -> dict[str, bytes]:
        """Return the name and the content of tokenizer.json."""
        return {"tokenizer.json": self.to_json().encode("utf-8")}

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json without syncing it; a caller that commits a whole folder syncs the files.

        Raises: SaveError: the path cannot be written.
        """
        try:
            Path(path).write_bytes(self.to_json().encode("utf-8"))
        except OSError as error:
            raise SaveError(f"Cannot write the tokenizer {path}: {error.strerror or error}.") from error

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """Return the ids as integers. Raises: DataError: an id is outside the vocabulary."""
        known = [int(index) for index in ids]
        if known and not (min(known) >= 0 and max(known) < self.vocab_size):
            wrong = next(index for index in known if not 0 <= index < self.vocab_size)
            raise DataError(f"Id {wrong} is outside the vocabulary; ids are 0 to {self.vocab_size - 1}.")
        return known


def read_tokenizer_file(path: str | Path) -> str:
    """Return the text of a tokenizer.json.

    Raises: DataError: it is missing, not a regular file, too large, or not UTF-8.
    """
    path = Path(path)
    try:
        return read_limited(path, MAX_FILE_BYTES).decode("utf-8")
    except OSError as error:
        raise DataError(f"Cannot read the tokenizer {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}; it is damaged or not a tokenizer file.") from None


def parse_json(content: str | bytes, where: str) -> Any:
    """Return the value of a JSON text. where: its name in the message.

    Raises: DataError: the content is not JSON in UTF-8.
    """
    try:
        return json.loads(content if isinstance(content, str) else content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}.") from None


def check_encodable(texts: Sequence[str]) -> None:
    """Raise DataError for unpaired surrogates, which Python and JSON can store but UTF-8 and the library cannot."""
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        for number, text in enumerate(texts):
            for position, char in enumerate(text):
                if "\ud800" <= char <= "\udfff":
                    raise DataError(
                        f"Text {number} contains half a surrogate pair (U+{ord(char):04X}) at character {position};"
                        " it is not valid Unicode text. Remove or replace that character."
                    ) from None
