"""Text files to a folder of data for a language model; see `preparing`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.data.lines import ReadReport
from manyheads.data.preparing import CONTROL, LANGUAGE_TASK, SPLITS, Holdout, prepare
from manyheads.data.progress import Progress
from manyheads.data.store import CHECK_TOKENS, IntArray
from manyheads.data.texts import BLOCK_BYTES, Text
from manyheads.data.token_store import TokenStore, write_tokens
from manyheads.errors import DataError
from manyheads.text.learning import MAX_LEARNED_CHARS
from manyheads.text.settings import VocabularySettings
from manyheads.text.vocabularies import learn_vocabulary
from manyheads.text.vocabulary import Vocabulary

__all__ = ["prepare_text"]

ENCODE_LINES = 4096  # lines given to the vocabulary at once
WHITE = np.zeros(256, np.bool_)
WHITE[list(b" \t\n\r\v\f")] = True


def prepare_text(
    folder: str | Path,
    *,
    train: Text,
    valid: Text | None = None,
    test: Text | None = None,
    vocabulary: VocabularySettings | Vocabulary,
    holdout: Holdout | None = None,
    replace: bool = False,
    progress: Progress | None = None,
    key: str = "",
    published_tokens: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Build a folder of data for a language model; read it with `prepared_text.TextData.open`.

    Nothing of the text is left out, but lines that are not UTF-8 (if so asked for) and, where lines are documents,
    empty ones; both are counted.

    Args:
        folder: to be made.
        train: the training text; each file is read once, so a pipe will do.
        valid: validation text, if any.
        test: test text, if any.
        vocabulary: how to make one of the training text, or one that exists.
        holdout: take validation and test text from the end of the training text.
        replace: put an older folder of that name away once this one is whole.
        progress: called now and then with what is being done, how many bytes are, and the total or 0.
        key: kept in the manifest, for whoever wants to know the folder again.
        published_tokens: of each split, as the literature counts them; kept in the manifest beside our own counts.

    Returns: the manifest.
    Raises:
        DataError: the text cannot be used, or a split has none, or the folder exists.
        ConfigError: a split is given and held back as well.
        SaveError: the disk is full or refuses; nothing is left behind.
    """
    texts = {name: text for name, text in zip(SPLITS, (train, valid, test), strict=True) if text is not None}
    cut = holdout or Holdout()
    cut.check_splits(texts)
    source = _TextSource(texts, vocabulary, cut, published_tokens or {})
    return prepare(folder, source, replace=replace, progress=progress, key=key)


