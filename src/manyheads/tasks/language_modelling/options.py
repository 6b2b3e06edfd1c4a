"""Options of `manyheads evaluate` and `manyheads score` for language models, and the page of `prepare`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyheads.config.checks import at_least, check
from manyheads.config.options import CommandPage, Shared, given_options, group, option, refuse_given
from manyheads.data.lines import OnBadUtf8
from manyheads.decoding.options import DeviceOptions, EnsembleOptions
from manyheads.errors import ConfigError
from manyheads.tasks import preparation

__all__ = ["EVALUATE", "EvaluateOptions", "PREPARE", "SCORE", "ScoreOptions"]


@dataclass(frozen=True, kw_only=True)
class TextVocabularyOptions(preparation.VocabularyOptions):
    """Vocabulary and documents."""

    level: Literal["bytes", "bpe", "words"] | None = option(
        "Units of the vocabulary: bytes, subwords (bpe), or words and line breaks.",
        default_is="bytes, or the layout's",
    )
    min_count: int | None = option(
        "With words: those that occur fewer times in the training text are <unk>.",
        metavar="N",
        default_is="1, or the layout's",
    )
    documents: Literal["none", "files", "lines"] | None = option(
        "What counts as a document. Its end is a token of its own, and a model can clear its memory there.",
        default_is="none, or the layout's",
    )


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(preparation.PrepareOptions):
    """Options of `manyheads prepare --task lm`."""

    corpus: tuple[str, ...] = option(
        "Training text, plain or gzip, in this order; - is standard input. With --layout the corpus's folder or file.",
        metavar="FILE [FILE ...]",
    )
    valid_corpus: tuple[str, ...] = option("Validation text.", default=(), metavar="FILE [FILE ...]")
    test_corpus: tuple[str, ...] = option("Test text.", default=(), metavar="FILE [FILE ...]")
    valid_bytes: int | None = option(
        "Without --valid-corpus: hold back the last N bytes of the training text for validation; 0: no validation.",
        default=None,
        metavar="N",
    )
    test_bytes: int | None = option("The same for testing; the test text is the very end.", default=None, metavar="N")
    layout: Literal["wikitext-2", "wikitext-103", "ptb", "enwik8", "text8", "lm1b", "images"] | None = option(
        "Name of a published corpus, with its files, units and splits; or images: folders of PNG pictures.",
        default=None,
    )
    format: Literal["bytes", "u16"] | None = option(
        "The files hold ids instead of text: uint8, or uint16 in little-endian order. See --vocab-size.",
        default_is="text",
    )
    document_len: int | None = option("With --format: each document has N ids.", default=None, metavar="N")
    image_size: int | None = option(
        "With --layout images: side of the pictures in pixels; each is a document of 3 x N x N bytes.",
        default=None,
        metavar="N",
    )
    resize: bool = option(
        "With --layout images: cut and scale pictures of other sizes instead of refusing them.", default=False
    )
    vocabulary: TextVocabularyOptions = group(TextVocabularyOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        layout, given = self.layout, given_options(self, self.vocabulary)

        def refuse(names: str, reason: str) -> None:
            refuse_given({name: name in given for name in names.split()}, f"{{}} cannot be used {reason}.")

        if layout == "images":
            refuse("--format --document-len --vocab-size --documents",
                   "with --layout images: pictures are bytes, and each picture is a document")  # fmt: skip
            if self.image_size is None:
                raise ConfigError("--layout images needs --image-size, the side of the pictures in pixels, such as 64.")
        else:
            refuse("--image-size --resize", "without --layout images")
        if self.format is None:
            refuse("--document-len", "without --format")
        else:
            refuse("--layout", f"with --format {self.format}: the files hold ids, not text")
        if self.is_of_ids:
            how = f"--format {self.format}" if self.format else "--layout images"
            refuse("--level --min-count --tokenizer --new-pieces --lowercase --on-bad-utf8",
                   f"with {how}: the files hold ids, not text")  # fmt: skip
        elif layout is not None:
            refuse("--valid-corpus --test-corpus --valid-bytes --test-bytes",
                   f"with --layout {layout}, which says which text is for validation and testing")  # fmt: skip
            if len(self.corpus) != 1:
                raise ConfigError(
                    f"--layout {layout} needs one --corpus, its folder or file; {len(self.corpus)} are given."
                )

    @property
    def is_of_ids(self) -> bool:
        """Whether the files hold ids or pictures, not text."""
        return self.format is not None or self.layout == "images"


PREPARE = CommandPage(
    PrepareOptions,
    """Convert text to a folder of tokens for training a language model: bytes, subwords, or words. The input can also
