"""From text files, binary files or images to a folder of data for a language model; see `data.preparing`."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from manyheads.data.lines import Progress, ReadReport
from manyheads.data.preparing import (
    CONTROL,
    LANGUAGE_TASK,
    SPLITS,
    Holdout,
    InOrder,
    Source,
    given_splits,
    in_this_process,
    kept_part,
    prepare,
)
from manyheads.data.store import CHECK_TOKENS, IntArray, TokenStore, write_tokens
from manyheads.errors import DataError
from manyheads.files.verify import file_sha256
from manyheads.text.learning import MAX_LEARNED_CHARS, Rereadable
from manyheads.text.of_folder import learn_vocabulary, sample_of, vocabulary_from_json
from manyheads.text.settings import ITEM_BYTES, Extension, IdSettings, VocabularySettings
from manyheads.text.vocabulary import CHANNELS, IdVocabulary, Vocabulary

if TYPE_CHECKING:
    from manyheads.data.language.texts import IdSource, Text

BLOCK_BYTES = 2**20

Piece = tuple[Sequence[int] | IntArray, bool | IntArray]
"""Some ids, and whether a document ends with them, or the lengths of the documents that they are."""


@dataclass(frozen=True)
class Part:
    """A part of the copy of a split's files.

    Attributes:
        path: the copy.
        start: the first byte.
        stop: the byte after the last.
        files: for each file in the whole copy, the byte after its last, and its name.
    """

    path: Path
    start: int
    stop: int
    files: list[tuple[int, str]]

    def __len__(self) -> int:
        return self.stop - self.start

    def ends(self) -> list[int]:
        """Return the bytes after which a file ends, in order; the part's own end counts as the end of a file."""
        return sorted({*(end for end, _ in self.files if self.start < end < self.stop), self.stop})

    def blocks(self) -> Iterator[tuple[bytes, bool]]:
        """Yield blocks of bytes, and whether a file ends with each."""
        return self._read(lambda file, most: file.read(min(BLOCK_BYTES, most)))

    def lines(self) -> Iterator[tuple[bytes, bool]]:
        """Yield lines with their "\\n" (the last line of a file may have none), and whether a file ends with each."""
        return self._read(lambda file, most: file.readline(most))

    def blocks_of_lines(self) -> Iterator[tuple[bytes, bool]]:
        """Yield whole lines of PART_BYTES or more, or fewer at the end of a file, and whether it ends with them."""

        def read(file: BinaryIO, most: int) -> bytes:
            content = file.read(min(PART_BYTES, most))
            return content if content.endswith(b"\n") else content + file.readline(most - len(content))

        return self._read(read)

    def _read(self, read: Callable[[BinaryIO, int], bytes]) -> Iterator[tuple[bytes, bool]]:
        with self.path.open("rb") as file:
            place = file.seek(self.start)
            for end in self.ends():
                while place < end:
                    content = read(file, end - place)
                    if not content:
                        raise DataError(f"{self.path} became shorter while it was read. Does another program use it?")
                    place += len(content)
                    yield content, place == end


