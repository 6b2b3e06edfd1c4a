"""Options of the commands that use a language model: `manyheads evaluate` and `manyheads score`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyheads.config.options import CommandPage, argument, group, option
from manyheads.data.lines import OnBadUtf8
from manyheads.decoding.options import DeviceOptions
from manyheads.errors import ConfigError

__all__ = ["EVALUATE", "SCORE", "EvaluateOptions", "ScoreOptions"]

MOST_HASHES = 1000


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of `manyheads evaluate` for a language model."""

    model: str = argument("A model folder, a run folder, or owner/name on the Hugging Face hub.", metavar="MODEL")
    data: str | None = option(
        "A folder written by prepare --task lm with the model's vocabulary, or embedded:crime-and-punishment.",
        default=None,
        metavar="DATA",
        default_is="the run's",
    )
    split: Literal["test", "valid", "train"] | None = option(
        "Which part of the data.", default=None, default_is="test if there is one"
    )
    text: str | None = option("A text file, plain or gzip, in place of data.", default=None, metavar="FILE")
    segment_len: int | None = option("Tokens read at a time.", default=None, metavar="N", default_is="the run's")
    memory_len: tuple[int, ...] = option(
        "Positions a layer that are remembered; several give a table.",
        default=(),
        metavar="N ...",
        default_is="the run's",
    )
    clamp_len: int | None = option(
        "Whatever is farther away counts as so far; 0 has no limit.", default=None, metavar="N", default_is="the run's"
    )
    same_length: Literal["yes", "no"] | None = option(
        "Whether every token sees memory_len positions and no more.", default=None, default_is="the run's"
    )
    lanes: int | None = option(
        "Places of the text that are read side by side; each but the first begins without memory.",
        default=None,
        metavar="N",
        default_is="the run's",
    )
    documents: Literal["joined", "separate"] | None = option(
        "Whether memory goes on from document to document.", default=None, default_is="the run's"
    )
    max_tokens: int | None = option("Score the first so many tokens only.", default=None, metavar="N", default_is="all")
    num_hashes: tuple[str, ...] = option(
        "Of a Reformer: hash rounds, or full for exact attention; several give a table.",
        default=(),
        metavar="N|full ...",
        default_is="the model's",
    )
    beside: tuple[str, ...] = option(
        "With --num-hashes: other models on the same data, a row of the table each.", default=(), metavar="MODEL ..."
    )
    plot: str | None = option(
        "Where the picture of several memories goes, as PNG and SVG.",
        default=None,
        metavar="FILE",
        default_is="in the run's plots",
    )
    json: bool = option("Print one JSON object.", default=False)
    run_on: DeviceOptions = group(DeviceOptions)

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
                raise ConfigError(f"--num-hashes is {text!r}; give numbers from 1 to {MOST_HASHES}, or full.")

    output: ClassVar[None] = None
    inputs: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Options of `manyheads score` for a language model."""

    model: str = argument("A model folder, a run folder, or owner/name on the Hugging Face hub.", metavar="MODEL")
    text: str = option("Texts, one a line, plain or gzip; - is standard input.", default="-", metavar="FILE")
    output: str = option("Where scores go; - is standard output.", default="-", metavar="FILE", aliases=("-o",))
    tokens: bool = option("JSON lines with the log-probability of every token.", default=False)
    on_bad_utf8: OnBadUtf8 = option(
        "A line that is not UTF-8: fail, replace its bad bytes, or skip (it is scored as an empty one).", default="fail"
    )
    max_rows: int = option("Lines that are read side by side.", default=64, metavar="N")
    run_on: DeviceOptions = group(DeviceOptions)

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise ConfigError(f"--max-rows is {self.max_rows}; it must be at least 1.")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Files that are read."""
        return (self.text,)


EVALUATE = CommandPage(
    EvaluateOptions,
    """Judge a language model on held-out text: nats and perplexity a token, bits a byte and a character,
perplexity a word, and the protocol: all that must be equal before two such figures may be compared. Every token is
scored once. Text comes from --text or --data; without either, from what the run was trained with.
With several --memory-len there is a table, and a picture of the loss against memory.""",
    (
        "manyheads evaluate runs/xl-demo",
        "manyheads evaluate runs/xl-demo --memory-len 0 64 128 256 --segment-len 64 --same-length yes",
        "manyheads evaluate runs/xl-demo --text other.txt --json",
    ),
)

SCORE = CommandPage(
    ScoreOptions,
    """Log-probabilities (in nats) that a language model gives to texts, each line by itself.
Each line gives a line of three tab-separated columns: sum of the log-probabilities, number of tokens, mean; an empty
line has none of either. With --tokens it gives a JSON object with each token and its log-probability instead.""",
    (
        "manyheads score runs/xl-demo --text sentences.txt",
        "manyheads score runs/xl-demo --text sentences.txt --tokens --output scores.jsonl",
    ),
)
