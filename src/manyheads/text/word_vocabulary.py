"""A vocabulary of words: text is split at white space, and a line break is a word.

This is the usual form of corpora for word-level language models (WikiText: Merity et al. 2016, arXiv:1609.07843): the
text already contains `<unk>` for rare words, and each line ends in `<eos>`. Ids are sorted by decreasing frequency,
which adaptive softmax needs (Grave et al. 2017, arXiv:1609.04309); words of equal frequency are sorted by first
occurrence. The official Transformer-XL uses the same order, so weights trained with its vocabularies keep their rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from manyheads.errors import DataError
from manyheads.text.settings import VocabularySettings
from manyheads.text.tokenizer_file import check_encodable
from manyheads.text.vocabulary import Documents, Vocabulary
from manyheads.text.words import words_of

__all__ = ["DOCUMENT_END", "MAX_WORDS", "UNKNOWN", "WordVocabulary"]

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
