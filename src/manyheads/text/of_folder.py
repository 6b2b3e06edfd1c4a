"""The tokenizer of a model folder of any task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manyheads.catalogue import HOOKS, TASKS, load
from manyheads.errors import DataError
from manyheads.files.verify import read_object
from manyheads.text.pipeline import parse_json, read_tokenizer_file
from manyheads.text.sides import TranslationTokenizer
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabularies import is_vocabulary, load_vocabulary
from manyheads.text.vocabulary import Vocabulary
from manyheads.text.word_sides import FORMAT, WordSides

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


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model folder contains a tokenizer, complete or not."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "source.spm"))


def load_tokenizer(folder: Path) -> TranslationTokenizer:
    """Load the tokenizer of a translation model's folder.

    Raises: DataError: it is missing or damaged. ModelFileError: task.json cannot be read. MissingExtraError: it needs a
        package that is not installed.
    """
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
