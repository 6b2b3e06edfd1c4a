"""The tokenizer of a translator whose ids another program gave: two lists of words, or the ids themselves as text.

    tokenizer.json      {"format": "manyheads.sides", "special": {"pad": 2, "bos": 0, "eos": 1},
                         "source": [words by id] or a number of ids, "target": the same}

A text of words is split at white space. What is not in the vocabulary then is split at signs ("Mann," into "Mann" and
","), and what is not in it even so becomes `<unk>`. A text of ids is whole numbers with spaces between them; its
sources are read exactly as they are written, without an end that is added.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from manyheads.errors import ConfigError, DataError
from manyheads.text.pipeline import check_encodable
from manyheads.text.sides import Capabilities, Side

FORMAT = "manyheads.sides"
UNKNOWN = "<unk>"
_PARTS = re.compile(r"\w+|[^\w\s]")
_MOST_IDS = 4_000_000


class WordSide:
    """One language's side; see `sides.Side`.

    Args:
        words: by id; a number: so many ids, whose text they are themselves.
        special: ids of pad, bos and eos.
        begin: ids with which each text begins. ends_sources: whether eos follows a source.

    Raises: DataError: a word occurs twice, or there are no ids, or too many.
    """

    def __init__(
        self,
        words: Sequence[str] | int,
        special: Mapping[str, int],
        *,
        begin: Sequence[int] = (),
        ends_sources: bool = True,
    ) -> None:
        self.words = words if isinstance(words, int) else list(words)
        self.vocab_size = words if isinstance(words, int) else len(words)
        self.pad_id, self.bos_id, self.eos_id = (special[name] for name in ("pad", "bos", "eos"))
        self.ends_sources = ends_sources
        if not 0 < self.vocab_size <= _MOST_IDS:
            raise DataError(f"a vocabulary has 1 to {_MOST_IDS:,} words, not {self.vocab_size:,}.")
        self._ids = {} if isinstance(self.words, int) else {word: index for index, word in enumerate(self.words)}
        if not isinstance(self.words, int) and len(self._ids) < len(self.words):
            twice = next(word for index, word in enumerate(self.words) if self._ids[word] != index)
            raise DataError(f"the vocabulary has the word {twice!r} twice, so its ids are not clear.")
        self.unk_id = self._ids.get(UNKNOWN)
        self._special, self._begin = {*special.values()}, list(begin)

    def encode(self, text: str) -> list[int]:
        """See `sides.Side.encode`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; none for an empty text.

        Raises: DataError: a word is not in the vocabulary, which has no `<unk>`, or is no id of it.
        """
        check_encodable(texts)
        return [[*self._begin, *found] if (found := self._encoded(text)) else [] for text in texts]

    def _encoded(self, text: str) -> list[int]:
        if isinstance(self.words, int):
            return [self._as_id(word) for word in text.split()]
        ids: list[int] = []
        for word in text.split():
            parts = [word] if word in self._ids else _PARTS.findall(word)
            ids += [self._known(part) for part in parts]
        return ids

    def _as_id(self, word: str) -> int:
        if not (word.isascii() and word.isdigit()) or int(word) >= self.vocab_size:
            raise DataError(
                f"{word!r} is not an id of this model; a text is whole numbers from 0 to {self.vocab_size - 1} with"
                " spaces between them."
            )
        return int(word)

    def _known(self, word: str) -> int:
        found = self._ids.get(word, self.unk_id)
        if found is None or found in self._special:
            if self.unk_id is None:
                raise DataError(f"the vocabulary has neither {word!r} nor {UNKNOWN}; remove the word or replace it.")
            return self.unk_id  # a word of the text is never a mark
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the words or ids with single spaces between them, without special ones."""
        return " ".join(self.tokens([index for index in ids if index not in self._special]))

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """See `decode`."""
        return [self.decode(ids) for ids in batch]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the word of each id, or the id."""
        for index in ids:
            if not 0 <= index < self.vocab_size:
                raise DataError(f"id {index} is outside the vocabulary; ids are 0 to {self.vocab_size - 1}.")
        return [str(index) if isinstance(self.words, int) else self.words[index] for index in ids]


class WordSides(Capabilities):
    """Both sides; see `sides.TranslationTokenizer`.

    Args:
        source, target: the words by id, or the number of ids.
        special: ids of pad, bos and eos on the target side. Of words, the source side has those of the same spelling.

    Raises: DataError: see `WordSide`.
    """

    def __init__(self, source: Sequence[str] | int, target: Sequence[str] | int, special: Mapping[str, int]) -> None:
        self.special = dict(special)
        self.target = WordSide(target, special)
        outside = [f"{name} {index}" for name, index in special.items() if not 0 <= index < self.target.vocab_size]
        if outside:
            raise DataError(
                f"the ids of targets are from 0 to {self.target.vocab_size - 1:,}; {', '.join(outside)} is not among"
                " them."
            )
        if isinstance(source, int) and isinstance(target, int):
            self.kind, self.splits_lines = "ids", False  # ids are one sequence, also in several lines
            self.source = WordSide(source, special, ends_sources=False)
        elif not isinstance(source, int) and not isinstance(target, int):
            self.kind = "word"
            marks = {name: source.index(target[index]) for name, index in special.items() if target[index] in source}
            begin = [marks["bos"]] if "bos" in marks else []
            marked = {name: marks.get(name, -1) for name in special}  # -1: the source has no such word
            self.source = WordSide(source, marked, begin=begin, ends_sources="eos" in marks)
        else:
            raise DataError("one side has words and the other one ids; give two lists of words, or two numbers.")

    @classmethod
    def from_content(cls, content: Mapping[str, Any], where: str) -> WordSides:
        """Return the tokenizer of the parsed content of a tokenizer.json. Raises: DataError: it is damaged."""
        sides, special = [content.get("source"), content.get("target")], content.get("special")
        is_right = isinstance(special, dict) and special.keys() == {"pad", "bos", "eos"}
        is_right = is_right and all(type(number) is int for number in (special or {}).values())
        for side in sides:
            is_right &= type(side) is int or (isinstance(side, list) and all(isinstance(one, str) for one in side))
        if not is_right:
            raise DataError(f"{where} is damaged: it must have source, target (words, or a number of ids) and special.")
        return cls(sides[0], sides[1], special)  # type: ignore[arg-type]

    @property
    def target_languages(self) -> tuple[str, ...]:
        """There are no tags."""
        return ()

    @property
    def digest(self) -> str:
        """SHA-256 of the file's bytes, in hexadecimal."""
        return hashlib.sha256(self.files()["tokenizer.json"]).hexdigest()

    def describe(self) -> Mapping[str, object]:
        """Return the properties to show to users."""
        return {"source_vocab_size": self.source.vocab_size, "target_vocab_size": self.target.vocab_size}

    def files(self) -> dict[str, bytes]:
        """Return the name and the content of tokenizer.json."""
        content = {"source": self.source.words, "target": self.target.words, "special": self.special}
        return {
            "tokenizer.json": (json.dumps({"format": FORMAT, **content}, ensure_ascii=False) + "\n").encode("utf-8")
        }


def sides_of_ids(source: int, target: int, writer: Side) -> WordSides:
    """Return the tokenizer of ids of a model with so many of them. writer: the target side of its own tokenizer.

    Raises: ConfigError: the model's own ids do not fit.
    """
    special = {"pad": writer.pad_id, "bos": writer.bos_id, "eos": writer.eos_id}
    try:
        return WordSides(source, target, special)
    except DataError as error:
        raise ConfigError(str(error)) from None
