"""Reports of all tasks: their interface, and the parts that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from manyheads import __version__
from manyheads.data.lines import ReadReport, Source
from manyheads.decoding.settings import DecodingSettings, drawing_options
from manyheads.files.verify import json_text

if TYPE_CHECKING:
    from manyheads.decoding.inputs_and_results import Scored
    from manyheads.decoding.translator import Translator

T = TypeVar("T")


class Report(Protocol):
    """The result of `evaluate` in a task's folder.

    output: the lines for `--output`. read: counts of unusual lines in the input files.
    """

    @property
    def output(self) -> Sequence[str]: ...

    @property
    def read(self) -> ReadReport: ...

    def to_json(self) -> dict[str, Any]:
        """Figures and protocol."""

    def to_lines(self) -> list[str]:
        """The same for people."""

    def save(self) -> None:
        """Write the pages and pictures that were asked for. Raises: SaveError: one cannot be written."""


class NoPictures:
    """The part of a `Report` without pages and pictures."""

    def save(self) -> None:
        """See `Report.save`."""


class TextReport(NoPictures):
    """The parts of a `Report` that are the same for language models: no lines of output, no files of lines."""

    output: tuple[str, ...] = ()
    read = ReadReport()


@dataclass(frozen=True)
class LineWork(Generic[T]):
    """The result of `score` of a task's folder: how a command makes a line of each item.

    Attributes:
        source: the items.
        work: number of a block's first item, from 0, and the block -> its lines.
        identity: what the lines depend on besides the input, as plain data.
        names: what messages call an item -> the file that it is a line of; see `naming_lines`.
    """

    source: Source[T]
    work: Callable[[int, list[T]], Iterable[str]]
    identity: Mapping[str, Any]
    names: Mapping[str, str]


def score_line(number: int, scored: Scored, *, tokens: bool) -> str:
    """Return the line of the item with that number: three columns, or with `tokens` a JSON object."""
    total, count = scored.sum_log_prob, len(scored.tokens)
    if not tokens:
        return f"{total:.6f}\t{count}\t{total / count:.6f}" if count else "0\t0\t"
    record = {
        "line": number,
        "log_prob": total,
        "num_tokens": count,
        "mean_log_prob": total / count if count else None,
        "tokens": scored.tokens,
        "token_log_probs": scored.token_log_probs,
    }
    return json_text(record)


def model_record(name: str, model: Any, device: Any, precision: str) -> dict[str, Any]:
    """The entries about the model in a protocol."""
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "device": str(device),
        "precision": precision,
        "versions": {"manyheads": __version__, "torch": str(torch.__version__)},
    }


def search_record(translator: Translator, settings: DecodingSettings, options: Any, **more: Any) -> dict[str, Any]:
    """The entries about a translator and its search in a protocol.

    Args:
        settings: of the search.
        options: of the command, with `model`, `models` and `run_on`.
        more: further entries.
    """
    return {
        **model_record(options.model, translator.model, translator.device, translator.precision),
        **options.models.record(),
        "tokenizer": translator.tokenizer.digest,
        **more,
        "decoding": asdict(settings),
        "compiled": options.run_on.compile,
    }


def model_line(protocol: Mapping[str, Any]) -> str:
    """The model in a protocol for people."""
    names = " + ".join((protocol["model"], *protocol.get("ensemble", ())))
    return f"  model      {names}, {protocol['parameters']:,} parameters"


def machine_lines(protocol: Mapping[str, Any]) -> list[str]:
    """Precision, device and versions in a protocol for people."""
    versions = ", ".join(f"{name} {version}" for name, version in protocol["versions"].items())
    return [f"  precision  {protocol['precision']} on {protocol['device']}", f"  versions   {versions}"]


# What `search_line` names in its own way.
_LENGTHS = ("max_new_tokens", "max_len_ratio", "max_len_offset", "max_tokens")
_BEAMS = ("num_beams", "length_penalty", "length_penalty_kind", "early_stopping")


def search_line(protocol: Mapping[str, Any]) -> str:
    """The decoding settings in a protocol for people."""
    decoding, drawing = protocol["decoding"], (*drawing_options(DecodingSettings), "seed")
    if decoding["do_sample"]:
        parts = ["sampling", *(f"{name} {decoding[name]}" for name in drawing)]
    elif decoding["num_beams"] == 1:
        parts = ["greedy"]
    else:
        parts = [
            f"beam {decoding['num_beams']}",
            f"length penalty {decoding['length_penalty']} ({decoding['length_penalty_kind']})",
        ]
        parts += ["early stopping"] * (decoding["early_stopping"] is True)
    ratio, offset = decoding["max_len_ratio"], decoding["max_len_offset"]
    limit = decoding["max_new_tokens"] or f"{ratio:g} x source + {offset}"
    parts.append(f"at most {limit} tokens")
    for item in fields(DecodingSettings):
        value = decoding[item.name]
        if value != item.default and item.name not in ("do_sample", *drawing, *_LENGTHS, *_BEAMS):
            parts.append(f"{item.name} {list(value) if isinstance(value, tuple) else value}")
    if "rerank" in protocol:
        parts.append(f"reranked by {protocol['rerank']} (weight {protocol['rerank_weight']:g})")
    shortlist = [f"shortlist {protocol['shortlist']}"] if "shortlist" in protocol else []
    return ", ".join([*parts, f"batches of {decoding['max_tokens']} tokens", *shortlist])
