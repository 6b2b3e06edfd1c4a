"""Vocabularies of whole words and of other given symbols.

`WordVocabulary` splits text at white space, and a line break is a word. This is the usual form of corpora for
word-level language models (WikiText: Merity et al. 2016, arXiv:1609.07843): the text already contains `<unk>` for rare
words, and each line ends in `<eos>`. Ids are sorted by decreasing frequency, which adaptive softmax needs (Grave et al.
2017, arXiv:1609.04309); words of equal frequency are sorted by first occurrence. The official Transformer-XL uses the
same order, so weights trained with its vocabularies keep their rows.

`SymbolVocabulary` has a given list of symbols, as the original code of Transformer-XL makes it from a benchmark corpus
(Dai et al. 2019, arXiv:1901.02860, sec. 4.1). Each corpus has its own symbols and its own treatment of lines:
- `words` (WikiText-103, One Billion Word): text is split at white space;
- `bytes` (enwik8): a symbol is the decimal number of a byte, and line breaks were left out;
- `characters` (text8): a symbol is a character, `_` is a space, and there are no line breaks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from manyheads.errors import DataError
from manyheads.text.pipeline import check_encodable
from manyheads.text.vocabulary import Documents, Vocabulary
from manyheads.text.words import words_of

if TYPE_CHECKING:
    from manyheads.text.settings import VocabularySettings

UNKNOWN = "<unk>"
DOCUMENT_END = "<eod>"
MAX_WORDS = 4_000_000


class WordVocabulary(Vocabulary):
    """Id 0 is the line break. The frequency determines the ids of `<unk>` and, if documents are files, `<eod>`.

    Args:
        words: every word by id, the line break first.
        documents: what counts as a document.
        lowercase: fold case first.

    Raises: DataError: a word occurs twice or is not a word, or a required word is missing.
    """

    kind = "words"
    unk_id: int

    def __init__(self, words: Sequence[str], documents: Documents = "none", *, lowercase: bool = False) -> None:
        self.documents = documents
        self.lowercase = lowercase
        self._words = list(words)
        _check(self._words, documents)
        self._ids = {word: index for index, word in enumerate(self._words)}
        self.line_id = 0
        self.end_id = {"none": None, "lines": 0, "files": self._ids.get(DOCUMENT_END)}[documents]
        self.unk_id = self._ids[UNKNOWN]
        # A word of the text never gets the id of the end of a line or a document, even if it is spelled the same.
        self._of_text = {word: index for word, index in self._ids.items() if index not in (self.line_id, self.end_id)}

    @classmethod
    def learn(cls, lines: Iterable[str], settings: VocabularySettings, *, num_files: int = 1) -> WordVocabulary:
        """Count the words of a text.

        Args:
            lines: the training text, read as a stream.
            settings: with level `words`.
            num_files: number of `<eod>` in the text, if documents are files.

        Raises: DataError: the text has no words.
        """
        counts: Counter[str] = Counter()
        for line in lines:
            check_encodable([line])
            counts.update(words_of(line.lower() if settings.lowercase else line))
        special = {settings.line_end, UNKNOWN, *([DOCUMENT_END] if settings.documents == "files" else [])}
        total = counts.total()
        if not total:
            raise DataError("There is no text to train a vocabulary on: every line is empty.")
        room = settings.vocab_size - len(special) if settings.vocab_size else len(counts)
        ranked = sorted((word for word in counts if word not in special), key=lambda word: -counts[word])
        kept = [word for word in ranked[: max(0, room)] if counts[word] >= settings.min_count]
        frequency = {UNKNOWN: total - sum(counts[word] for word in kept)}
        if settings.documents == "files":
            frequency[DOCUMENT_END] = num_files
        frequency |= {word: counts[word] for word in kept}
        appearance = {word: number for number, word in enumerate(counts)}
        last = len(appearance)
        words = sorted(frequency, key=lambda word: (-frequency[word], appearance.get(word, last)))
        return cls([settings.line_end, *words], settings.documents, lowercase=settings.lowercase)

    @property
    def vocab_size(self) -> int:
        """Number of words, including the line break and `<unk>`."""
        return len(self._words)

    @property
    def line_end(self) -> str:
        """Name of the line break."""
        return self._words[0]

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the words of each line; unknown words become `<unk>`."""
        check_encodable(lines)
        known, unknown = self._of_text, self.unk_id
        if self.lowercase:
            lines = [line.lower() for line in lines]
        return [[known.get(word, unknown) for word in words_of(line)] for line in lines]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the words joined by single spaces, without spaces beside a line break; `<eod>` gives nothing."""
        parts: list[str] = []
        begins = True
        for index in self._checked(ids):
            if index == self.line_id:
                parts.append("\n")
            if index in (self.line_id, self.end_id):
                begins = True
            else:
                parts.append(self._words[index] if begins else f" {self._words[index]}")
                begins = False
        return "".join(parts).encode("utf-8")

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the words."""
        return [self._words[index] for index in self._checked(ids)]

    def describe(self) -> dict[str, object]:
        """Return the properties to show to users."""
        return {**super().describe(), "lowercase": self.lowercase}

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        return self._render(lowercase=self.lowercase, words=self._words)


def _check(words: list[str], documents: Documents) -> None:
    wanted = {UNKNOWN} | ({DOCUMENT_END} if documents == "files" else set())
    if len(words) > MAX_WORDS or len(set(words)) != len(words) or not wanted <= set(words[1:]):
        raise DataError(
            f"A vocabulary has at most {MAX_WORDS:,} words, each once. The first is the line break, and the others"
            f" include {' and '.join(sorted(wanted))}."
        )
    wrong = next((word for word in words if words_of(word) != [word] or "\n" in word), None)
    if wrong is not None:
        raise DataError(f"{wrong!r} is not a word: it is empty or contains white space.")
    check_encodable(words)


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