be ids in binary files (--format) or pictures (--layout images).""",
    (
        "manyheads prepare --task lm --corpus novel.txt --valid-bytes 50000 --output data/novel",
        "manyheads prepare --task lm --layout wikitext-2 --corpus wikitext-2 --output data/wikitext-2",
        "manyheads prepare --task lm --format u16 --corpus events.bin --valid-bytes 20000 --output data/events",
        "manyheads prepare --task lm --layout images --image-size 64 --corpus pngs --valid-bytes 1228800 -o data/png",
    ),
)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of `manyheads evaluate` for a language model."""

    model: str = Shared.model()
    data: str | None = option(
        "A folder written by prepare --task lm with the model's vocabulary, or embedded:crime-and-punishment.",
        metavar="DATA",
        default_is="the run's",
    )
    split: Literal["test", "valid", "train"] | None = option(
        "Which part of the data.", default_is="test if there is one"
    )
    text: str | None = option("A text file, plain or gzip, in place of data.", default=None, metavar="FILE")
    segment_len: int | None = option("Number of tokens in a segment.", metavar="N", default_is="the run's")
    memory_len: tuple[int, ...] = option(
        "Number of earlier positions in the memory of each layer; several values give a table.",
        default=(),
        metavar="N ...",
        default_is="the run's",
    )
    ext_len: int | None = option(
        "Number of tokens before each segment that are read again as context; they enter memory later.",
        metavar="N",
        default_is="the run's",
    )
    clamp_len: int | None = option(
        "Larger distances are treated as this distance; 0: no limit.", metavar="N", default_is="the run's"
    )
    same_length: Literal["yes", "no"] | None = option(
        "Whether every token sees exactly memory_len positions.", default_is="the run's"
    )
    lanes: int | None = option(
        "Number of parts of the text that are read in parallel; all but the first begin without memory.",
        metavar="N",
        default_is="the run's",
    )
    documents: Literal["joined", "separate"] | None = option(
        "Whether memory continues from one document to the next.", default_is="the run's"
    )
    max_tokens: int | None = option("Score only the first N tokens.", metavar="N", default_is="all")
    plot: str | None = option(
        "File for the picture of several memory lengths, written as PNG and SVG.",
        metavar="FILE",
        default_is="in the run's plots",
    )
    dry_run: bool = option(
        "Read only the first segments, and print how much time and memory the whole text would take.", default=False
    )
    json: bool = Shared.json()
    models: EnsembleOptions = group(EnsembleOptions)
    run_on: DeviceOptions = group(DeviceOptions)

    def __post_init__(self) -> None:
        if self.text is not None and (self.data is not None or self.split is not None):
            raise ConfigError("--text names the text to judge; leave out --data and --split.")
        if self.plot is not None and len(self.memory_len) < 2:
            raise ConfigError("--plot draws the loss of several memories; give --memory-len two values or more.")

    output: ClassVar[None] = None
    inputs: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Options of `manyheads score` for a language model."""

    model: str = Shared.model()
    text: str = option("Texts, one per line, plain or gzip; - is standard input.", default="-", metavar="FILE")
    output: str = Shared.output("the scores")
    tokens: bool = option("JSON lines with the log-probability of every token.", default=False)
    on_bad_utf8: OnBadUtf8 = Shared.on_bad_utf8("it is scored as an empty line")
    max_rows: int = option("Number of lines that are read in parallel.", default=64, metavar="N")
    models: EnsembleOptions = group(EnsembleOptions)
    run_on: DeviceOptions = group(DeviceOptions)

    def __post_init__(self) -> None:
        check(self, "--", at_least(1), "max_rows")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Files that are read."""
        return (self.text,)


EVALUATE = CommandPage(
    EvaluateOptions,
    """Evaluate a language model on held-out text: nats and perplexity per token, bits per byte and per character,
perplexity per word, and the protocol. The protocol lists all settings that must be equal for two scores to be
comparable. Every token is scored once. Text comes from --text or --data; without either, from the data of the run.
With several --memory-len there is a table, and a picture of the loss against memory.
--ensemble evaluates several models as one, which averages their probabilities.""",
    (
        "manyheads evaluate runs/xl-demo",
        "manyheads evaluate runs/xl-demo --memory-len 0 64 128 256 --segment-len 64 --same-length yes",
        "manyheads evaluate runs/xl-demo --text other.txt --json",
        "manyheads evaluate runs/xl-demo --ensemble runs/lm-demo",
    ),
)

SCORE = CommandPage(
    ScoreOptions,
    """Compute the log-probabilities (in nats) that a language model gives to texts, one per line. Each line gives a
line with three tab-separated columns: sum of the log-probabilities, number of tokens, mean; an empty line has no
tokens. With --tokens each line gives a JSON object with each token and its log-probability instead.""",
    (
        "manyheads score runs/xl-demo --text sentences.txt",
        "manyheads score runs/xl-demo --text sentences.txt --tokens --output scores.jsonl",
    ),
)
