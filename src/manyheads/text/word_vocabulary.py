"""Words as a vocabulary: text is split at white space, and a line break is a word of its own.

As corpora for word-level language models are made and scored (WikiText: Merity et al. 2016, arXiv:1609.07843): rare
words stand in the text as `<unk>` already, and each line ends in `<eos>`. Ids follow falling frequency, which adaptive
softmax needs (Grave et al. 2017, arXiv:1609.04309), words of one frequency the order in which they first appear: the
order of the official Transformer-XL's vocabularies, so that weights trained on those keep their rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from manyheads.errors import DataError
from manyheads.text.parsing import words_of
from manyheads.text.settings import VocabularySettings
from manyheads.text.tokenizer import check_encodable
from manyheads.text.vocabulary import Documents, Vocabulary

__all__ = ["DOCUMENT_END", "MAX_WORDS", "UNKNOWN", "WordVocabulary"]

UNKNOWN = "<unk>"
DOCUMENT_END = "<eod>"
MAX_WORDS = 4_000_000


class WordVocabulary(Vocabulary):
    """Id 0 is the line break; `<unk>`, and `<eod>` where files are documents, stand where their frequency puts them.

    Args:
        words: every word by id, the line break first.
        documents: what a document is.
        lowercase: fold case first.

    Raises: DataError: a word is there twice, is no word, or the words lack one that must be there.
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
        # What stands for a line or a document is never a word of the text, however that is spelled.
        self._of_text = {word: index for word, index in self._ids.items() if index not in (self.line_id, self.end_id)}

    @classmethod
    def learn(cls, lines: Iterable[str], settings: VocabularySettings, *, num_files: int = 1) -> WordVocabulary:
        """Count the words of a text.

        Args:
            lines: the training text, consumed as a stream.
            settings: of level `words`.
            num_files: how often `<eod>` stands in the text, where files are documents.

        Raises: DataError: the text has no words.
        """
        counts: Counter[str] = Counter()
        for line in lines:
            check_encodable([line])
            counts.update(words_of(line.lower() if settings.lowercase else line))
        special = {settings.line_end, UNKNOWN, *([DOCUMENT_END] if settings.documents == "files" else [])}
        total = counts.total()
        if not total:
            raise DataError("There is no text to make a vocabulary of: every line is empty.")
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
        """Number of words, the line break and `<unk>` included."""
        return len(self._words)

    @property
    def line_end(self) -> str:
        """How the line break is called."""
        return self._words[0]

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """The words of each line; one that is not known is `<unk>`."""
        check_encodable(lines)
        known, unknown = self._of_text, self.unk_id
        if self.lowercase:
            lines = [line.lower() for line in lines]
        return [[known.get(word, unknown) for word in words_of(line)] for line in lines]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Words with single spaces between them, and none beside a line break; the end of a file gives nothing."""
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
        """The words."""
        return [self._words[index] for index in self._checked(ids)]

    def describe(self) -> dict[str, object]:
        """What people may want to know."""
        return {**super().describe(), "lowercase": self.lowercase}

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        return self._render(lowercase=self.lowercase, words=self._words)


def _check(words: list[str], documents: Documents) -> None:
    wanted = {UNKNOWN} | ({DOCUMENT_END} if documents == "files" else set())
    if len(words) > MAX_WORDS or len(set(words)) != len(words) or not wanted <= set(words[1:]):
        raise DataError(
            f"The words of a vocabulary must be each there once, at most {MAX_WORDS:,} of them, the line break first,"
            f" {' and '.join(sorted(wanted))} among the others."
        )
    wrong = next((word for word in words if words_of(word) != [word] or "\n" in word), None)
    if wrong is not None:
        raise DataError(f"{wrong!r} is no word: it is empty, or has white space in it.")
    check_encodable(words)
