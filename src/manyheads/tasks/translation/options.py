"""Options of `manyheads prepare`, `manyheads evaluate` and `manyheads score` for translation."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from manyheads.config.options import CommandPage, Shared, given_options, group, option
from manyheads.decoding.options import (
    DecodingOptions,
    DeviceOptions,
    EnsembleOptions,
    RerankingOptions,
    SearchDeviceOptions,
    TranslationDeviceOptions,
)
from manyheads.errors import ConfigError
from manyheads.evaluation.reading import BleuTokenizer
from manyheads.tasks import preparation


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions(preparation.VocabularyOptions):
    """Tokenizer."""

    kind: Literal["bpe", "unigram", "word"] | None = option(
        "Kind of tokenizer to train.", default_is="bpe", name="tokenizer.kind"
    )


@dataclass(frozen=True, kw_only=True)
class PairOptions(preparation.PrepareOptions):
    """Options of `manyheads prepare` for pairs of sentences, and of sentences and trees."""

    valid_count: int | None = option(
        "Without validation files: hold back the last N training pairs; 0: no validation.",
        default=None,
        metavar="N",
    )
    vocabulary: TokenizerOptions = group(TokenizerOptions)


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(PairOptions):
    """Options of `manyheads prepare --task translation`."""

    source: str | None = option("Training sentences, one per line; - is standard input.", default=None, metavar="FILE")
    target: str | None = option("Their translations, line by line.", default=None, metavar="FILE")
    tsv: str | None = option(
        "Training pairs, source<TAB>target, or the columns of --source-key.", default=None, metavar="FILE"
    )
    jsonl: str | None = option("Training pairs, one JSON object per line.", default=None, metavar="FILE")
    pairs: str | None = option(
        "Training pairs in one file, whose name ends in .csv, .tsv, .jsonl, .tmx or .parquet.",
        default=None,
        metavar="FILE",
    )
    valid_source: str | None = option("Validation sentences.", default=None, metavar="FILE")
    valid_target: str | None = option("Their translations.", default=None, metavar="FILE")
    valid_tsv: str | None = option("Validation pairs.", default=None, metavar="FILE")
    valid_jsonl: str | None = option("Validation pairs.", default=None, metavar="FILE")
    valid_pairs: str | None = option("Validation pairs.", default=None, metavar="FILE")
    test_source: str | None = option("Test sentences.", default=None, metavar="FILE")
    test_target: str | None = option("Their translations.", default=None, metavar="FILE")
    test_tsv: str | None = option("Test pairs.", default=None, metavar="FILE")
    test_jsonl: str | None = option("Test pairs.", default=None, metavar="FILE")
    test_pairs: str | None = option("Test pairs.", default=None, metavar="FILE")
    source_key: str | None = option(
        "Key or column of the source sentence in JSONL, CSV, TSV and Parquet files; a.b is nested. A number, from 1, "
        "is a column of a table without a header.",
        metavar="KEY",
        default_is="source; of TSV without such a header the first column",
    )
    target_key: str | None = option(
        "Key or column of its translation.", metavar="KEY", default_is="target, or the second column"
    )
    source_lang: str | None = option(
        "Language of the sources, as in BCP 47; stored with the data and the models trained on it.",
        metavar="TAG",
        default_is="unknown",
    )
    target_lang: str | None = option("Language of their translations.", metavar="TAG", default_is="unknown")
    pair: tuple[str, ...] = option(
        "Several languages in one model: the files of one direction; once for each. Sources get a tag such as >>de<<.",
        default=(),
        metavar="SRC TGT FILE FILE",
    )
    valid_pair: tuple[str, ...] = option(
        "With --pair: validation pairs of one direction.", default=(), metavar="SRC TGT FILE FILE"
    )
    test_pair: tuple[str, ...] = option(
        "With --pair: test pairs of one direction.", default=(), metavar="SRC TGT FILE FILE"
    )
    keep_spaces: bool = option(
        "Keep white space and characters without width as they are, as source code needs; otherwise new tokenizers read"
        " white space of any kind and length as one space, and leave those characters out.",
        default=False,
    )
    clean: bool = option(
        "Leave out the training pairs that the cleaning rules find; without this option they are only counted.",
        default=False,
    )
    clean_rule: tuple[str, ...] = option(
        "Limits of rules, for example ratio=4 numbers=off.", default=(), metavar="NAME=LIMIT ..."
    )


@dataclass(frozen=True, kw_only=True)
class SearchEvaluateOptions:
    """Options of `manyheads evaluate` for translation and for parsing."""

    model: str = Shared.model("")
    split: Literal["test", "valid"] | None = option("Which part of the data.", default_is="test if there is one")
    output: str | None = option(
        "Save the translations or trees, one per line.", default=None, metavar="FILE", aliases=("-o",)
    )
    json: bool = Shared.json()
    on_bad_utf8: Literal["fail", "replace"] = Shared.on_bad_utf8()
    models: EnsembleOptions = group(EnsembleOptions)
    run_on: SearchDeviceOptions = group(SearchDeviceOptions)
    decoding: DecodingOptions = group(DecodingOptions)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(SearchEvaluateOptions):
    """Options of `manyheads evaluate` for a translator."""

    model: str = Shared.model("")  # declared again, so that it stands before the others
    source: str | None = option("Source sentences, one per line, plain or gzip.", default=None, metavar="FILE")
    reference: tuple[str, ...] = option(
        "Reference translations, line by line; several files are several references for each sentence.",
        default=(),
        metavar="FILE ...",
    )
    hypotheses: str | None = option("Translations to evaluate instead of a model's.", default=None, metavar="FILE")
    data: str | None = option(
        "A folder written by prepare, embedded:tatoeba-en-de, or copy-task.", metavar="DATA", default_is="the run's"
    )
    target_lang: str | None = option(
        "Target language, for a model or data with several; of --hypotheses, for BLEU's tokenizer.",
        metavar="TAG",
        default_is="all of the data",
    )
    tokenize: BleuTokenizer = option(
        "BLEU's tokenizer; none if the text is already tokenized; auto: the target language's.", default="auto"
    )
    lowercase: bool = option("Ignore case in BLEU and chrF.", default=False)
    models: RerankingOptions = group(RerankingOptions)
    run_on: TranslationDeviceOptions = group(TranslationDeviceOptions)

    def __post_init__(self) -> None:
        if self.hypotheses is None and not self.model:
            others = self._find_models()
            if others:
                raise ConfigError(f"Unexpected arguments: {', '.join(map(repr, others))}; one model is evaluated.")
        if self.hypotheses is not None and (self.model or self.source is not None):
            raise ConfigError("--hypotheses names finished translations; leave out MODEL and --source.")
        unused = given_options(self.models, self.run_on, self.decoding)
        if unused and self.hypotheses is not None:
            raise ConfigError(f"With --hypotheses there is no model to run; leave out {', '.join(unused)}.")
        if self.hypotheses is None and not self.model:
            raise ConfigError("Say what to evaluate: a MODEL, or --hypotheses FILE with --reference FILE.")
        if self.hypotheses is not None and not self.reference and self.data is None:
            raise ConfigError("--hypotheses needs --reference FILE, or --data (trees: --trees), to be compared with.")
        if self.data is not None and (self.source is not None or self.reference):
            raise ConfigError("--data contains its own sources and references; leave out --source and --reference.")
        if self.split is not None and self.reference:
            raise ConfigError("--split selects a part of --data; it cannot be used with --reference.")
        if self.hypotheses is None and (self.source is None) == bool(self.reference):
            raise ConfigError("--source and --reference belong together, line by line; give both or neither.")

    def _find_models(self) -> tuple[str, ...]:
        """Take what follows `--reference FILE` and is no file for models, as in `--reference FILE MODEL`.

        Returns: the models after the first.
        """
        files = list(
            takewhile(lambda name: name == "-" or (Path(name).exists() and not Path(name).is_dir()), self.reference)
        )
        files = files or list(self.reference[:1])  # a mistyped name of the first file stays one
        model, *others = (*self.reference[len(files) :], "")
        object.__setattr__(self, "reference", tuple(files))
        object.__setattr__(self, "model", model)
        return tuple(others[:-1])

    @property
    def inputs(self) -> tuple[str | None, ...]:
        """Files that are read."""
        return self.source, *self.reference, self.hypotheses


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Options of `manyheads score` for a translator or a parser."""

    model: str = Shared.model()
    source: str = option("Source sentences, one per line, plain or gzip; - is standard input.", metavar="FILE")
    target: str = option("Their translations, line by line.", metavar="FILE")
    output: str = Shared.output("the scores")
    target_lang: str | None = option(
        "Target language, for a model that translates into several.", default=None, metavar="TAG"
    )
    tokens: bool = option("JSON lines with the log-probability of every token.", default=False)
    on_bad_utf8: Literal["fail", "replace"] = Shared.on_bad_utf8()
    max_tokens: int | None = option(
        "Maximum size of a batch in tokens: rows x longest side. A longer side does not fit.",
        metavar="N",
        default_is="the model's",
    )
    too_long: Literal["fail", "truncate"] = option(
        "If a side does not fit: stop and name its line, or truncate it, score the rest and report "
        "how many were truncated.",
        default="fail",
    )
    models: EnsembleOptions = group(EnsembleOptions)
    run_on: DeviceOptions = group(DeviceOptions)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Files that are read."""
        return self.source, self.target


PREPARE = CommandPage(
    PrepareOptions,
    """Convert sentence pairs to a folder of tokens for training. Training, validation and test pairs