class TokenSource(Source):
    """Files whose content becomes stores of tokens.

    Args:
        splits: the input of each split.
        holdout: the part of the training input that becomes validation and test data.

    Attributes:
        what: name of the data in messages.
        unit: name of the unit that counts positions in the files, and `unit_bytes`, its size.
        counted: names of the counts of a split, besides `tokens` and `documents`.
        vocabulary: set by `learn` at the latest.

    Raises: ConfigError: a split is given and held back as well.
    """

    what = "text"
    unit = "bytes"
    unit_bytes = 1
    counted: tuple[str, ...] = (
        *("bytes", "characters", "words", "lines", "unknown"),
        *("empty_dropped", "control_characters", "long_lines"),
    )
    vocabulary: Vocabulary

    def __init__(self, splits: Mapping[str, Any], holdout: Holdout | None) -> None:
        self.holdout = holdout or Holdout()
        self.holdout.check_splits(splits)
        self.splits = splits

    @abstractmethod
    def blocks(self, split: str) -> Iterator[tuple[str, bytes, bool]]:
        """Read a split. Yields: the name of a file, some of its bytes, and whether it ends with them."""

    @abstractmethod
    def pieces(self, part: Part, counts: dict[str, int]) -> Iterator[Piece]:
        """Encode a part and add to the counts, `bytes` at least."""

    def held(self) -> tuple[int, int]:
        """Return how many bytes are held back for validation and for test."""
        return self.holdout.valid, self.holdout.test

    def cut(self, path: Path, place: int, stop: int) -> int:
        """Return the first byte from `place` on at which a copy can be cut. stop: its size."""
        return place

    def read(self) -> dict[str, str]:
        self.copies = {split: self._copy(split) for split in self.splits}
        origin = {split: given.describe() for split, given in self.splits.items()}
        self._hold_out(origin)
        for split, part in self.copies.items():
            if not len(part):
                raise DataError(
                    f"There is no {split} {self.what} in {origin[split]}; give other files, or more of them, or leave"
                    f" the {split} split out."
                )
        return origin

    def encode(self, split: str) -> dict[str, int]:
        part, vocabulary = self.copies[split], self.vocabulary
        counts = dict.fromkeys(self.counted, 0)

        def watched() -> Iterator[Piece]:
            told = 0
            for piece in self.pieces(part, counts):
                yield piece
                if counts["bytes"] >= told + BLOCK_BYTES:
                    told = counts["bytes"]
                    self.progress(f"encode {split}", told, len(part))

        num_tokens = write_tokens(self.folder / split, watched(), vocabulary.vocab_size)
        if not num_tokens:
            raise DataError(f"The {split} text has no tokens: every line is empty. Give another, or leave it out.")
        self.progress(f"encode {split}", len(part), len(part))
        store = TokenStore.open(self.folder / split, verify=False)
        if vocabulary.unk_id is not None:
            blocks = (store.ids[start : start + CHECK_TOKENS] for start in range(0, num_tokens, CHECK_TOKENS))
            counts["unknown"] = sum(int((block == vocabulary.unk_id).sum()) for block in blocks)
        documents = 0 if vocabulary.documents == "none" else store.num_documents
        return {"tokens": num_tokens, "documents": documents, **counts}

    def finish(self) -> tuple[str, ...]:
        for split in self.splits:
            self.copies[split].path.unlink()
        return ()

    def record(self) -> dict[str, Any]:
        task = {"name": LANGUAGE_TASK, "level": self.vocabulary.kind, "documents": self.vocabulary.documents}
        return {"task": task, "published_tokens": {}}

    def _copy(self, split: str) -> Part:
        """Copy a split into the folder: a pipe can be read only once, and a file may change."""
        path = self.folder / f"{split}.copy"
        size = 0
        files = []
        with path.open("wb") as file:
            for name, block, ends in self.blocks(split):
                size += file.write(block)
                if ends:
                    files.append((size, name))
                self.progress(f"read {split}", size, 0)
        self.progress(f"read {split}", size, size)
        return Part(path, 0, size, files)

    def _hold_out(self, origin: dict[str, str]) -> None:
        """Divide the training copy."""
        holdout, train, where = self.holdout, self.copies["train"], origin["train"]
        size = len(train)
        if holdout.whole and size != holdout.whole:
            raise DataError(
                f"{where} has {size:,} bytes, but the corpus of that name has {holdout.whole:,}. Give the whole file,"
                " or leave out --layout and set the number of bytes to hold back: --valid-bytes, --test-bytes."
            )
        if not size or (not holdout.valid and not holdout.test):  # `read` refuses an empty text
            return
        valid, test = self.held()
        if size <= valid + test:
            raise DataError(
                f"{where} has {size:,} bytes; with {holdout.valid:,} held back for validation and {holdout.test:,} for"
                " test, none is left to train on. Hold back fewer."
            )
        bounds = [0, *(self.cut(train.path, place, size) for place in (size - valid - test, size - test)), size]
        for split, start, stop in zip(SPLITS, bounds[:-1], bounds[1:], strict=True):
            if split == "train" or getattr(holdout, split):
                self.copies[split] = Part(train.path, start, stop, train.files)
                first, last = start // self.unit_bytes, stop // self.unit_bytes
                origin[split] = f"{self.unit} {first:,} to {last:,} of {where}"


PART_BYTES = 2**22  # of lines that are encoded together, and kept until the folder is complete
WHITE = np.zeros(256, np.bool_)
WHITE[list(b" \t\n\r\v\f")] = True
CONTROL_BYTES = bytes(index for index in range(128) if CONTROL.match(chr(index)))


