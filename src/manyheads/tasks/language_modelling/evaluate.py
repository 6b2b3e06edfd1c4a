"""Evaluation of a language model: likelihood of held-out text, also against memory, and the protocol.

The text that is scored is a file, prepared data, an embedded text, or the run's own data. `--dry-run` predicts time and
memory from its first segments.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from manyheads.catalogue import HOOKS, load
from manyheads.config.build import build
from manyheads.data.corpora import load_novel
from manyheads.data.language.prepared import NOVEL, open_text
from manyheads.data.language.texts import TextFiles
from manyheads.data.lines import Progress, phase_progress
from manyheads.data.settings import SegmentSettings
from manyheads.data.store import TokenStore
from manyheads.decoding.generator import Generator
from manyheads.distributed.launch import start
from manyheads.distributed.process import this_process
from manyheads.errors import ConfigError, DataError, MissingExtraError, refuse_nan
from manyheads.evaluation.likelihood import EnsembleReading, Likelihood, bits_per, evaluate_text
from manyheads.evaluation.reading import Reading, show_perplexity
from manyheads.files.safe_open import check_no_link
from manyheads.tasks.held_out import chosen_split, own_data, run_section
from manyheads.tasks.report import Report, TextReport, machine_lines, model_line, model_record
from manyheads.text.settings import VocabularySettings
from manyheads.text.vocabulary import IdVocabulary, Vocabulary
from manyheads.training.run.device import peak_memory_bytes

if TYPE_CHECKING:
    from manyheads.distributed.group import Group
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


TRIED_SECONDS = 30
TRIED_SEGMENTS = 5


@dataclass(frozen=True)
class TrialReport(TextReport):
    """See `tasks.report.Report`. results: a record for each reading."""

    results: list[dict[str, Any]]
    protocol: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"dry_run": self.results, "protocol": self.protocol}

    def to_lines(self) -> list[str]:
        lines = ["dry run: nothing was scored", f"  data       {self.protocol['data']}", model_line(self.protocol)]
        for one in self.results:
            lines += [
                f"  reading    {one['tokens']:,} tokens, {one['segments']:,} segments of {one['segment_len']:,} in"
                f" {one['lanes']:,} lanes, memory {one['memory_len']:,}",
                f"  time       about {_duration(one['total_seconds'])}; {one['segment_seconds']:.2f} seconds a segment,"
                f" measured on {one['measured']}{'' if one['memory_is_full'] else ' before the memory was full'}",
                f"  memory     {one['peak_bytes'] / 2**30:.2f} GiB at most so far,"
                f" {one['parameter_bytes'] / 2**30:.2f} GiB of it parameters",
            ]
        return lines


def try_reading(generator: Generator, options: EvaluateOptions, held: HeldText) -> TrialReport:
    """Score the first segments until the memory is full and some were timed, or `TRIED_SECONDS` have passed.

    Raises: DataError: there is nothing to score.
    """
    protocol = {
        "data": held.name,
        **model_record(options.model, generator.model, generator.device, generator.precision),
        **options.models.record(),
    }
    return TrialReport([_tried(generator, held, reading) for reading in readings_of(options)], protocol)


def _tried(generator: Generator, held: HeldText, reading: Reading) -> dict[str, Any]:
    attending = reading.attending(generator.model.config)
    each = attending if isinstance(attending, tuple) else (attending,)  # of an ensemble, one of each model
    memory_len = max(getattr(one, "memory_len", None) or 0 for one in each)
    starts_full = all(getattr(one, "initial_memory", "") == "zeros" for one in each)
    filling = 0 if starts_full else -(-memory_len // reading.segment_len)
    begun = time.monotonic()
    moments: list[float] = []

    def stop() -> bool:
        torch.zeros((), device=generator.device).item()  # waits until a GPU has finished
        moments.append(time.monotonic())
        enough = len(moments) > filling + TRIED_SEGMENTS or moments[-1] - begun > TRIED_SECONDS
        return enough and len(moments) > 1

    with generator.runner.inference():
        evaluate_text(
            generator.model,
            held.store,
            reading,
            generator.vocabulary,
            device=generator.device,
            stop=stop,
        )
    moments = moments if len(moments) > 1 else [begun, time.monotonic()]  # one segment was all
    times = [after - before for before, after in itertools.pairwise(moments)]
    segment_seconds = statistics.median(times[-min(TRIED_SEGMENTS, len(times)) :])
    tokens = held.num_read(reading)
    lanes = min(reading.lanes, max(tokens, 1))
    segments = -(-tokens // (lanes * reading.segment_len))
    return {
        "tokens": tokens,
        "segments": segments,
        "segment_len": reading.segment_len,
        "lanes": lanes,
        "memory_len": memory_len,
        "segment_seconds": segment_seconds,
        "total_seconds": segments * segment_seconds,
        "measured": f"{len(times)} segment{'s' if len(times) != 1 else ''}",
        "memory_is_full": len(times) > filling,
        "peak_bytes": peak_memory_bytes(generator.device),
        "parameter_bytes": sum(one.nbytes for one in generator.model.parameters()),
    }


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


class Scoring:
    """How a text is scored: with fixed weights, by all processes.

    Attributes: note: behind the perplexity. lines: of the protocol, after the last text.
    """

    note = ""
    lines: tuple[str, ...] = ()

    def __init__(self, options: EvaluateOptions, generator: Generator, group: Group) -> None:
        self.options, self.generator, self.group = options, generator, group

    def score(
        self, held: HeldText, reading: Reading, progress: Progress, phase: str
    ) -> tuple[Likelihood, dict[str, Any]]:
        """Score a text. Returns: and further entries of the record."""
        generator, group = self.generator, self.group
        with generator.runner.inference():
            found = evaluate_text(
                generator.model,
                held.store,
                reading,
                generator.vocabulary,
                device=generator.device,
                on_progress=phase_progress(progress, phase, held.num_read(reading) // group.world),
                part=(group.rank, group.world),
            )
        assert found is not None  # no `stop` is given
        parts = group.exchange([found.nll_sum, found.num_tokens])
        whole = Likelihood(math.fsum(nll for nll, _ in parts), sum(count for _, count in parts))
        refuse_nan(math.isnan(whole.nll_sum))
        return whole, {}


@dataclass(frozen=True)
class LikelihoodReport(TextReport):
    """See `tasks.report.Report`. results: a record for each reading. picture: of them."""

    results: list[dict[str, Any]]
    protocol: dict[str, Any]
    scoring: Scoring
    picture: Any = None

    def save(self) -> None:
        if self.picture is not None:
            self.picture.save()

    def to_json(self) -> dict[str, Any]:
        return {"results": self.results, "protocol": self.protocol, "pictures": self._pictures()}

    def _pictures(self) -> list[str]:
        return [] if self.picture is None else [str(path) for path in self.picture.paths]

    def to_lines(self) -> list[str]:
        record, protocol, many = self.results[0], self.protocol, len(self.results) > 1
        reading = record["reading"]
        lines = _table(self.results) if many else _figures(record, self.scoring.note)
        lines += [
            "protocol",
            f"  data       {protocol['data']}",
            f"  scored     {record['tokens']:,} tokens, each once; unit {protocol['unit']}",
        ]
        if "counts" in record:
            lines.append("  text       " + ", ".join(f"{count:,} {name}" for name, count in record["counts"].items()))
        lines += [
            model_line(protocol),
            f"  reading    segment {reading['segment_len']:,}, {_memory(reading, many)},"
            f"{f' read again {again:,},' if (again := reading['ext_len']) else ''}"
            f" {reading['lanes']:,} lanes, documents {reading['documents']}",
            *_other_memories(protocol, reading, many),
            *self.scoring.lines,
            *machine_lines(protocol),
        ]
        return [*lines, *(f"picture      {path}" for path in self._pictures())]


def _table(records: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'memory':>8}  {'nats/token':>10}  {'perplexity':>10}  {'bits/byte':>10}"]
    for record in records:
        per_byte = f"{record['bits_per_byte']:10.4f}" if "bits_per_byte" in record else f"{'-':>10}"
        lines.append(
            f"{record['reading']['memory_len'] or 0:>8,}  {record['nats_per_token']:10.4f}"
            f"  {show_perplexity(record['perplexity'], 3):>10}  {per_byte}"
        )
    return lines


def _figures(record: dict[str, Any], note: str) -> list[str]:
    lines = [
        f"perplexity = {show_perplexity(record['perplexity'], 3)}{note}",
        f"  {record['nats_per_token']:.4f} nats/token, {record['bits_per_token']:.4f} bits/token",
    ]
    if "counts" in record:
        return [
            *lines,
            f"  {record['bits_per_byte']:.4f} bits/byte, {record['bits_per_character']:.4f} bits/character",
            f"  {show_perplexity(record['perplexity_per_word'])} perplexity of a word, ends of lines counted",
        ]
    return [*lines, f"  {record['bits_per_byte']:.4f} bits/byte"] if "bits_per_byte" in record else lines


def evaluate(
    options: EvaluateOptions,
    progress: Progress,
    scoring_of: Callable[[EvaluateOptions, Generator, Group], Scoring] = Scoring,
) -> Report | None:
    """Judge a model.

    Returns: None on all ranks but the main one.
    Raises: DataError, ConfigError: there is no such text, or it was prepared with another vocabulary.
        NonFiniteError: the model gives NaN.
    """
    if options.plot is None:
        check_no_link(Path(options.model) / "plots")  # where a picture goes by default
    else:
        load(HOOKS["check pictures"])([f"{options.plot}.png"], given_by="--plot")
    group = start(this_process())
    generator = options.run_on.load(Generator.from_pretrained, options.models.all(options.model), progress)
    progress("reading the text", 0, 0)
    with group.main_first():
        held = held_text(generator, options.model, text=options.text, data=options.data, split=options.split)
    if options.dry_run:
        progress("trying the first segments", 0, 0)
        trial = try_reading(generator, options, held)
        group.close()
        return trial if group.is_main else None
    scoring = scoring_of(options, generator, group)
    scored: list[tuple[Reading, Likelihood]] = []
    further: list[dict[str, Any]] = []
    for reading in readings_of(options):
        phase = "scoring tokens" + (f", memory {reading.memory_len:,}" if len(options.memory_len) > 1 else "")
        likelihood, more = scoring.score(held, reading, progress, phase)
        scored.append((reading, likelihood))
        further.append(more)
    group.close()
    if not group.is_main:
        return None
    protocol = {
        "data": held.name,
        "unit": generator.vocabulary.kind,
        **model_record(options.model, generator.model, generator.device, generator.precision),
        **options.models.record(),
        "vocabulary": generator.vocabulary.digest,
    }
    picture = _draw(scored, held, options) if len(scored) > 1 else None
    records = [
        {**_record(reading, found, held, generator), **more}
        for (reading, found), more in zip(scored, further, strict=True)
    ]
    return LikelihoodReport(records, protocol, scoring, picture)


def _memory(reading: dict[str, Any], many: bool) -> str:
    memory = "as in the table" if many else f"{reading['memory_len'] or 0:,}"
    same_length = "yes" if reading["same_length"] else "no"
    return f"memory {memory}, clamp {reading['clamp_len'] or 'none'}, same length {same_length}"


def _other_memories(protocol: dict[str, Any], reading: dict[str, Any], many: bool) -> list[str]:
    """A line for each other model of an ensemble whose memory is unlike the first one's."""
    others = zip(protocol.get("ensemble", ()), reading.get("ensemble", ()), strict=True)
    found = [(name, _memory(other, many)) for name, other in others]
    return [f"             {name}: {memory}" for name, memory in found if memory != _memory(reading, many)]


