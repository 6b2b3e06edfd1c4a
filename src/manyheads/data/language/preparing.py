"""From text files to a folder of data for a language model; see `preparing`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.data.language.preparing_tokens import BLOCK_BYTES, Part, Piece, TokenSource
from manyheads.data.language.texts import Text
from manyheads.data.lines import ReadReport
from manyheads.data.preparing import CONTROL, Holdout, given_splits, prepare
from manyheads.data.progress import Progress
from manyheads.text.growing import Growth
from manyheads.text.learning import MAX_LEARNED_CHARS, Rereadable
from manyheads.text.settings import VocabularySettings
from manyheads.text.vocabularies import learn_vocabulary, sample_of
from manyheads.text.vocabulary import Vocabulary

ENCODE_LINES = 4096  # lines per call of the vocabulary
WHITE = np.zeros(256, np.bool_)
WHITE[list(b" \t\n\r\v\f")] = True


def prepare_text(
    folder: str | Path,
    *,
    train: Text,
    valid: Text | None = None,
    test: Text | None = None,
    vocabulary: VocabularySettings | Vocabulary | Growth,
    holdout: Holdout | None = None,
    replace: bool = False,
    progress: Progress | None = None,
    key: str = "",
    published_tokens: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Make a folder of data for a language model; read it with `prepared_text.TextData.open`.

    The whole text is kept, except lines that are not UTF-8 (on request) and, if lines are documents, empty lines; both
    are counted.

    Args:
        folder: the folder to make.
        train: the training text; each file is read once, so it can be a pipe.
        valid: the validation text, if any.
        test: the test text, if any.
        vocabulary: settings for a vocabulary to learn from the training text, an existing vocabulary, or one that
            learns more pieces from it.
        holdout: take validation and test text from the end of the training text.
        replace: replace an older folder of that name when this one is complete.
        progress: called with the phase, the number of bytes done, and the total or 0.
        key: stored in the manifest, to recognise the folder.
        published_tokens: number of tokens of each split in the literature; stored in the manifest beside our counts.

    Returns: the manifest.
    Raises:
        DataError: the text cannot be used, a split is empty, or the folder exists.
        ConfigError: a split is given and held back as well.
        SaveError: the disk is full or refuses; nothing is left behind.
    """
    source = _TextSource(given_splits(train, valid, test), vocabulary, holdout, published_tokens or {})
    return prepare(folder, source, replace=replace, progress=progress, key=key)


class _TextSource(TokenSource):
    """See `preparing.Source`."""

    def __init__(
        self,
        splits: dict[str, Text],
        vocabulary: VocabularySettings | Vocabulary | Growth,
        holdout: Holdout | None,
        published_tokens: dict[str, int],
    ) -> None:
        super().__init__(splits, holdout)
        self._published_tokens = published_tokens
        self._chosen = vocabulary
        if isinstance(vocabulary, Vocabulary):
            self.settings, self.vocabulary, level = None, vocabulary, vocabulary.kind
        elif isinstance(vocabulary, Growth):
            self.settings, level = vocabulary.settings, "bpe"
        else:
            self.settings, level = vocabulary, vocabulary.level
        self._as_bytes = level == "bytes"
        self._by_line = not self._as_bytes or vocabulary.documents == "lines"
        self._reports = {split: ReadReport() for split in splits}

    def blocks(self, split: str) -> Iterator[tuple[str, bytes, bool]]:
        for block, ends in self.splits[split].read(as_bytes=self._as_bytes, report=self._reports[split]):
            yield "", block, ends

    def cut(self, path: Path, place: int, stop: int) -> int:
        """Return the beginning of the next line if lines matter; see `TokenSource.cut`."""
        if not self._by_line:
            return place
        with path.open("rb") as file:
            file.seek(place - 1)
            file.readline()
            return min(file.tell(), stop)

    def learn(self) -> Vocabulary:
        part, chosen = self.copies["train"], self._chosen
        lines = Rereadable(lambda: self._learned_lines(part))
        if isinstance(chosen, Growth):
            self.vocabulary = chosen.learn(sample_of(lines), self.progress)
        elif isinstance(chosen, VocabularySettings):
            self.vocabulary = learn_vocabulary(lines, chosen, num_files=len(part.ends()), told=self.progress)
        return self.vocabulary

    def _learned_lines(self, part: Part) -> Iterator[str]:
        done = 0
        for line, _ in part.lines():
            before, done = done, done + len(line)
            if done // BLOCK_BYTES > before // BLOCK_BYTES:
                self.progress("make the vocabulary", done, len(part))
            yield line.removesuffix(b"\n").decode("utf-8")
        self.progress("make the vocabulary", len(part), len(part))

    def encode(self, split: str) -> dict[str, int]:
        counts = super().encode(split)
        if split in self._reports:
            counts["bad_utf8_replaced"] = self._reports[split].bad_utf8_replaced
            counts["bad_utf8_skipped"] = self._reports[split].bad_utf8_skipped
        return counts

    def record(self) -> dict[str, Any]:
        return {**super().record(), "published_tokens": self._published_tokens}

    def pieces(self, part: Part, counts: dict[str, int]) -> Iterator[Piece]:
        return (_line_pieces if self._by_line else _byte_pieces)(part, self.vocabulary, counts)


