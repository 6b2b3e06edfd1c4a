"""The text that a language model is scored on: a file, prepared data, an embedded text, or the run's own data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manyheads.config.build import build
from manyheads.data.corpora import load_novel
from manyheads.data.language.prepared import NOVEL, open_text
from manyheads.data.language.texts import TextFiles
from manyheads.data.settings import SegmentSettings
from manyheads.data.store import TokenStore
from manyheads.errors import ConfigError, DataError
from manyheads.evaluation.likelihood import EnsembleReading
from manyheads.evaluation.reading import Reading
from manyheads.files.safe_open import check_no_link
from manyheads.tasks.held_out import chosen_split, own_data, run_section
from manyheads.text.settings import VocabularySettings
from manyheads.text.vocabulary import IdVocabulary, Vocabulary

if TYPE_CHECKING:
    from manyheads.decoding.generator import Generator
    from manyheads.tasks.language_modelling.options import EvaluateOptions


@dataclass(frozen=True)
class HeldText:
    """A text to be scored. counts: of the whole text, by unit."""

    name: str
    store: TokenStore
    counts: dict[str, int]

    def num_read(self, reading: Reading) -> int:
        """The number of tokens that are read."""
        return min(reading.max_tokens or len(self.store), len(self.store))

    def num_bytes(self, reading: Reading, vocabulary: Vocabulary) -> int | None:
        """Return the number of bytes that are scored.

        None: only a part of the text is read, or its tokens are ids of more than one byte, which stand for no bytes.
        """
        is_known = vocabulary.is_text or self.counts["bytes"] <= len(self.store)
        return self.counts["bytes"] if is_known and self.num_read(reading) == len(self.store) else None


def held_text(
    generator: Generator, model: str, *, text: str | None = None, data: str | None = None, split: str | None = None
) -> HeldText:
    """The text that a language model is scored on.

    Args:
        generator: of the model; its vocabulary encodes the text.
        model: the folder of the model or of its run.
        text: a text file; excludes `data` and `split`.
        data: prepared data or an embedded text; None: that of the run.
        split: `test`, `valid` or `train`; None: `test` if there is one, else `valid`.

    Raises: DataError, ConfigError: there is no such text, or it was prepared with another vocabulary.
    """
    if text is not None:
        return _text_file(generator, text)
    folder = Path(model)
    path = data or own_data(model, "--text FILE")[0]
    cache = next((place / "data" for place in (folder, folder.absolute().parent) if (place / "data").is_dir()), None)
    if cache is not None:
        check_no_link(cache)  # an embedded text may have to be prepared there again
    vocabulary = generator.vocabulary
    if path.startswith("embedded:") and cache is None:
        return _embedded(generator, path, split)
    # These settings are used only if the embedded text has to be prepared, and can describe only these levels.
    learned = vocabulary.kind in ("bytes", "bpe", "words")
    known = {"level": vocabulary.kind, "documents": vocabulary.documents} if learned else {}
    found = open_text(SegmentSettings(path=path), build(VocabularySettings, known), cache or Path())
    if found.vocabulary.digest != vocabulary.digest:
        raise ConfigError(
            f"{path} was prepared with another vocabulary ({found.vocabulary.digest[:12]}) than the model's"
            f" ({vocabulary.digest[:12]}); give the text itself by --text."
        )
    stores = {"test": found.test, "valid": found.valid, "train": found.train}
    name = chosen_split(stores, split)
    if name is not None and (store := stores[name]) is not None:
        return HeldText(f"{path} {name}", store, found.counts(name))
    raise DataError(f"{path} has no {split or 'test or valid'} text; give one by --text.")


def _embedded(generator: Generator, path: str, split: str | None) -> HeldText:
    if path != NOVEL:
        raise ConfigError(f"There is no embedded text {path!r}; the embedded one is {NOVEL}.")
    content = dict(zip(("train", "valid", "test"), load_novel().values(), strict=True))[split or "test"]
    return _encoded(generator, f"{path} {split or 'test'}", content)


def _text_file(generator: Generator, name: str) -> HeldText:
    if isinstance(generator.vocabulary, IdVocabulary):
        raise ConfigError("--text is for text, but this model reads ids; give --data, made by prepare --format.")
    content = b"".join(block for block, _ in TextFiles(paths=[name]).read(as_bytes=generator.vocabulary.reads_bytes))
    return _encoded(generator, name, content)


def _encoded(generator: Generator, name: str, content: bytes) -> HeldText:
    vocabulary = generator.vocabulary
    documents, content = _documents_of(vocabulary, content)
    counts = {
        "bytes": len(content),
        "characters": len(content.decode("utf-8", "replace")),
        "words": len(content.split()),
        "lines": content.count(b"\n"),
    }
    return HeldText(name, TokenStore.from_lists(documents, vocabulary.vocab_size), counts)


def _documents_of(vocabulary: Vocabulary, content: bytes) -> tuple[list[list[int]], bytes]:
    """Return the documents of a file as `prepare --task lm` makes them, and the text that they contain.

    Where lines are documents, empty ones are dropped.
    """
    if vocabulary.documents != "lines" or vocabulary.end_id is None:
        ends = [] if vocabulary.end_id is None else [vocabulary.end_id]
        return [[*vocabulary.encode_content(content), *ends]], content
    lines = [line for line in content.split(b"\n") if line.strip()]
    if vocabulary.reads_bytes:
        encoded = [list(line) for line in lines]
    else:
        encoded = vocabulary.encode_lines([line.decode("utf-8") for line in lines])
    return [[*ids, vocabulary.end_id] for ids in encoded], b"".join(line + b"\n" for line in lines)


def readings_of(options: EvaluateOptions) -> list[Reading]:
    """Return the settings for reading: those of the run's validation, with the changes of the command line.

    Of an ensemble: in segments as the first model, each with the memory of its own run.
    """
    base = _reading(options, options.model)
    if others := tuple(_reading(options, name) for name in options.models.ensemble):
        base = EnsembleReading(**vars(base), others=others)
    return [_remembering(base, length) for length in options.memory_len] or [base]


def _remembering(reading: Reading, memory_len: int) -> Reading:
    """The same with another length of every memory."""
    if not isinstance(reading, EnsembleReading):
        return dataclasses.replace(reading, memory_len=memory_len)
    others = tuple(_remembering(one, memory_len) for one in reading.others)
    return dataclasses.replace(reading, memory_len=memory_len, others=others)


def _reading(options: EvaluateOptions, name: str) -> Reading:
    """How to read with one model, but for its memory length."""
    values = {**run_section(name, "reading"), "max_tokens": 0}
    for name in ("segment_len", "ext_len", "clamp_len", "lanes", "documents", "max_tokens"):
        if getattr(options, name) is not None:
            values[name] = getattr(options, name)
    if options.same_length is not None:
        values["same_length"] = options.same_length == "yes"
    return build(Reading, values, "the options", "reading")