def _record(reading: Reading, found: Likelihood, held: HeldText, generator: Generator) -> dict[str, Any]:
    """The figures of one reading. Per byte, character and word only where the whole text was scored."""
    attending = reading.attending(generator.model.config)
    first, *others = (
        {name: getattr(one, name, None) for name in ("memory_len", "clamp_len", "same_length")}
        for one in (attending if isinstance(attending, tuple) else (attending,))
    )
    record: dict[str, Any] = {
        "nats_per_token": found.nats_per_token,
        "bits_per_token": found.nats_per_token / math.log(2),
        "perplexity": found.perplexity,
        "tokens": found.num_tokens,
    }
    num_bytes = held.num_bytes(reading, generator.vocabulary)
    if num_bytes is not None:
        record["bits_per_byte"] = bits_per(found.nll_sum, num_bytes)
    if num_bytes is not None and generator.vocabulary.is_text:
        counts = held.counts
        words = counts["words"] + counts["lines"]
        record |= {
            "bits_per_character": bits_per(found.nll_sum, counts["characters"]),
            "perplexity_per_word": Likelihood(found.nll_sum, max(words, 1)).perplexity,
            "counts": {name: counts[name] for name in ("bytes", "characters", "words", "lines")},
        }
    record["reading"] = {
        "segment_len": reading.segment_len,
        **first,
        "ext_len": reading.ext_len,
        "lanes": reading.lanes,
        "documents": reading.documents,
        "max_tokens": reading.max_tokens,
        **({"ensemble": others} if others else {}),
    }
    return record


def _draw(scored: list[tuple[Reading, Likelihood]], held: HeldText, options: EvaluateOptions) -> Any:
    """Return the picture of the losses; None if nobody asked for it, or it cannot be drawn."""
    folder = Path(options.model)
    if options.plot is None and not (folder / "config.yaml").is_file():
        return None
    lens = [reading.memory_len or 0 for reading, _ in scored]
    nats = [found.nats_per_token for _, found in scored]
    path = options.plot or folder / "plots" / f"loss-by-memory{'-ensemble' if options.models.ensemble else ''}"
    try:
        how = {"unit": "nats a token", "title": f"Loss on {held.name}", "kinds": ("png", "svg")}
        return load(HOOKS["picture"])("loss by memory", path, lens, nats, **how)
    except MissingExtraError as error:  # the picture is optional, so its failure is no error
        sys.stderr.write(f"manyheads: no picture: {error}\n")
        return None