class _Counter:
    """Counts bytes, characters, words and lines of a text block by block, for results per byte, character and word.

    A character is a byte that does not continue a UTF-8 character; words are separated by ASCII white space.
    """

    def __init__(self, counts: dict[str, int]) -> None:
        self._counts = counts
        self._inside = False  # whether the last block ended within a word

    def add(self, block: bytes) -> None:
        values = np.frombuffer(block, np.uint8)
        self._counts["bytes"] += len(block)
        self._counts["characters"] += int(((values & 0xC0) != 0x80).sum())
        self._counts["lines"] += block.count(b"\n")
        inside = ~WHITE[values]
        if len(inside):
            begins = inside[1:] & ~inside[:-1]
            self._counts["words"] += int(begins.sum()) + int(inside[0] and not self._inside)
            self._inside = bool(inside[-1])


def _byte_pieces(part: Part, vocabulary: Vocabulary, counts: dict[str, int]) -> Iterator[Piece]:
    counter = _Counter(counts)
    for block, file_ends in part.blocks():
        counter.add(block)
        yield np.frombuffer(block, np.uint8), False
        if file_ends and vocabulary.end_id is not None:
            yield [vocabulary.end_id], True


def _line_pieces(part: Part, vocabulary: Vocabulary, counts: dict[str, int]) -> Iterator[Piece]:
    counter = _Counter(counts)
    for block, file_ends in _blocks_of_lines(part):
        if vocabulary.documents == "lines":
            kept = [line for line in block if line.strip()]
            counts["empty_dropped"] += len(block) - len(kept)
            block = kept
        counter.add(b"".join(block))
        if vocabulary.kind == "bytes":
            encoded = [list(line.removesuffix(b"\n")) for line in block]
        else:
            texts = [line.removesuffix(b"\n").decode("utf-8") for line in block]
            counts["control_characters"] += sum(bool(CONTROL.search(text)) for text in texts)
            counts["long_lines"] += sum(len(text) > MAX_LEARNED_CHARS for text in texts)
            encoded = vocabulary.encode_lines(texts)
        for ids in encoded:
            yield [*ids, vocabulary.line_id], vocabulary.documents == "lines"
        if file_ends and vocabulary.documents == "files" and vocabulary.end_id is not None:
            yield [vocabulary.end_id], True


def _blocks_of_lines(part: Part) -> Iterator[tuple[list[bytes], bool]]:
    """Yield lists of ENCODE_LINES lines, or fewer at the end of a file, and whether a file ends with each list."""
    block: list[bytes] = []
    for line, ends in part.lines():
        block.append(line)
        if ends or len(block) == ENCODE_LINES:
            yield block, ends
            block = []
