"""`manyheads evaluate` of a language model: likelihood of held-out text, against memory, and the protocol."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from manyheads import __version__
from manyheads.cli.decoding_options import DeviceOptions
from manyheads.cli.output import LineWriter
from manyheads.cli.parsing import parse
from manyheads.cli.phases import showing_if_long, telling
from manyheads.cli.sharding import local_device, refuse_ranks
from manyheads.distributed.launch import find_place, start
from manyheads.errors import ConfigError, DataError
from manyheads.files.guarded import check_no_link

if TYPE_CHECKING:
    from manyheads.data.token_store import TokenStore
    from manyheads.decoding.generator import Generator
    from manyheads.evaluation.likelihood import Likelihood
    from manyheads.evaluation.reading import Reading

__all__ = ["EvaluateTextOptions", "Held", "evaluate_text_command", "held_text", "readings_of"]

_DESCRIPTION = """Judge a language model on held-out text: nats and perplexity a token, bits a byte and a character,
perplexity a word, and the protocol: all that must be equal before two such figures may be compared. Every token is
scored once. Text comes from --text or --data; without either, from what the run was trained with.
With several --memory-len there is a table, and a picture of the loss against memory."""

_EXAMPLES = (
    "manyheads evaluate runs/xl-demo",
    "manyheads evaluate runs/xl-demo --memory-len 0 64 128 256 --segment-len 64 --same-length yes",
    "manyheads evaluate runs/xl-demo --text other.txt --json",
)
_RUNS = "(default: the run's)"
MOST_HASHES = 1000
_FLAG = arg(help_behavior_hint="")


@dataclass(frozen=True, kw_only=True)
class EvaluateTextOptions:
    """Options of `manyheads evaluate` for a language model."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A model folder, a run folder, or owner/name on the Hugging Face hub."""
    data: Annotated[str | None, arg(metavar="DATA", help_behavior_hint=_RUNS)] = None
    """A folder written by prepare --task lm with the model's vocabulary, or embedded:crime-and-punishment."""
    split: Annotated[
        Literal["test", "valid", "train"] | None,
        arg(metavar="{test,valid,train}", help_behavior_hint="(default: test if there is one)"),
    ] = None
    """Which part of the data."""
    text: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """A text file, plain or gzip, in place of data."""
    segment_len: Annotated[int | None, arg(metavar="N", help_behavior_hint=_RUNS)] = None
    """Tokens read at a time."""
    memory_len: Annotated[tuple[int, ...], arg(metavar="N ...", help_behavior_hint=_RUNS)] = ()
    """Positions a layer that are remembered; several give a table."""
    clamp_len: Annotated[int | None, arg(metavar="N", help_behavior_hint=_RUNS)] = None
    """Whatever is farther away counts as so far; 0 has no limit."""
    same_length: Annotated[Literal["yes", "no"] | None, arg(metavar="{yes,no}", help_behavior_hint=_RUNS)] = None
    """Whether every token sees memory_len positions and no more."""
    lanes: Annotated[int | None, arg(metavar="N", help_behavior_hint=_RUNS)] = None
    """Places of the text that are read side by side; each but the first begins without memory."""
    documents: Annotated[
        Literal["joined", "separate"] | None, arg(metavar="{joined,separate}", help_behavior_hint=_RUNS)
    ] = None
    """Whether memory goes on from document to document."""
    max_tokens: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all)")] = None
    """Score the first so many tokens only."""
    num_hashes: Annotated[tuple[str, ...], arg(metavar="N|full ...", help_behavior_hint="(default: the model's)")] = ()
    """Of a Reformer: hash rounds, or full for exact attention; several give a table."""
    beside: Annotated[tuple[str, ...], arg(metavar="MODEL ...", help_behavior_hint="")] = ()
    """With --num-hashes: other models on the same data, a row of the table each."""
    plot: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: in the run's plots)")] = None
    """Where the picture of several memories goes, as PNG and SVG."""
    json: Annotated[bool, _FLAG] = False
    """Print one JSON object."""
    run_on: Annotated[DeviceOptions, arg(name="")] = field(default_factory=DeviceOptions)

    def __post_init__(self) -> None:
        if self.text is not None and (self.data is not None or self.split is not None):
            raise ConfigError("--text is a text of its own; leave out --data and --split.")
        if self.plot is not None and len(self.memory_len) < 2:
            raise ConfigError("--plot draws the loss of several memories; give --memory-len two values or more.")
        if self.num_hashes and len(self.memory_len) > 1:
            raise ConfigError("--num-hashes and several --memory-len make two tables; ask for one at a time.")
        if self.beside and not self.num_hashes:
            raise ConfigError("--beside compares models by hash rounds; give --num-hashes with it.")
        for text in self.num_hashes:
            if text != "full" and not (text.isdecimal() and 0 < int(text) <= MOST_HASHES):
                raise ConfigError(f"--num-hashes {text} is none; give numbers of 1 to {MOST_HASHES}, or full.")