def prepare_text(
    folder: str | Path,
    *,
    train: Text,
    valid: Text | None = None,
    test: Text | None = None,
    vocabulary: VocabularySettings | Vocabulary | Extension,
    holdout: Holdout | None = None,
    replace: bool = False,
    progress: Progress | None = None,
    key: str = "",
    published_tokens: dict[str, int] | None = None,
    in_order: InOrder = in_this_process,
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
        in_order: see `preparing.prepare`.

    Returns: the manifest.
    Raises:
        DataError: the text cannot be used, a split is empty, or the folder exists.
        ConfigError: a split is given and held back as well.
        SaveError: the disk is full or refuses; nothing is left behind.
    """
    source = _TextSource(given_splits(train, valid, test), vocabulary, holdout, published_tokens or {})
    return prepare(folder, source, replace=replace, progress=progress, key=key, in_order=in_order)


class _TextSource(TokenSource):
    """See `preparing.Source`."""

    def __init__(
        self,
        splits: dict[str, Text],
        vocabulary: VocabularySettings | Vocabulary | Extension,
        holdout: Holdout | None,
        published_tokens: dict[str, int],
    ) -> None:
        super().__init__(splits, holdout)
        self._published_tokens = published_tokens
        self._chosen = vocabulary
        if isinstance(vocabulary, Vocabulary):
            self.settings, self.vocabulary, level = None, vocabulary, vocabulary.kind
        elif isinstance(vocabulary, VocabularySettings):
            self.settings, level = vocabulary, vocabulary.level
        else:
            self.settings, level = vocabulary.settings, "bpe"
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
        part = self.copies["train"]
        if self.settings is None or self._as_bytes or len(part) < PART_BYTES:
            self.vocabulary = self._learned(part)
        else:
            made_of = [repr(self.settings), file_sha256(part.path), *map(str, (part.start, *part.ends()))]
            kept = self.parts.kept(made_of, lambda: self._learned(part).to_json().encode())
            self.vocabulary = vocabulary_from_json(kept.decode())
        return self.vocabulary

    def _learned(self, part: Part) -> Vocabulary:
        lines, chosen = Rereadable(lambda: self._learned_lines(part)), self._chosen
        if isinstance(chosen, Vocabulary):
            return chosen
        if isinstance(chosen, VocabularySettings):
            return learn_vocabulary(lines, chosen, num_files=len(part.ends()), on_progress=self.progress)
        extended: Vocabulary = chosen.learn(sample_of(lines), self.progress)
        return extended

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
        if not self._by_line:
            return _byte_pieces(part, self.vocabulary, counts)
        folder = self.parts.claimed() if len(part) >= PART_BYTES else None
        work = _EncodedLines(self.vocabulary, folder)
        return _line_pieces(part, self.vocabulary, counts, lambda blocks: self.in_order(work, blocks))


class _Counter:
    """Counts bytes, characters, words and lines of a text block by block, for results per byte, character and word.

    A character is a byte that does not continue a UTF-8 character; words are separated by ASCII white space.
    """

    def __init__(self, counts: dict[str, int]) -> None:
        self._counts = counts
        self._inside = False  # whether the last block ended within a word

    def add(self, sizes: Sequence[int]) -> None:
        """Add the numbers of the next block; see `_sizes`."""
        *numbers, begins, ends = sizes
        for name, number in zip(("bytes", "characters", "lines", "words"), numbers, strict=True):
            self._counts[name] += number
        if numbers[0]:
            self._counts["words"] -= int(self._inside and begins)
            self._inside = bool(ends)


def _sizes(block: bytes) -> list[int]:
    """Return how many bytes, characters, lines and words a block has, and whether it begins and ends within a word."""
    values = np.frombuffer(block, np.uint8)
    inside = ~WHITE[values]
    begins, ends = (int(inside[0]), int(inside[-1])) if len(inside) else (0, 0)
    words = begins + int(np.count_nonzero(inside[1:] > inside[:-1]))
    return [len(block), int(np.count_nonzero((values & 0xC0) != 0x80)), block.count(b"\n"), words, begins, ends]


def _byte_pieces(part: Part, vocabulary: Vocabulary, counts: dict[str, int]) -> Iterator[Piece]:
    counter = _Counter(counts)
    for block, file_ends in part.blocks():
        counter.add(_sizes(block))
        yield np.frombuffer(block, np.uint8), False
        if file_ends and vocabulary.end_id is not None:
            yield [vocabulary.end_id], True


_HEAD = ("control_characters", "long_lines", "empty_dropped", *("sizes",) * 6)


@dataclass(frozen=True)
class _EncodedLines:
    """Encodes blocks of whole lines, perhaps in a process of its own; see `preparing.InOrder`.

    Args: folder: where whole blocks are kept as parts; None: nowhere.
    """

    vocabulary: Vocabulary
    folder: Path | None

    def __reduce__(self) -> Any:
        return _encoded_lines, (self.vocabulary.to_json(), self.folder)

    def __call__(self, block: bytes) -> Iterator[bytes]:
        """Yield the numbers of _HEAD and of lines (int64), the length of each (int32), and the ids.

        Where documents are lines, those without text are left out.
        """

        def make() -> bytes:
            lines, content = block.removesuffix(b"\n").split(b"\n"), block
            if self.vocabulary.documents == "lines":
                kept = [line for line in lines if line.strip()]
                if len(kept) < len(lines):
                    last = b"\n" if kept and (block.endswith(b"\n") or not lines[-1].strip()) else b""
                    content = b"\n".join(kept) + last
            else:
                kept = lines
            control, long, ids, lengths = self._encoded(kept, content)
            head = [control, long, len(lines) - len(kept), *_sizes(content), len(lengths)]
            ends = np.insert(ids, np.cumsum(lengths), self.vocabulary.line_id)
            arrays = np.array(head, np.int64), (lengths + 1).astype(np.int32), ends.astype(_item(self.vocabulary))
            return b"".join(array.tobytes() for array in arrays)

        folder = self.folder if len(block) >= PART_BYTES else None
        yield kept_part(folder, [self.vocabulary.digest, "lines", block.decode("latin-1")], make)

    def _encoded(self, lines: list[bytes], content: bytes) -> tuple[int, int, IntArray, IntArray]:
        """Return the numbers of lines with control characters and of long ones, the ids in a row, and the lengths."""
        if self.vocabulary.kind == "bytes":
            joined = np.frombuffer(b"".join(lines), np.uint8)
            return 0, 0, joined.astype(np.int32), np.array([*map(len, lines)], np.int64)
        texts = [line.decode("utf-8") for line in lines]
        is_plain = len(content.translate(None, CONTROL_BYTES)) == len(content)
        control = 0 if is_plain else sum(bool(CONTROL.search(text)) for text in texts)
        return control, sum(len(text) > MAX_LEARNED_CHARS for text in texts), *self.vocabulary.encode_many(texts)


def _encoded_lines(vocabulary: str, folder: Path | None) -> _EncodedLines:
    return _EncodedLines(vocabulary_from_json(vocabulary), folder)


def _item(vocabulary: Vocabulary) -> str:
    return "<u2" if vocabulary.vocab_size <= 2**16 else "<u4"


def _line_pieces(
    part: Part,
    vocabulary: Vocabulary,
    counts: dict[str, int],
    encode: Callable[[Iterator[bytes]], Iterator[bytes]],
) -> Iterator[Piece]:
    counter = _Counter(counts)
    begun: deque[bool] = deque()  # whether a file ends with each block that is being encoded

    def blocks() -> Iterator[bytes]:
        for block, file_ends in part.blocks_of_lines():
            begun.append(file_ends)
            yield block

    for content in encode(blocks()):
        file_ends = begun.popleft()
        *head, num_lines = np.frombuffer(content, np.int64, len(_HEAD) + 1).tolist()
        for name, number in zip(_HEAD[:3], head[:3], strict=True):
            counts[name] += number
        counter.add(head[3:])
        lengths = np.frombuffer(content, np.int32, num_lines, offset=8 * (len(_HEAD) + 1))
        ids = np.frombuffer(content, _item(vocabulary), offset=8 * (len(_HEAD) + 1) + lengths.nbytes)
        yield ids, lengths if vocabulary.documents == "lines" else False
        if file_ends and vocabulary.documents == "files" and vocabulary.end_id is not None:
            yield [vocabulary.end_id], True


BLOCK_IDS = 2**20


def prepare_ids(
    folder: str | Path,
    *,
    train: IdSource,
    valid: IdSource | None = None,
    test: IdSource | None = None,
    settings: IdSettings,
    holdout: Holdout | None = None,
    replace: bool = False,
    progress: Progress | None = None,
    key: str = "",
) -> dict[str, Any]:
    """Make a folder of data from ids that do not stand for text; read it with `prepared_text.TextData.open`.

    Args:
        folder: the folder to make.
        train: the training ids; each file is read once.
        valid: the validation ids, if any.
        test: the test ids, if any.
        settings: form, vocabulary size and documents.
        holdout: take validation and test ids from the end of the training files, this number of bytes; where all
            documents have the same length, as images do, at most that number, and only whole documents.
        replace: replace an older folder of that name when this one is complete.
        progress: called with the phase, the number of bytes done, and the total or 0.
        key: stored in the manifest, to recognise the folder.

    Returns: the manifest.
    Raises:
        DataError: a file cannot be read, ends within an id or a document, or contains an id outside the vocabulary; a
            split is empty; the folder exists.
        ConfigError: a split is given and held back as well.
        MissingExtraError: a package that reads images is missing.
        SaveError: the disk is full or refuses; nothing is left behind.
    """
    source = _IdFiles(given_splits(train, valid, test), settings, holdout)
    return prepare(folder, source, replace=replace, progress=progress, key=key)


class _IdFiles(TokenSource):
    """See `preparing.Source`."""

    what = "data"
    unit = "ids"
    counted = (*TokenSource.counted, "bad_utf8_replaced", "bad_utf8_skipped")

    def __init__(self, splits: Mapping[str, IdSource], settings: IdSettings, holdout: Holdout | None) -> None:
        super().__init__(splits, holdout)
        self.settings: IdSettings = settings
        self.unit_bytes = ITEM_BYTES[settings.form]
        self._dtype = np.dtype(f"<u{self.unit_bytes}")
        self._document_len = CHANNELS * settings.image_size**2 if settings.image_size else settings.document_len

    def blocks(self, split: str) -> Iterator[tuple[str, bytes, bool]]:
        """See `TokenSource.blocks`. Raises: DataError: a file ends within a document."""
        size = 0
        for name, block, ends in self.splits[split].read():
            size += len(block)
            if ends and self._document_len and size % (self._document_len * self.unit_bytes):
                raise DataError(
                    f"{name} holds {size // self.unit_bytes:,} ids, which is not a multiple of the document length"
                    f" {self._document_len:,} (--document-len). Is the file incomplete?"
                )
            size = 0 if ends else size
            yield name, block, ends

    def held(self) -> tuple[int, int]:
        """Round down to whole documents; see `TokenSource.held`."""
        whole = self.unit_bytes * (self._document_len or 1)
        for split in ("valid", "test"):
            if 0 < getattr(self.holdout, split) < whole:
                raise DataError(
                    f"{getattr(self.holdout, split)} bytes are to be held back for {split}, less than one document of"
                    f" {whole:,} bytes; hold back more."
                )
        return self.holdout.valid // whole * whole, self.holdout.test // whole * whole

    def learn(self) -> IdVocabulary:
        """Look at all ids for the size of the vocabulary; see `Source.learn`."""
        settings = self.settings
        num_ids = 256 if settings.image_size else settings.vocab_size
        for split, part in self.copies.items():
            ids = self._ids(part)
            for start in range(0, len(ids), BLOCK_IDS):
                block = ids[start : start + BLOCK_IDS]
                largest = int(block.max())
                if settings.vocab_size and largest >= settings.vocab_size:
                    place = start + int(np.argmax(block >= settings.vocab_size))
                    byte = part.start + place * self.unit_bytes
                    name = next(name for end, name in part.files if byte < end)
                    raise DataError(
                        f"{name} ({split}) holds the id {ids[place]}, but the vocabulary has {settings.vocab_size:,}"
                        f" ids, 0 to {settings.vocab_size - 1:,}. Raise --vocab-size, or choose another --format."
                    )
                num_ids = max(num_ids, largest + 1)
        documents = "fixed" if self._document_len else settings.documents
        sizes = {"document_len": self._document_len, "image_size": settings.image_size}
        self.vocabulary = IdVocabulary(num_ids, settings.form, documents, **sizes)
        return self.vocabulary

    def pieces(self, part: Part, counts: dict[str, int]) -> Iterator[Piece]:
        ids = self._ids(part)
        begin = 0
        for end in ((end - part.start) // self.unit_bytes for end in part.ends()):
            step = self._document_len or BLOCK_IDS
            for start in range(begin, end, step):
                block = ids[start : min(start + step, end)]
                counts["bytes"] += block.nbytes
                yield block, self._document_len > 0
            if self.vocabulary.end_id is not None:
                yield [self.vocabulary.end_id], True
            begin = end

    def _ids(self, part: Part) -> IntArray:
        return np.memmap(part.path, self._dtype, "r")[part.start // self.unit_bytes : part.stop // self.unit_bytes]
