"""The tokenizer of a model folder of any task."""

from __future__ import annotations

from pathlib import Path

from manyheads.files.json_object import read_object
from manyheads.text.sides import TranslationTokenizer, has_tokenizer, load_tokenizer
from manyheads.text.vocabularies import is_vocabulary, load_vocabulary
from manyheads.text.vocabulary import Vocabulary

__all__ = ["tokenizer_of_folder"]


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
