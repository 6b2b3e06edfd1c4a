"""Text to ids and back: one tokenizer for both languages, kept in one JSON file that holds no code.

Rules: text is made NFC (and lower case, if so set); nothing else is changed, and decoding gives back every space, sign
and character, so `decode(encode(text)) == text` for NFC text. With `bpe` and `unigram` no text is unknown: what has no
piece is spelled in UTF-8 bytes. `word` splits at white space and joins with single spaces. The words `<s>`, `</s>` and
so on in a text are text and never become special ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from manyheads.errors import DataError
from manyheads.text.learning import learn_pieces
from manyheads.text.pipeline import SPACE_SIGN, assemble, take_apart
from manyheads.text.settings import TokenizerSettings

__all__ = ["Tokenizer"]

MAX_FILE_BYTES = 64 * 2**20


class Tokenizer:
    """A trained tokenizer. Make one by `train`, `load` or `from_json`; it never changes afterwards.

    Ids 0 to 3 are padding, begin of sentence, end of sentence and unknown; `encode` never gives the first three.
    """

    pad_id = 0
    bos_id = 1
    eos_id = 2
    unk_id = 3

    def __init__(self, kind: str, lowercase: bool, pieces: list[str], extra: list[Any]) -> None:
        self.kind = kind
        self.lowercase = lowercase
        self._pieces = pieces
        self._json = json.dumps(assemble(kind, lowercase, pieces, extra), ensure_ascii=False, indent=1) + "\n"
        try:
            self._library = tokenizers.Tokenizer.from_str(self._json)
        except Exception as error:
            raise DataError(f"The tokenizers library refuses this tokenizer: {error}") from None
        self._library.encode_special_tokens = True  # "</s>" in a text is five signs, not the end of the sentence

    @classmethod
    def train(cls, texts: Iterable[str], settings: TokenizerSettings) -> Tokenizer:
        """Learn a vocabulary. The same texts give the same bytes, on any number of threads.

        Args:
            texts: sentences of both languages; kept in memory while training.
            settings: kind, size and case; a small corpus may give fewer pieces than `vocab_size`.

        Raises: DataError: there is no text, or it holds half a surrogate pair.
        """
        known = list(texts)
        if not any(text.strip() for text in known):
            raise DataError("There is no text to train a tokenizer on: every line is empty.")
        for text in known:
            _check_encodable([text])
        pieces, extra = learn_pieces(settings.kind, known, settings.vocab_size, settings.lowercase)
        return cls(settings.kind, settings.lowercase, pieces, extra)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json.

        Raises: DataError: it is missing, too large, damaged, or not written by manyheads.
        """
        path = Path(path)
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise DataError(
                    f"{path} has {path.stat().st_size} bytes; a tokenizer file has at most {MAX_FILE_BYTES}."
                )
            raw = path.read_bytes()
        except OSError as error:
            raise DataError(f"Cannot read the tokenizer {path}: {error.strerror or error}.") from None
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8 at byte {error.start}; it is no tokenizer file, or damaged."
            ) from None
        return cls.from_json(text, where=str(path))

    @classmethod
    def from_json(cls, text: str, *, where: str = "The text") -> Tokenizer:
        """The tokenizer that `to_json` wrote. where: what error messages call it.

        Raises: DataError: it is damaged, or not written by manyheads.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not valid JSON: {error}.") from None
        return cls(*take_apart(data, where))

    def to_json(self) -> str:
        """The content of tokenizer.json, readable by the `tokenizers` library too."""
        return self._json

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json (plainly: whoever commits a folder of files sees to its durability).

        Raises: DataError: the path cannot be written.
        """
        try:
            Path(path).write_bytes(self._json.encode("utf-8"))
        except OSError as error:
            raise DataError(f"Cannot write the tokenizer {path}: {error.strerror or error}.") from None

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return len(self._pieces)

    @property
    def digest(self) -> str:
        """SHA-256 of the file's bytes, in hexadecimal."""
        return hashlib.sha256(self._json.encode("utf-8")).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of one text, without BOS and EOS; an empty text has none.

        Raises: DataError: the text holds half a surrogate pair.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, on all threads of the library at once.

        Raises: DataError: a text holds half a surrogate pair; the message names its position.
        """
        _check_encodable(texts)
        lists = [encoding.ids for encoding in self._library.encode_batch_fast(texts, add_special_tokens=False)]
        if self.kind == "word":  # a word that is spelled like a special piece is not one
            lists = [[self.unk_id if index < self.unk_id else index for index in ids] for ids in lists]
        return lists

    def decode(self, ids: Sequence[int]) -> str:
        """The text of one sequence of ids; special ids are left out, broken byte sequences become U+FFFD.

        Raises: DataError: an id is outside the vocabulary.
        """
        return self.decode_batch([ids])[0]

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of ids, see `decode`."""
        lists = [self._checked(ids) for ids in batch]
        texts: list[str] = self._library.decode_batch(lists, skip_special_tokens=True)
        return texts

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The piece of each id for people to read: spaces show as `▁`, bytes as `<0xE2>`, special ids as `</s>`.

        Raises: DataError: an id is outside the vocabulary.
        """
        return [self._pieces[index].replace(" ", SPACE_SIGN) for index in self._checked(ids)]

    def _checked(self, ids: Sequence[int]) -> list[int]:
        known = [int(index) for index in ids]
        if known and not (min(known) >= 0 and max(known) < self.vocab_size):
            wrong = next(index for index in known if not 0 <= index < self.vocab_size)
            raise DataError(f"Id {wrong} is outside the vocabulary; ids are 0 to {self.vocab_size - 1}.")
        return known

    def __repr__(self) -> str:
        case = ", lowercase" if self.lowercase else ""
        return f"Tokenizer({self.kind}, {self.vocab_size} pieces{case}, {self.digest[:12]})"


def _check_encodable(texts: Sequence[str]) -> None:
    """Refuse half surrogate pairs, which Python and JSON can hold but UTF-8 and the library cannot."""
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        for number, text in enumerate(texts):
            for position, char in enumerate(text):
                if "\ud800" <= char <= "\udfff":
                    raise DataError(
                        f"Text {number} holds half a surrogate pair (U+{ord(char):04X}) at character {position};"
                        " it is not valid Unicode text. Remove or replace that character."
                    ) from None
