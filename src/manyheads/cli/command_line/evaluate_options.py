"""The options of `manyheads evaluate`: for translators and parsers, and for language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.config.options import argument, given_options, group, option
from manyheads.decoding.options import DecodingOptions, DeviceOptions, SearchDeviceOptions
from manyheads.errors import ConfigError

__all__ = ["EvaluateOptions", "EvaluateTextOptions"]

_RUNS = "(default: the run's)"
MOST_HASHES = 1000


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of `manyheads evaluate`."""

    model: str = argument(
        "A model folder, a run folder, or owner/name on the Hugging Face hub.", default="", metavar="MODEL"
    )
    source: str | None = option("Source sentences, one a line, plain or gzip.", default=None, metavar="FILE")
    reference: str | None = option("Their translations by people, line by line.", default=None, metavar="FILE")
    hypotheses: str | None = option("Translations to judge instead of a model's.", default=None, metavar="FILE")
    data: str | None = option(
        "A folder written by prepare, embedded:tatoeba-en-de, or copy-task.",
        default=None,
        metavar="DATA",
        default_is="the run's",
    )
    split: Literal["test", "valid"] | None = option(
        "Which part of the data.", default=None, default_is="test if there is one"
    )
    trees: str | None = option(
        "Of a parser: the right trees, in brackets; the sentences are their words.", default=None, metavar="FILE"
    )
    baseline: Literal["flat", "right"] | None = option(
        "Judge trees that need no model: flat or right-branching ones, with the labels usual in training trees.",
        default=None,
    )
    train_trees: str | None = option(
        "Training trees, whose labels --baseline counts.", default=None, metavar="FILE", default_is="of --data"
    )
    tokenize: str = option(
        "BLEU's tokenizer; none for text that is tokenized already.", default="13a", metavar="{13a,none,intl,char,zh}"
    )
    lowercase: bool = option("Ignore case in BLEU and chrF.", default=False)
    output: str | None = option("Save the translations, one a line.", default=None, metavar="FILE", aliases=("-o",))
    json: bool = option("Print one JSON object.", default=False)
    on_bad_utf8: Literal["fail", "replace"] = option(
        "A line that is not UTF-8: fail, or replace its bad bytes.", default="fail"
    )
    run_on: SearchDeviceOptions = group(SearchDeviceOptions)
    decoding: DecodingOptions = group(DecodingOptions)

    def __post_init__(self) -> None:
        if self.baseline is None and self.train_trees is not None:
            raise ConfigError("--train-trees are counted for --baseline; leave them out.")
        if self.hypotheses is not None and (self.model or self.source is not None):
            raise ConfigError("--hypotheses are judged as they are; leave out MODEL and --source.")
        unused = given_options(self.run_on, self.decoding)
        if unused and (self.hypotheses is not None or self.baseline is not None):
            judged = "--hypotheses" if self.hypotheses is not None else "--baseline"
            raise ConfigError(f"With {judged} there is no model to run; leave out {', '.join(unused)}.")
        if self.trees is not None or self.baseline is not None:
            return
        if self.hypotheses is None and not self.model:
            raise ConfigError("Say what to evaluate: a MODEL, or --hypotheses FILE with --reference FILE.")
        if self.hypotheses is not None and self.reference is None and self.data is None:
            raise ConfigError("--hypotheses need --reference FILE, or --data (trees: --trees), to be compared with.")
        if self.data is not None and (self.source is not None or self.reference is not None):
            raise ConfigError("--data brings its own sources and references; leave out --source and --reference.")
        if self.split is not None and self.reference is not None:
            raise ConfigError("--split chooses a part of --data; files are taken whole.")
        if self.hypotheses is None and (self.source is None) != (self.reference is None):
            raise ConfigError("--source and --reference come together, line by line.")


@dataclass(frozen=True, kw_only=True)
class EvaluateTextOptions:
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
