"""`manyheads evaluate` of a language model: likelihood of held-out text, against memory, and the protocol."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads import __version__
from manyheads.cli.command_line.evaluate_options import EvaluateTextOptions
from manyheads.cli.command_line.parsing import parse
from manyheads.cli.lines.output import LineWriter
from manyheads.cli.lines.reading import readings_of, tokens_of
from manyheads.cli.watching.phases import showing_if_long
from manyheads.data.progress import telling
from manyheads.distributed.launch import start
from manyheads.distributed.place import find_place, local_device, refuse_ranks
from manyheads.files.guarded import check_no_link

if TYPE_CHECKING:
    from manyheads.decoding.generator import Generator
    from manyheads.evaluation.likelihood import Likelihood
    from manyheads.evaluation.reading import Reading
    from manyheads.tasks.text.held_out import HeldText

__all__ = ["evaluate_text_command"]

_DESCRIPTION = """Judge a language model on held-out text: nats and perplexity a token, bits a byte and a character,
perplexity a word, and the protocol: all that must be equal before two such figures may be compared. Every token is
scored once. Text comes from --text or --data; without either, from what the run was trained with.
With several --memory-len there is a table, and a picture of the loss against memory."""

_EXAMPLES = (
    "manyheads evaluate runs/xl-demo",
    "manyheads evaluate runs/xl-demo --memory-len 0 64 128 256 --segment-len 64 --same-length yes",
    "manyheads evaluate runs/xl-demo --text other.txt --json",
)


def evaluate_text_command(arguments: Sequence[str]) -> int:
    """Evaluate a language model. Returns: the exit code."""
    options = parse(EvaluateTextOptions, arguments, command="evaluate", description=_DESCRIPTION, examples=_EXAMPLES)
    from manyheads.cli.commands.evaluate_hashes import duplication_of, evaluate_hashes
    from manyheads.decoding.device import inference
    from manyheads.decoding.generator import Generator
    from manyheads.evaluation.language_model import evaluate_text
    from manyheads.evaluation.likelihood import Likelihood
    from manyheads.tasks.text.held_out import held_text

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
            held = held_text(generator, options.model, text=options.text, data=options.data, split=options.split)
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


def _record(reading: Reading, found: Likelihood, held: HeldText, generator: Generator) -> dict[str, Any]:
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


def _draw(scored: list[tuple[Reading, Likelihood]], held: HeldText, options: EvaluateTextOptions) -> list[Path]:
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