each come from two aligned files, or from one TSV, JSONL, CSV, TMX or Parquet file. Text is UTF-8, plain or gzip, one
sentence per line. One tokenizer is trained on both sides of the training pairs, unless --tokenizer names one. Training
pairs with an empty side are left out and counted.
A parser learns from trees: `manyheads prepare --task spans --help` (chart parser) or `--task parsing --help` shows its
options. A classifier learns from labelled texts: `manyheads prepare --task classification --help`.
A language model learns from text, ids or pictures: `manyheads prepare --task lm --help` shows its options.""",
    (
        "manyheads prepare --source train.en --target train.de --valid-source v.en --valid-target v.de -o data/my",
        "manyheads prepare --tsv pairs.tsv --valid-count 500 --vocab-size 8000 --output data/my",
        "manyheads prepare --pair en de a.en a.de --pair en fr b.en b.fr --valid-count 500 --output data/many",
        "manyheads prepare --task parsing --trees train.ptb --valid-trees dev.ptb --output data/ptb",
        "manyheads prepare --task lm --corpus novel.txt --valid-bytes 50000 --output data/novel",
    ),
)

EVALUATE = CommandPage(
    EvaluateOptions,
    """Evaluate a model on held-out text: BLEU and chrF by sacreBLEU with their signatures, likelihood, and the
