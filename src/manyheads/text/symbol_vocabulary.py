"""A vocabulary with a given list of symbols, as the original code of Transformer-XL makes it from a benchmark corpus.

Dai et al. 2019, arXiv:1901.02860, sec. 4.1. Each corpus has its own symbols and its own treatment of lines:
- `words` (WikiText-103, One Billion Word): text is split at white space;
- `bytes` (enwik8): a symbol is the decimal number of a byte, and line breaks were left out;
- `characters` (text8): a symbol is a character, `_` is a space, and there are no line breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from manyheads.errors import DataError
from manyheads.text.tokenizer_file import check_encodable
from manyheads.text.vocabulary import Vocabulary
from manyheads.text.words import words_of

__all__ = ["Form", "Lines", "SymbolVocabulary"]

Form = Literal["words", "bytes", "characters"]
Lines = Literal["end", "around", "dropped"]
_MOST_SYMBOLS = 4_000_000
_SPACES = {"bytes": "32", "characters": "_"}


class SymbolVocabulary(Vocabulary):
    """Ids are positions in a list of symbols. Documents are not distinguished.

    Args:
        symbols: by id.
        form: what a symbol stands for.
        lines: `end`: `line` stands for a line break; `around`: it stands before and after every line, so that two of
            them separate lines; `dropped`: line breaks have no symbol.
        line: that symbol, if lines are not dropped.
        unknown: the symbol of words that are not in the list; empty: such words are errors.
        lowercase: fold case first.

    Raises: DataError: a symbol occurs twice or does not fit the form, or a named symbol is missing.
    """

    kind = "symbols"
    documents = "none"
    end_id = None

    def __init__(
        self,
        symbols: Sequence[str],
        *,
        form: Form,
        lines: Lines,
        line: str = "",
        unknown: str = "",
        lowercase: bool = False,
    ) -> None:
        self.form, self.lines, self.line, self.unknown, self.lowercase = form, lines, line, unknown, lowercase
        self._symbols = list(symbols)
        self._ids = {symbol: index for index, symbol in enumerate(self._symbols)}
        self._check()
        self.line_id = self._ids[_SPACES[form] if lines == "dropped" else line]
        self.unk_id = self._ids[unknown] if unknown else None
        self.reads_bytes = form == "bytes"

    @property
    def vocab_size(self) -> int:
        """Number of symbols."""
        return len(self._symbols)

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> SymbolVocabulary:
        """Return the vocabulary with the parsed content of its tokenizer.json. Raises: DataError: it is not valid."""
        symbols, given = content.get("symbols"), {name: content.get(name) for name in ("line", "unknown")}
        if not isinstance(symbols, list) or not all(isinstance(one, str) for one in [*symbols, *given.values()]):
            raise DataError("the symbols are missing, or are not text.")
        form, lines, lowercase = content.get("form"), content.get("lines"), content.get("lowercase")
        if form not in get_args(Form) or lines not in get_args(Lines) or not isinstance(lowercase, bool):
            raise DataError(f"form {form!r}, lines {lines!r} or lowercase {lowercase!r} is not a known value.")
        return cls(symbols, form=form, lines=lines, lowercase=lowercase, **given)  # type: ignore[arg-type]

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the symbols of each line, preceded by the symbol of a line if lines is `around`.

        Raises: DataError: something in a line has no symbol, and no symbol stands for unknown ones.
        """
        check_encodable(lines)
        begins = [self.line_id] if self.lines == "around" else []
        return [begins + self._encoded(self._split(line)) for line in lines]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; see `lines` for its line breaks. Raises: DataError: see `encode_lines`."""
        return [self._joined(text.split("\n")) for text in texts]

    def encode_content(self, content: bytes) -> list[int]:
        """Return the ids of a file's content. Raises: DataError: see `encode_lines`."""
        if not self.reads_bytes:
            return super().encode_content(content)
        return self._encoded([str(byte) for byte in content if byte != ord("\n")])

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return words joined by spaces, characters, or bytes.

        With `around`, the first of each pair of ids of lines gives nothing and the second one per line break.
        """
        symbols = self.tokens(ids)
        if self.form == "bytes":
            return bytes(map(int, symbols))
        if self.form == "characters":
            return "".join(" " if symbol == "_" else symbol for symbol in symbols).encode("utf-8")
        parts: list[str] = []
        begins, in_line = True, self.lines == "end" or symbols[:1] != [self.line]
        for symbol in symbols:
            if symbol == self.line:
                parts.append("\n" if in_line else "")
                begins, in_line = True, self.lines == "end" or not in_line
            else:
                parts.append(symbol if begins else f" {symbol}")
                begins, in_line = False, True
        return "".join(parts).encode("utf-8")

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the symbols."""
        return [self._symbols[index] for index in self._checked(ids)]

    def describe(self) -> dict[str, object]:
        """Return the properties to show to users."""
        return {**super().describe(), "form": self.form, "lines": self.lines, "lowercase": self.lowercase}

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        names = ("form", "lines", "line", "unknown", "lowercase")
        return self._render(**{name: getattr(self, name) for name in names}, symbols=self._symbols)

    def _split(self, line: str) -> list[str]:
        line = line.lower() if self.lowercase else line
        if self.form == "bytes":
            return [str(byte) for byte in line.encode("utf-8")]
        if self.form == "characters":
            return ["_" if character == " " else character for character in line]
        return words_of(line)

    def _encoded(self, symbols: list[str]) -> list[int]:
        if self.unk_id is not None:
            return [self._ids.get(symbol, self.unk_id) for symbol in symbols]
        try:
            return [self._ids[symbol] for symbol in symbols]
        except KeyError as error:
            what = {"words": "word", "bytes": "byte", "characters": "character"}[self.form]
            raise DataError(
                f"The text has the {what} {error.args[0]!r}. This model's vocabulary of {self.vocab_size:,} symbols"
                " does not have it, and has no symbol for unknown ones; remove it or replace it."
            ) from None

    def _joined(self, lines: list[str]) -> list[int]:
        """Return the ids of the lines of a text. The last line has no line break after it and may be empty."""
        parts = self.encode_lines(lines)
        if not lines[-1]:
            parts[-1] = []
        between = [] if self.lines == "dropped" else [self.line_id]
        ids: list[int] = []
        for number, part in enumerate(parts):
            ids += between * (number > 0)
            ids += part
        return ids

    def _check(self) -> None:
        if (self.form == "words") == (self.lines == "dropped"):
            raise DataError(f"lines is {self.lines!r}; words need 'end' or 'around', other symbols 'dropped'.")
        named = [_SPACES[self.form] if self.lines == "dropped" else self.line]
        named += [self.unknown] if self.unknown else []
        if not 0 < len(self._symbols) <= _MOST_SYMBOLS or len(self._ids) != len(self._symbols):
            raise DataError(f"a vocabulary must have 1 to {_MOST_SYMBOLS:,} symbols, each once.")
        if missing := [symbol for symbol in named if symbol not in self._ids]:
            raise DataError(f"the vocabulary has no symbol {missing[0]!r}, which its text needs.")
        wrong = [symbol for symbol in self._symbols if not _fits(symbol, self.form)]
        if wrong:
            raise DataError(f"the symbol {wrong[0]!r} is not one of the form {self.form!r}.")
        check_encodable(self._symbols)


def _fits(symbol: str, form: Form) -> bool:
    if form == "words":
        return words_of(symbol) == [symbol]
    if form == "characters":
        return len(symbol) == 1
    return symbol.isascii() and symbol.isdecimal() and int(symbol) < 256 and str(int(symbol)) == symbol
