"""The vocabulary and the test text of a published Transformer-XL, from the `cache.pkl` beside its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manyheads.errors import ConfigError, DataError, ModelFileError
from manyheads.extras.peers.legacy_pickle import Corpus, read_corpus
from manyheads.text.word_vocabulary import Form, Lines, SymbolVocabulary

__all__ = ["CACHE", "CorpusFiles", "find_beside", "read_corpus_files"]

CACHE = "cache.pkl"
_FORMS: dict[str, tuple[Form, Lines, str]] = {
    "enwik8": ("bytes", "dropped", ""),
    "text8": ("characters", "dropped", ""),
    "ptb": ("words", "end", "<eos>"),
    "wt2": ("words", "end", "<eos>"),
    "wt103": ("words", "end", "<eos>"),
    "lm1b": ("words", "around", "<S>"),
}
"""What a symbol is, how lines are marked, and the symbol for it, by dataset."""
_UNKNOWN = "<unk>"


@dataclass(frozen=True)
class CorpusFiles:
    """What a cache.pkl contributes to a model folder. test: the text for testing; None: see notes, which are sentences
    for the user.
    """

    vocabulary: SymbolVocabulary
    test: bytes | None
    notes: list[str]


def find_beside(folder: Path, name: str) -> Path:
    """Return the place of a file of the data: in the folder, in `data` in it, or in `data` beside it.

    If there is none, return the first of these places.
    """
    places = [place / name for place in (folder, folder / "data", folder.parent / "data")]
    return next((place for place in places if place.is_file()), places[0])


def read_corpus_files(cache: Path, vocab_size: int) -> CorpusFiles:
    """Read a cache.pkl in a separate process, by an allow-list.

    Args: vocab_size: the model's.
    Raises: ModelFileError: it is damaged, or belongs to another model. ConfigError: its dataset is unknown.
    """
    corpus = read_corpus(cache)
    if corpus.dataset not in _FORMS:
        raise ConfigError(f"the dataset in {cache} is {corpus.dataset!r}; it must be one of {', '.join(_FORMS)}.")
    if len(corpus.symbols) != vocab_size:
        raise ModelFileError(
            f"{cache} has {len(corpus.symbols):,} words and the model {vocab_size:,}: they do not belong together."
        )
    form, lines, line = _FORMS[corpus.dataset]
    unknown = _UNKNOWN if _UNKNOWN in corpus.symbols else ""
    if corpus.unk_idx is not None and 0 <= corpus.unk_idx < vocab_size:
        unknown = corpus.symbols[corpus.unk_idx]
    try:
        vocabulary = SymbolVocabulary(
            corpus.symbols, form=form, lines=lines, line=line, unknown=unknown, lowercase=corpus.lower_case
        )
    except DataError as error:
        raise ModelFileError(f"{cache} cannot be used: {error}") from error
    notes = ["Line breaks in a text are left out, as in the original's data."] if lines == "dropped" else []
    return CorpusFiles(vocabulary, _test_text(corpus, vocabulary, notes), notes)


def _test_text(corpus: Corpus, vocabulary: SymbolVocabulary, notes: list[str]) -> bytes | None:
    """Return the text of the test split if encoding it gives the same ids again."""
    if not corpus.test:
        notes.append(f"There is no test text in {CACHE}.")
        return None
    text = vocabulary.decode_bytes(corpus.test)
    if vocabulary.encode_content(text) != corpus.test:
        notes.append(f"The test split in {CACHE} has no exact form as text, so no test.txt was written.")
        return None
    return text
