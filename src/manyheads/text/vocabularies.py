"""Training and loading of the vocabularies of language models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

from manyheads.errors import DataError
from manyheads.text.byte_vocabulary import ByteVocabulary
from manyheads.text.id_vocabulary import IdVocabulary
from manyheads.text.learning import MAX_LEARNED_CHARS, Rereadable, Told, thinned
from manyheads.text.long_lines import in_parts
from manyheads.text.piece_vocabulary import PieceVocabulary
from manyheads.text.pipeline import LANGUAGE_FORMAT
from manyheads.text.settings import ITEM_BYTES, TokenizerSettings, VocabularySettings
from manyheads.text.symbol_vocabulary import SymbolVocabulary
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.tokenizer_file import parse_json, read_tokenizer_file
from manyheads.text.vocabulary import FORMAT_VERSION, Documents, Vocabulary
from manyheads.text.word_vocabulary import WordVocabulary

__all__ = ["is_vocabulary", "learn_vocabulary", "load_vocabulary", "sample_of", "vocabulary_from_json"]

DEFAULT_PIECES = 8000


def learn_vocabulary(
    lines: Iterable[str],
    settings: VocabularySettings,
    *,
    num_files: int = 1,
    told: Told = lambda phase, done, total: None,
) -> Vocabulary:
    """Train a vocabulary on a text. The same text gives the same bytes.

    Args:
        lines: the text; not read at all for bytes. Subwords read it several times, and keep an iterator in memory.
        settings: level, size and documents.
        num_files: number of files of the text, which is used if documents are files.
        told: progress of subwords, see `learn_pieces`.

    Raises: DataError: the text is empty, or contains an unpaired surrogate.
    """
    if settings.level == "bytes":
        return ByteVocabulary(settings.documents)
    if settings.level == "words":
        return WordVocabulary.learn(lines, settings, num_files=num_files)
    own = TokenizerSettings(kind="bpe", vocab_size=settings.vocab_size or DEFAULT_PIECES, lowercase=settings.lowercase)
    return PieceVocabulary(Tokenizer.train(sample_of(lines), own, told=told), settings.documents)


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
        words, lowercase = content.get("words"), content.get("lowercase")
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            raise DataError("the words are missing, or are not text.")
        if not isinstance(lowercase, bool):
            raise DataError(f"lowercase is {lowercase!r}; it must be true or false.")
        return WordVocabulary(words, documents, lowercase=lowercase)
    if level == "symbols":
        if documents != "none":
            raise DataError(f"documents is {documents!r}; with level symbols it must be 'none'.")
        return SymbolVocabulary.from_content(content)
    if level == "bpe":
        inner = Tokenizer.from_json(json.dumps(content.get("tokenizer"), ensure_ascii=False), where="its tokenizer")
        if inner.kind == "word" or inner.symbols:
            raise DataError(f"its pieces are those of a {inner.kind} tokenizer, or of a parser.")
        return PieceVocabulary(inner, documents)
    raise DataError(f"level is {level!r}; this program knows bytes, bpe, words, symbols and ids.")