@dataclass(frozen=True)
class Held:
    """A text to be scored. counts: of the whole text, by unit."""

    name: str
    store: TokenStore
    counts: dict[str, int]


def evaluate_text_command(arguments: Sequence[str]) -> int:
    """Evaluate a language model. Returns: the exit code."""
    options = parse(EvaluateTextOptions, arguments, command="evaluate", description=_DESCRIPTION, examples=_EXAMPLES)
    from manyheads.cli.evaluate_hashes import duplication_of, evaluate_hashes
    from manyheads.decoding.device import inference
    from manyheads.decoding.generator import Generator
    from manyheads.evaluation.language_model import evaluate_text
    from manyheads.evaluation.likelihood import Likelihood

    if options.num_hashes or duplication_of(options) is not None:
        refuse_ranks("evaluate by hash rounds")
        return evaluate_hashes(options)
    if options.plot is None:
        check_no_link(Path(options.model) / "plots")  # where a picture goes by default
    group = start(find_place())
    device = local_device(options.run_on.device)
    scored: list[tuple[Reading, Likelihood]] = []
    with showing_if_long() as show:
        show("loading the model", 0, 0)
        generator = Generator.from_pretrained(options.model, device, options.run_on.fixed_precision())
        show("reading the text", 0, 0)
        with group.main_first():
            held = held_text(generator, options)
        for reading in readings_of(options):
            with inference(generator.device, generator.precision):
                found = evaluate_text(
                    generator.model,
                    held.store,
                    reading,
                    end_id=generator.vocabulary.end_id,
                    begin_id=generator.vocabulary.begin_id,
                    device=generator.device,
                    told=telling(show, scoring(options, reading), tokens_of(held, reading) // group.world),
                    part=(group.rank, group.world),
                )
            assert found is not None  # nobody asked it to stop
            parts = group.exchange([found.nll_sum, found.num_tokens])
            scored.append((reading, Likelihood(math.fsum(nll for nll, _ in parts), sum(count for _, count in parts))))
    group.close()
    if not group.is_main:
        return 0
    pictures = _draw(scored, held, options) if len(scored) > 1 else []
    records = [_record(reading, found, held, generator) for reading, found in scored]
    protocol = {
        "data": held.name,
        "unit": generator.vocabulary.kind,
        "model": options.model,
        "parameters": sum(parameter.numel() for parameter in generator.model.parameters()),
        "vocabulary": generator.vocabulary.digest,
        "device": str(generator.device),
        "precision": generator.precision,
        "versions": _versions(),
    }
    with LineWriter("-") as writer:
        if options.json:
            record = {"results": records, "protocol": protocol, "pictures": [str(path) for path in pictures]}
            writer.write([json.dumps(record, ensure_ascii=False, indent=2)])
        else:
            writer.write(_as_text(records, protocol, pictures))
    return 0


def scoring(options: EvaluateTextOptions, reading: Reading) -> str:
    """The name of the phase in which a reading is scored, for the progress display."""
    return "scoring tokens" + (f", memory {reading.memory_len:,}" if len(options.memory_len) > 1 else "")


def tokens_of(held: Held, reading: Reading) -> int:
    """How many tokens are read."""
    return min(reading.max_tokens or len(held.store), len(held.store))


def readings_of(options: EvaluateTextOptions) -> list[Reading]:
    """How to read: the run's way, with what the command line changes."""
    from manyheads.config.build import build
    from manyheads.config.files import load_yaml
    from manyheads.evaluation.reading import Reading

    folder = Path(options.model)
    file = next((place / "config.yaml" for place in (folder, folder.parent) if (place / "config.yaml").is_file()), None)
    section = load_yaml(file).values.get("reading") if file is not None else None
    values = {**(section if isinstance(section, dict) else {}), "max_tokens": 0}
    for name in ("segment_len", "clamp_len", "lanes", "documents", "max_tokens"):
        if getattr(options, name) is not None:
            values[name] = getattr(options, name)
    if options.same_length is not None:
        values["same_length"] = options.same_length == "yes"
    base = build(Reading, values, "the options")
    return [dataclasses.replace(base, memory_len=length) for length in options.memory_len] or [base]


def held_text(generator: Generator, options: EvaluateTextOptions) -> Held:
    if options.text is not None:
        return _text_file(generator, options.text)
    from manyheads.cli.evaluation_pairs import own_data
    from manyheads.config.build import build
    from manyheads.data.prepared_text import open_text
    from manyheads.data.settings import SegmentSettings
    from manyheads.text.settings import VocabularySettings

    folder = Path(options.model)
    path = options.data or own_data(options.model)[0]
    cache = next((place / "data" for place in (folder, folder.absolute().parent) if (place / "data").is_dir()), None)
    if cache is not None:
        check_no_link(cache)  # an embedded text may have to be prepared there again
    vocabulary = generator.vocabulary
    if path.startswith("embedded:") and cache is None:
        return _embedded(generator, path, options.split)
    # The way to make one counts only for the embedded text, which is made of what these settings can name.
    known = {"level": vocabulary.kind, "documents": vocabulary.documents} if vocabulary.is_text else {}
    data = open_text(SegmentSettings(path=path), build(VocabularySettings, known), cache or Path())
    if data.vocabulary.digest != vocabulary.digest:
        raise ConfigError(
            f"{path} was prepared with another vocabulary ({data.vocabulary.digest[:12]}) than the model's"
            f" ({vocabulary.digest[:12]}); give the text itself by --text."
        )
    stores = {"test": data.test, "valid": data.valid, "train": data.train}
    for name in [options.split] if options.split else ["test", "valid"]:
        store = stores[name]
        if store is not None and len(store):
            return Held(f"{path} {name}", store, data.counts(name))
    raise DataError(f"{path} has no {options.split or 'test or valid'} text; give one by --text.")


def _embedded(generator: Generator, path: str, split: str | None) -> Held:
    from manyheads.data.corpora.novel import load_novel
    from manyheads.data.prepared_text import NOVEL

    if path != NOVEL:
        raise ConfigError(f"There is no embedded text {path!r}; the embedded one is {NOVEL}.")
    content = dict(zip(("train", "valid", "test"), load_novel().values(), strict=True))[split or "test"]
    return _encoded(generator, f"{path} {split or 'test'}", content)


def _text_file(generator: Generator, name: str) -> Held:
    from manyheads.data.texts import TextFiles
    from manyheads.text.id_vocabulary import IdVocabulary

    if isinstance(generator.vocabulary, IdVocabulary):
        raise ConfigError("--text is a text, but the model knows ids; give --data, a folder made by prepare --format.")
    content = b"".join(
        block for block, _ in TextFiles(paths=[name]).read(as_bytes=generator.vocabulary.kind == "bytes")
    )
    return _encoded(generator, name, content)


def _encoded(generator: Generator, name: str, content: bytes) -> Held:
    from manyheads.data.token_store import TokenStore

    vocabulary = generator.vocabulary
    ids = list(content) if vocabulary.kind == "bytes" else vocabulary.encode(content.decode("utf-8"))
    counts = {
        "bytes": len(content),
        "characters": len(content.decode("utf-8", "replace")),
        "words": len(content.split()),
        "lines": content.count(b"\n"),
    }
    return Held(name, TokenStore.from_lists([ids], vocabulary.vocab_size), counts)


def _record(reading: Reading, found: Likelihood, held: Held, generator: Generator) -> dict[str, Any]:
    """The figures of one reading. Per byte, character and word only where the whole text was scored."""
    from manyheads.evaluation.language_model import bits_per

    attending = reading.attending(generator.model.config)
    record: dict[str, Any] = {
        "nats_per_token": found.nats_per_token,
        "bits_per_token": found.nats_per_token / math.log(2),
        "perplexity": found.perplexity,
        "tokens": found.num_tokens,
    }
    whole = not reading.max_tokens or reading.max_tokens >= len(held.store)
    if whole and not generator.vocabulary.is_text and held.counts["bytes"] <= len(held.store):
        record["bits_per_byte"] = bits_per(found.nll_sum, held.counts["bytes"])
    if whole and generator.vocabulary.is_text:
        counts = held.counts
        words = counts["words"] + counts["lines"]
        record |= {
            "bits_per_byte": bits_per(found.nll_sum, counts["bytes"]),
            "bits_per_character": bits_per(found.nll_sum, counts["characters"]),
            "perplexity_per_word": _exp(found.nll_sum / max(words, 1)),
            "counts": {name: counts[name] for name in ("bytes", "characters", "words", "lines")},
        }
    record["reading"] = {
        "segment_len": reading.segment_len,
        **{name: getattr(attending, name, None) for name in ("memory_len", "clamp_len", "same_length")},
        "lanes": reading.lanes,
        "documents": reading.documents,
        "max_tokens": reading.max_tokens,
    }
    return record


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _draw(scored: list[tuple[Reading, Likelihood]], held: Held, options: EvaluateTextOptions) -> list[Path]:
    folder = Path(options.model)
    if options.plot is None and not (folder / "config.yaml").is_file():
        return []
    from manyheads.visualise.figure import save_figure
    from manyheads.visualise.memory import memory_figure

    lens = [reading.memory_len or 0 for reading, _ in scored]
    figure = memory_figure(
        lens, [found.nats_per_token for _, found in scored], unit="nats a token", title=f"Loss on {held.name}"
    )
    return list(save_figure(figure, options.plot or folder / "plots" / "loss-by-memory"))


def _as_text(records: list[dict[str, Any]], protocol: dict[str, Any], pictures: list[Path]) -> list[str]:
    lines = []
    if len(records) > 1:
        lines.append(f"{'memory':>8}  {'nats/token':>10}  {'perplexity':>10}  {'bits/byte':>10}")
        for record in records:
            per_byte = f"{record['bits_per_byte']:10.4f}" if "bits_per_byte" in record else f"{'-':>10}"
            lines.append(
                f"{record['reading']['memory_len']:>8,}  {record['nats_per_token']:10.4f}"
                f"  {record['perplexity']:10.3f}  {per_byte}"
            )
    else:
        [record] = records
        lines += [
            f"perplexity = {record['perplexity']:.3f}",
            f"  {record['nats_per_token']:.4f} nats/token, {record['bits_per_token']:.4f} bits/token",
        ]
        if "counts" not in record and "bits_per_byte" in record:
            lines.append(f"  {record['bits_per_byte']:.4f} bits/byte")
        if "counts" in record:
            lines += [
                f"  {record['bits_per_byte']:.4f} bits/byte, {record['bits_per_character']:.4f} bits/character",
                f"  {record['perplexity_per_word']:.2f} perplexity of a word, ends of lines counted",
            ]
    record = records[0]
    reading = record["reading"]
    memory = "as in the table" if len(records) > 1 else f"{reading['memory_len'] or 0:,}"
    lines += [
        "protocol",
        f"  data       {protocol['data']}",
        f"  scored     {record['tokens']:,} tokens, each once; unit {protocol['unit']}",
    ]
    if "counts" in record:
        lines.append("  text       " + ", ".join(f"{count:,} {name}" for name, count in record["counts"].items()))
    lines += [
        f"  model      {protocol['model']}, {protocol['parameters']:,} parameters",
        f"  reading    segment {reading['segment_len']:,}, memory {memory}, clamp"
        f" {reading['clamp_len'] or 'none'}, same length {'yes' if reading['same_length'] else 'no'},"
        f" {reading['lanes']:,} lanes, documents {reading['documents']}",
        f"  precision  {protocol['precision']} on {protocol['device']}",
        f"  versions   {', '.join(f'{name} {version}' for name, version in protocol['versions'].items())}",
    ]
    return [*lines, *(f"picture      {path}" for path in pictures)]


def _versions() -> dict[str, str]:
    import torch

    return {"manyheads": __version__, "torch": str(torch.__version__)}