@dataclass
class _Copy:
    """A part of a text that was copied into the folder.

    Attributes:
        path: the copy.
        start: first byte.
        stop: the byte after the last.
        ends: after which bytes, within it, files end.
    """

    path: Path
    start: int
    stop: int
    ends: list[int]

    def __len__(self) -> int:
        return self.stop - self.start

    def blocks(self) -> Iterator[tuple[bytes, bool]]:
        """Blocks of bytes, and whether a file ends with each; the part ends a file too."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            place = self.start
            for end in sorted({*(end for end in self.ends if self.start < end < self.stop), self.stop}):
                while place < end:
                    block = file.read(min(BLOCK_BYTES, end - place))
                    if not block:
                        raise DataError(f"{self.path} is shorter than it was written; is another program at work here?")
                    place += len(block)
                    yield block, place == end

    def lines(self) -> Iterator[tuple[bytes, bool]]:
        """Lines with their "\\n" (a file's last one may have none), and whether a file ends with each."""
        kept = b""
        for block, ends in self.blocks():
            *whole, kept = (kept + block).split(b"\n") if kept else block.split(b"\n")
            if ends and not kept:
                yield from ((line + b"\n", False) for line in whole[:-1])
                yield whole[-1] + b"\n", True
            else:
                yield from ((line + b"\n", False) for line in whole)
            if ends and kept:
                yield kept, True
                kept = b""


@dataclass
class _Counts:
    """Counts of a text, block by block, whatever its units are: for figures per byte, per character and per word.

    Attributes:
        size: bytes, line breaks included.
        characters: all bytes but those that go on with a character of UTF-8.
        words: between white space of ASCII.
        lines: line breaks.
    """

    size: int = 0
    characters: int = 0
    words: int = 0
    lines: int = 0
    _inside: bool = False

    def add(self, block: bytes) -> None:
        values = np.frombuffer(block, np.uint8)
        self.size += len(block)
        self.characters += int(((values & 0xC0) != 0x80).sum())
        self.lines += block.count(b"\n")
        inside = ~WHITE[values]
        if len(inside):
            begins = inside[1:] & ~inside[:-1]
            self.words += int(begins.sum()) + int(inside[0] and not self._inside)
            self._inside = bool(inside[-1])

    def found(self) -> dict[str, int]:
        return {"bytes": self.size, "characters": self.characters, "words": self.words, "lines": self.lines}


class _TextSource:
    """See `preparing.Source`."""

    def __init__(
        self,
        texts: dict[str, Text],
        vocabulary: VocabularySettings | Vocabulary,
        cut: Holdout,
        published_tokens: dict[str, int],
    ) -> None:
        self.settings = vocabulary if isinstance(vocabulary, VocabularySettings) else None
        self._texts, self._cut, self._published_tokens = texts, cut, published_tokens
        self._asked = vocabulary
        level = vocabulary.level if isinstance(vocabulary, VocabularySettings) else vocabulary.kind
        self._as_bytes = level == "bytes"
        self._documents = vocabulary.documents
        self._reports = {name: ReadReport() for name in texts}

    def read(self, folder: Path, progress: Progress) -> dict[str, str]:
        """See `Source.read`."""
        self._folder, self._progress = folder, progress
        self._copies = {name: self._copy(name, text, self._reports[name]) for name, text in self._texts.items()}
        origin = {name: text.describe() for name, text in self._texts.items()}
        self._hold_back(self._copies, self._cut, origin)
        for name, copy in self._copies.items():
            if not len(copy):
                raise DataError(f"There is no {name} text in {origin[name]}; give another, give more, or leave it out.")
        return origin

    def learn(self, progress: Progress) -> Vocabulary:
        """See `Source.learn`."""
        self._found = self._vocabulary(self._copies["train"])
        return self._found

    def encode(self, split: str, progress: Progress) -> dict[str, int]:
        """See `Source.encode`."""
        counts = self._encode(split, self._copies[split], self._found)
        if split in self._reports:
            counts["bad_utf8_replaced"] = self._reports[split].bad_utf8_replaced
            counts["bad_utf8_skipped"] = self._reports[split].bad_utf8_skipped
        return counts

    def finish(self) -> tuple[str, ...]:
        """See `Source.finish`."""
        for name in self._texts:
            self._copies[name].path.unlink()
        return ()

    def record(self) -> dict[str, Any]:
        """See `Source.record`."""
        task = {"name": LANGUAGE_TASK, "level": self._found.kind, "documents": self._found.documents}
        return {"task": task, "published_tokens": self._published_tokens}

    def _copy(self, name: str, text: Text, report: ReadReport) -> _Copy:
        """Copy a text into the folder, so that a pipe is read once and a file that changes meanwhile does no harm."""
        path = self._folder / f"{name}.text"
        size = 0
        ends = []
        with path.open("wb") as file:
            for block, file_ends in text.read(as_bytes=self._as_bytes, report=report):
                file.write(block)
                size += len(block)
                if file_ends:
                    ends.append(size)
                self._progress(f"read {name}", size, 0)
        self._progress(f"read {name}", size, size)
        return _Copy(path, 0, size, ends)

    def _hold_back(self, copies: dict[str, _Copy], cut: Holdout, origin: dict[str, str]) -> None:
        train = copies["train"]
        if cut.whole and len(train) != cut.whole:
            raise DataError(
                f"{origin['train']} has {len(train):,} bytes, but the corpus of that name has {cut.whole:,}. Give the"
                " whole file, or choose no --layout and say how many bytes are held back: --valid-bytes, --test-bytes."
            )
        if not cut.valid and not cut.test:
            return
        where = origin["train"]
        wanted = (len(train) - cut.valid - cut.test, len(train) - cut.test)
        if wanted[0] <= 0:
            raise DataError(
                f"{where} has {len(train):,} bytes; with {cut.valid:,} held back for validation and {cut.test:,} for"
                " testing none is left to train on. Hold back fewer."
            )
        places = [self._line_start(train.path, place, train.stop) for place in wanted]
        bounds = [0, *places, train.stop]
        for name, start, stop in zip(SPLITS, bounds[:-1], bounds[1:], strict=True):
            if name == "train" or getattr(cut, name):
                copies[name] = _Copy(train.path, start, stop, train.ends)
                origin[name] = f"bytes {start:,} to {stop:,} of {where}"

    def _line_start(self, path: Path, place: int, stop: int) -> int:
        if self._as_bytes and self._documents != "lines":
            return place
        with path.open("rb") as file:
            file.seek(place - 1)
            file.readline()
            return min(file.tell(), stop)

    def _vocabulary(self, train: _Copy) -> Vocabulary:
        if isinstance(self._asked, Vocabulary):
            return self._asked
        if self._as_bytes:
            return learn_vocabulary((), self._asked)
        num_files = sum(train.start < end < train.stop for end in set(train.ends)) + 1

        def lines() -> Iterator[str]:
            done = 0
            for line, _ in train.lines():
                before, done = done, done + len(line)
                if done // BLOCK_BYTES > before // BLOCK_BYTES:
                    self._progress("make the vocabulary", done, len(train))
                yield line.removesuffix(b"\n").decode("utf-8")

        vocabulary = learn_vocabulary(lines(), self._asked, num_files=num_files)
        self._progress("make the vocabulary", len(train), len(train))
        return vocabulary

    def _encode(self, name: str, copy: _Copy, vocabulary: Vocabulary) -> dict[str, int]:
        """Encode a part of a text into its store. Returns: what was counted."""
        counts = _Counts()
        noted = dict.fromkeys(("empty_dropped", "control_characters", "long_lines"), 0)
        parts: Iterator[tuple[Sequence[int] | IntArray, bool]]
        if self._as_bytes and self._documents != "lines":
            parts = _byte_parts(copy, vocabulary.end_id, counts)
        else:
            parts = _line_parts(copy, vocabulary, counts, noted)

        def watched() -> Iterator[tuple[Sequence[int] | IntArray, bool]]:
            told = 0
            for part in parts:
                yield part
                if counts.size != told:
                    told = counts.size
                    self._progress(f"encode {name}", told, len(copy))

        num_tokens = write_tokens(self._folder / name, watched(), vocabulary.vocab_size)
        if not num_tokens:
            raise DataError(f"The {name} text has no tokens: every line is empty. Give another, or leave it out.")
        self._progress(f"encode {name}", len(copy), len(copy))
        store = TokenStore.open(self._folder / name, verify=False)
        unknown = 0
        if vocabulary.unk_id is not None:
            blocks = (store.ids[start : start + CHECK_TOKENS] for start in range(0, num_tokens, CHECK_TOKENS))
            unknown = sum(int((block == vocabulary.unk_id).sum()) for block in blocks)
        documents = store.num_documents if vocabulary.end_id is not None else 0
        return {"tokens": num_tokens, **counts.found(), "documents": documents, "unknown": unknown, **noted}


def _byte_parts(copy: _Copy, end_id: int | None, counts: _Counts) -> Iterator[tuple[Sequence[int] | IntArray, bool]]:
    for block, ends in copy.blocks():
        counts.add(block)
        ids: IntArray = np.frombuffer(block, np.uint8)
        if ends and end_id is not None:
            yield np.append(ids.astype(np.uint16), np.uint16(end_id)), True
        else:
            yield ids, False


def _line_parts(
    copy: _Copy, vocabulary: Vocabulary, counts: _Counts, noted: dict[str, int]
) -> Iterator[tuple[Sequence[int] | IntArray, bool]]:
    for block, file_ends in _blocks_of_lines(copy):
        if vocabulary.documents == "lines":
            kept = [line for line in block if line.strip()]
            noted["empty_dropped"] += len(block) - len(kept)
            block = kept
        counts.add(b"".join(block))
        if vocabulary.kind == "bytes":
            encoded = [list(line.removesuffix(b"\n")) for line in block]
        else:
            texts = [line.removesuffix(b"\n").decode("utf-8") for line in block]
            noted["control_characters"] += sum(bool(CONTROL.search(text)) for text in texts)
            noted["long_lines"] += sum(len(text) > MAX_LEARNED_CHARS for text in texts)
            encoded = vocabulary.encode_lines(texts)
        if vocabulary.documents == "lines":
            yield from (([*ids, vocabulary.line_id], True) for ids in encoded)
            continue
        ids = [index for line in encoded for index in (*line, vocabulary.line_id)]
        ends = file_ends and vocabulary.end_id is not None
        yield ([*ids, vocabulary.end_id] if ends and vocabulary.end_id is not None else ids), ends


def _blocks_of_lines(copy: _Copy) -> Iterator[tuple[list[bytes], bool]]:
    """Lines in lists of ENCODE_LINES, or of fewer where a file ends, and whether one does."""
    block: list[bytes] = []
    for line, ends in copy.lines():
        block.append(line)
        if ends or len(block) == ENCODE_LINES:
            yield block, ends
            block = []
