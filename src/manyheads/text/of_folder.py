"""The tokenizer or vocabulary of a model folder of any task, and the training of vocabularies.

`PieceVocabulary` is the BPE of translation models, applied line by line, so that a text can have any length. Encoding
normalises text to NFC and keeps a "\\r" before a line break; everything else is restored exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from manyheads.catalogue import HOOKS, TASKS, load
from manyheads.errors import DataError
from manyheads.files.verify import read_object
from manyheads.text.learning import MAX_LEARNED_CHARS, Progress, Rereadable, thinned
from manyheads.text.pipeline import (
    BYTE_PIECES,
    LANGUAGE_FORMAT,
    SPECIAL_PIECES,
    has_tokenizer,
    in_parts,
    parse_json,
    read_tokenizer_file,
)
from manyheads.text.settings import ITEM_BYTES, TokenizerSettings, VocabularySettings
from manyheads.text.vocabulary import FORMAT_VERSION, ByteVocabulary, Documents, IdVocabulary, Vocabulary

if TYPE_CHECKING:
    from manyheads.text.sides import TranslationTokenizer
    from manyheads.text.tokenizer import Tokenizer

_FIRST_BYTE = len(SPECIAL_PIECES)


class PieceVocabulary(Vocabulary):
    """The ids of a `bpe` or `unigram` tokenizer. The byte 0x0A is a line break, `</s>` the end of a document.

    Args:
        tokenizer: a tokenizer without symbols.
        documents: what counts as a document.
    """

    kind = "bpe"
    unk_id = None

    def __init__(self, tokenizer: Tokenizer, documents: Documents = "none") -> None:
        self.documents = documents
        self.tokenizer = self.in_pieces = tokenizer
        self.end_id = None if documents == "none" else tokenizer.eos_id
        self.line_id = tokenizer.eos_id if documents == "lines" else _FIRST_BYTE + ord("\n")
        pieces = [piece.encode("utf-8") for piece in tokenizer.pieces]
        pieces[:_FIRST_BYTE] = [b""] * _FIRST_BYTE
        pieces[_FIRST_BYTE : _FIRST_BYTE + len(BYTE_PIECES)] = [bytes([byte]) for byte in range(len(BYTE_PIECES))]
        self._bytes = pieces
        spaced = [index for index, piece in enumerate(pieces) if piece.startswith(b" ")]
        bare = [index for index in spaced if not pieces[index].strip(b" ")]
        self._spaced = bare, sorted({*spaced} - {*bare})

    @property
    def vocab_size(self) -> int:
        """Number of ids, including special and byte pieces."""
        return self.tokenizer.vocab_size

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the pieces of each line, using all threads of the library."""
        return self.tokenizer.encode_batch(lines)

    def encode_many(self, lines: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        return self.tokenizer.encode_many(lines)

    def spaced_ids(self) -> tuple[list[int], list[int]]:
        return self._spaced

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the joined pieces, without the space before each line's first word; special ids give nothing."""
        text = bytearray()
        begins = True
        for index in self._checked(ids):
            if index == self.line_id:
                text += b"\n"
            if index in (self.line_id, self.end_id):
                begins = True
            elif piece := self._bytes[index]:
                text += piece.removeprefix(b" ") if begins else piece
                begins = False
        return bytes(text)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the pieces: spaces as `▁`, bytes as `<0xE2>`, special ids as `</s>`."""
        return self.tokenizer.tokens(ids)

    def describe(self) -> dict[str, object]:
        """Return the properties to show to users."""
        return {**super().describe(), "lowercase": self.tokenizer.lowercase}

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        return self._render(tokenizer=json.loads(self.tokenizer.to_json()))


DEFAULT_PIECES = 8000


def learn_vocabulary(
    lines: Iterable[str],
    settings: VocabularySettings,
    *,
    num_files: int = 1,
    on_progress: Progress = lambda phase, done, total: None,
) -> Vocabulary:
    """Train a vocabulary on a text. The same text gives the same bytes.

    Args:
        lines: the text; not read at all for bytes. Subwords read it several times, and keep an iterator in memory.
        settings: level, size and documents.
        num_files: number of files of the text, which is used if documents are files.
        on_progress: progress of subwords, see `learn_pieces`.

    Raises: DataError: the text is empty, or contains an unpaired surrogate.
    """
    if settings.level == "bytes":
        return ByteVocabulary(settings.documents)
    if settings.level == "words":
        from manyheads.text.word_vocabulary import WordVocabulary

        return WordVocabulary.learn(lines, settings, num_files=num_files)
    from manyheads.text.tokenizer import Tokenizer

    own = TokenizerSettings(kind="bpe", vocab_size=settings.vocab_size or DEFAULT_PIECES, lowercase=settings.lowercase)
    return PieceVocabulary(Tokenizer.train(sample_of(lines), own, on_progress=on_progress), settings.documents)


def sample_of(lines: Iterable[str]) -> Iterable[str]:
    """Return the lines from which subwords are learned, long ones in parts; of very many lines a part."""
    known = list(lines) if isinstance(lines, Iterator) else lines
    parts = Rereadable(
        lambda: (part for line in known for part, _ in in_parts(line, MAX_LEARNED_CHARS, through_words=True))
    )
    count = size = 0
    for part in parts:
        count, size = count + 1, size + len(part)
    return thinned(parts, count, size)


def is_vocabulary(content: Any) -> bool:
    """Return whether the parsed content of a tokenizer.json is a language model's vocabulary."""
    return isinstance(content, dict) and content.get("format") == LANGUAGE_FORMAT


def load_vocabulary(path: str | Path) -> Vocabulary:
    """Read a tokenizer.json, given its path or its folder.

    Raises: DataError: the file is missing or damaged, or belongs to a translation model.
    """
    path = Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    return vocabulary_from_json(read_tokenizer_file(path), where=str(path))


def vocabulary_from_json(text: str, *, where: str = "The text") -> Vocabulary:
    """Return the vocabulary that `to_json` wrote. where: its name in error messages.

    Raises: DataError: the text is damaged, of a newer version, or not a language model's vocabulary.
    """
    content = parse_json(text, where)
    if not is_vocabulary(content):
        raise DataError(f"{where} is not the vocabulary of a language model: its format is not {LANGUAGE_FORMAT}.")
    version = content.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise DataError(
            f"{where} has format_version {version!r}; this program reads up to {FORMAT_VERSION}. Update manyheads."
        )
    documents = content.get("documents")
    if documents not in get_args(Documents):
        raise DataError(f"{where}: documents is {documents!r}; it must be one of {', '.join(get_args(Documents))}.")
    try:
        made = _build(content, documents)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    if made.to_json() != text:  # the values read above determine the whole file
        raise DataError(f"{where} was changed or damaged. Prepare the data again, or copy the file once more.")
    return made


def _build(content: dict[str, Any], documents: Documents) -> Vocabulary:
    level = content.get("level")
    if level == "ids":
        sizes = {name: content.get(name) for name in ("num_ids", "document_len", "image_size")}
        if any(type(size) is not int for size in sizes.values()) or content.get("form") not in ITEM_BYTES:
            raise DataError("the form or the sizes of its ids are not valid.")
        return IdVocabulary(form=content["form"], documents=documents, **sizes)  # type: ignore[arg-type]
    if documents == "fixed":
        raise DataError("documents is 'fixed', which only vocabularies of ids can have.")
    if level == "bytes":
        return ByteVocabulary(documents)
    if level == "words":
        from manyheads.text.word_vocabulary import WordVocabulary

        words, lowercase = content.get("words"), content.get("lowercase")
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            raise DataError("the words are missing, or are not text.")
        if not isinstance(lowercase, bool):
            raise DataError(f"lowercase is {lowercase!r}; it must be true or false.")
        return WordVocabulary(words, documents, lowercase=lowercase)
    if level == "symbols":
        if documents != "none":
            raise DataError(f"documents is {documents!r}; with level symbols it must be 'none'.")
        from manyheads.text.word_vocabulary import SymbolVocabulary

        return SymbolVocabulary.from_content(content)
    if level == "bpe":
        from manyheads.text.tokenizer import Tokenizer

        inner = Tokenizer.from_json(json.dumps(content.get("tokenizer"), ensure_ascii=False), where="its tokenizer")
        if inner.kind == "word" or inner.symbols:
            raise DataError(f"its pieces are those of a {inner.kind} tokenizer, or of a parser.")
        return PieceVocabulary(inner, documents)
    raise DataError(f"level is {level!r}; this program knows bytes, bpe, words, symbols and ids.")


TASK_FILE = "task.json"
"""The record of a task whose tokenizer does more than convert text."""


def tokenizer_of_folder(folder: Path) -> TranslationTokenizer | Vocabulary | None:
    """Load a translator's or parser's tokenizer, or a language model's or classifier's vocabulary.

    Returns: None if the folder has no such file.
    Raises: DataError: it is damaged. MissingExtraError: it needs a package that is not installed.
    """
    if not has_tokenizer(folder):
        return None
    file = folder / "tokenizer.json"
    if file.is_file() and is_vocabulary(read_object(file)):
        return load_vocabulary(folder)
    return load_tokenizer(folder)


def load_tokenizer(folder: Path) -> TranslationTokenizer:
    """Load the tokenizer of a translation model's folder.

    Raises: DataError: it is missing or damaged. ModelFileError: task.json cannot be read. MissingExtraError: it needs a
        package that is not installed.
    """
    from manyheads.text.tokenizer import Tokenizer
    from manyheads.text.word_sides import FORMAT, WordSides

    if (folder / "tokenizer.json").is_file():
        content = parse_json(read_tokenizer_file(folder / "tokenizer.json"), str(folder / "tokenizer.json"))
        if isinstance(content, dict) and content.get("format") == FORMAT:
            return WordSides.from_content(content, str(folder / "tokenizer.json"))
        tokenizer, file = Tokenizer.load(folder / "tokenizer.json"), folder / TASK_FILE
        try:
            return tokenizer_of_task(tokenizer, read_object(file), str(file))
        except FileNotFoundError:
            return tokenizer
    if (folder / "source.spm").is_file():
        marian: TranslationTokenizer = load(HOOKS["tokenizer of Marian models"]).load(folder)
        return marian
    raise DataError(f"{folder} has no tokenizer: neither tokenizer.json nor source.spm is there.")


def tokenizer_of_task(tokenizer: Tokenizer, record: dict[str, Any], where: str) -> Tokenizer:
    """Return the tokenizer with what the recorded task adds to it, see `catalogue.Task.tokenizer`.

    Raises: DataError: the record, whose file is `where`, names no task that has its own tokenizer, or is damaged.
    """
    name = record.get("name")
    known = {task: entry.tokenizer for task, entry in TASKS.items() if entry.tokenizer}
    if name not in known:
        listed = " or ".join(f"`{task}`" for task in known)
        raise DataError(f"{where} names the task {name!r}; the only task that this file can name is {listed}.")
    made: Tokenizer = load(known[name]).of_record(tokenizer, record, where)
    return made