protocol. The protocol lists all settings that must be equal for two scores to be comparable. Text comes from --source
and --reference, or --data; without either, from the data of the run. --hypotheses evaluates finished translations
without a model.
--ensemble evaluates several models as one, which averages their probabilities; --rerank evaluates the translations that
a reverse model ranks first. A language model is evaluated by perplexity and bits per byte: `manyheads evaluate MODEL
--help` shows its options. A parser is evaluated by labelled brackets (evalb's rules): `manyheads evaluate --trees FILE
--help` shows its options.""",
    (
        "manyheads evaluate runs/demo",
        "manyheads evaluate runs/demo --source test.en --reference test.de --beam 8 --output test.out",
        "manyheads evaluate runs/a --ensemble runs/b runs/c",
        "manyheads evaluate --hypotheses test.out --reference test.de",
        "manyheads evaluate runs/parser --trees test.ptb",
    ),
)

SCORE = CommandPage(
    ScoreOptions,
    """Compute the log-probabilities (in nats) that a model gives to known translations, end of sentence included. Each
pair of lines gives a line with three tab-separated columns: sum of the log-probabilities, number of tokens, mean. With
--tokens each pair gives a JSON object with each token and its log-probability instead.
A language model scores the lines of --text FILE: `manyheads score MODEL --help` shows its options.""",
    (
        "manyheads score runs/demo --source test.en --target test.de",
        "manyheads score runs/demo --source test.en --target test.de --tokens --output scores.jsonl",
    ),
)
