"""A model whose heads are measured, and the text for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from manyheads.architectures.head_names import prunable
from manyheads.architectures.hub import resolve_model_path
from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.pretrained import read_config
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.catalogue import ARCHITECTURES
from manyheads.config.build import build
from manyheads.config.options import given_options
from manyheads.data.batch import PairBatch, SegmentBatch
from manyheads.data.readers import PairFiles, ReadReport
from manyheads.data.segments import eval_segments
from manyheads.decoding.generator import Generator
from manyheads.decoding.translator import Translator
from manyheads.errors import DataError, RequestError
from manyheads.evaluation.reading import Reading
from manyheads.extras.inspect.heads.options import HeadTextOptions
from manyheads.tasks.held_out import copy_settings, own_data, pairs_of_split, run_section
from manyheads.tasks.table import task_of_folder
from manyheads.tasks.text.held_out import held_text
from manyheads.tasks.translation.likelihood import reference_batches

__all__ = ["HeldPairs", "HeldSegments", "Subject", "open_subject"]

_TASKS = ("translation", "text", "ids")
_OF_TRANSLATORS = ("--pairs", "--judge-pairs", "--num-beams", "--tokenize")
Split = Literal["test", "valid"]


@dataclass(frozen=True)
class HeldPairs:
    """Sentence pairs and their batches. name: a description for users."""

    name: str
    pairs: list[tuple[str, str]]
    batches: list[PairBatch]


@dataclass(frozen=True)
class HeldSegments:
    """The segments of a text in order. name: a description for users."""

    name: str
    batches: list[SegmentBatch]


@dataclass(frozen=True)
class Subject:
    """A model whose heads are judged. name: as the user wrote it."""

    name: str
    reader: Translator | Generator

    @property
    def model(self) -> Seq2Seq | LanguageModel:
        """The composite."""
        return cast(Seq2Seq | LanguageModel, self.reader.model)

    @property
    def device(self) -> Any:
        """Where it runs."""
        return self.reader.device

    def check_options(self, *options: Any) -> None:
        """Raises: RequestError: an option is for the other kind of model, so it would not be used."""
        translates = isinstance(self.reader, Translator)
        other = ("--max-tokens", "--judge-tokens") if translates else _OF_TRANSLATORS
        if unused := [name for name in given_options(*options) if name in other]:
            kind, others = ("translator", "language models") if translates else ("language model", "translators")
            raise RequestError(f"{', '.join(unused)}: this is for {others}, but {self.name} is a {kind}; leave it out.")

    def text(self, options: HeadTextOptions, split: Split = "valid") -> HeldPairs | HeldSegments:
        """Return the first part of the text that the options name. split: of data, if they name none.

        Raises: DataError, ConfigError: there is no such text. RequestError: an option of the other kind of model.
        """
        if isinstance(self.reader, Translator):
            if options.text is not None:
                raise RequestError(f"{self.name} translates; give --source and --reference instead of --text.")
            return self._pairs(self.reader, options, split)
        if options.source is not None:
            raise RequestError(f"{self.name} is a language model; give --text instead of --source and --reference.")
        return self._segments(self.reader, options, split)

    def _pairs(self, translator: Translator, options: HeadTextOptions, split: Split) -> HeldPairs:
        if options.source is not None and options.reference is not None:
            found = list(PairFiles(source=options.source, target=options.reference).read(ReadReport()))
            name = options.source
        else:
            data, seed = (options.data, 1) if options.data is not None else own_data(self.name)
            read = lambda which: pairs_of_split(data, which, seed, copy_settings(self.name))  # noqa: E731
            found, chosen = _either(read, options.split, split)
            name = f"{data} {chosen}"
        if not found:
            raise DataError(f"{name} has no sentence pairs, so heads cannot be judged; give another text.")
        pairs = found[: options.pairs]
        batches = list(reference_batches(translator, pairs, translator.options(too_long="truncate")))
        return HeldPairs(f"{len(pairs):,} pairs of {name}", pairs, batches)

    def _segments(self, generator: Generator, options: HeadTextOptions, split: Split) -> HeldSegments:
        read = lambda which: held_text(  # noqa: E731
            generator, self.name, text=options.text, data=options.data, split=which
        )
        held = _either(read, options.split, None if options.text is not None else split)
        reading = build(Reading, run_section(self.name, "reading"), "the run's reading", "reading")
        store, vocabulary = held.store.first(options.max_tokens), generator.vocabulary
        # The model keeps the end of a segment out of its memory if it was trained to read it again.
        ext_len = getattr(generator.model.config, "ext_len", 0) if reading.documents == "joined" else 0
        segments = eval_segments(
            store,
            lanes=reading.lanes,
            segment_len=reading.segment_len,
            documents=reading.documents,
            ext_len=ext_len,
            end_id=vocabulary.end_id,
            begin_id=vocabulary.begin_id,
        )
        return HeldSegments(f"{len(store):,} tokens of {held.name}", list(segments))


def _either(read: Callable[[Split | None], Any], asked: Split | None, preferred: Split | None) -> Any:
    """Read the requested part; otherwise the preferred one, or any other that exists."""
    if asked is not None or preferred is None:
        return read(asked)
    try:
        return read(preferred)
    except DataError:
        return read(None)


def open_subject(name: str, load: Callable[..., Any]) -> Subject:
    """Load a model whose heads can be judged.

    Args: load: as of `DeviceOptions.load`.

    Raises: RequestError: heads of this architecture cannot be masked, or its task is another. As
        `Translator.from_pretrained`.
    """
    config = read_config(resolve_model_path(name))
    prunable(config, name)
    task = task_of_folder(name)
    if task is not None and task not in _TASKS:
        raise RequestError(
            f"{name} was trained for the task {task}; heads are judged on translations or on a text. `manyheads prune"
            " --heads` removes heads that you name from every model."
        )
    translates = ARCHITECTURES[config.architecture].task == "translation"
    reader = load((Translator if translates else Generator).from_pretrained, name)
    return Subject(name, reader)
