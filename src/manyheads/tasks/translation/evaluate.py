"""Evaluation of a translator: BLEU, chrF, likelihood, and everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from manyheads.data.lines import GivenItems, Progress, describe, phase_progress, read_lines
from manyheads.data.translation.readers import ReadReport, check_segments, first_suspicious, refuse_documents
from manyheads.decoding.inputs_and_results import counted_truncations, naming_lines, one_line
from manyheads.decoding.translator import Translator
from manyheads.distributed.process import refuse_ranks, this_process
from manyheads.distributed.sharded_lines import is_sharded, model_identity, run_lines
from manyheads.errors import ConfigError, DataError, RequestError
from manyheads.evaluation.bleu import (
    AUTO,
    Score,
    TokenizerChoice,
    check_tokenizer,
    choose_tokenizer,
    corpus_bleu,
    corpus_chrf,
    text_hints,
)
from manyheads.evaluation.likelihood import Likelihood
from manyheads.tasks.held_out import (
    COPY_TASK,
    copy_settings,
    held_out_directions,
    held_out_languages,
    own_data,
    pairs_of_split,
)
from manyheads.tasks.report import NoPictures, machine_lines, model_line, search_line, search_record
from manyheads.tasks.translation.score import likelihood_lines, likelihood_of, likelihood_record

if TYPE_CHECKING:
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.tasks.translation.options import EvaluateOptions
    from manyheads.text.sides import LanguagePair

BLOCK_PAIRS = 256
"""Pairs that one of several ranks judges at once."""
DIRECTION_PAIRS, DIRECTION_CHARACTERS = 50, 200
"""Number and maximum length of the pairs that are used to detect exchanged sides."""
CLEARLY_LIKELIER = 0.5
"""The exchanged direction must be likelier by this many nats per token."""


@dataclass(frozen=True)
class TranslationReport(NoPictures):
    """See `tasks.report.Report`. likelihood: None for translations made elsewhere. by_direction: of several ones.
    hints: what a person should know about the scores.
    """

    scores: dict[str, Score]
    likelihood: Likelihood | None
    protocol: dict[str, Any]
    output: list[str]
    read: ReadReport
    by_direction: list[DirectionScores] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {
            name.lower(): {
                "score": score.value,
                "signature": score.signature,
                "length": score.hyp_len,
                "reference_length": score.ref_len,
            }
            for name, score in self.scores.items()
        }
        if self.likelihood is not None:
            record["likelihood"] = likelihood_record(self.likelihood)
        if self.by_direction:
            record["directions"] = [one.to_json() for one in self.by_direction]
        return {**record, "hints": self.hints, "protocol": self.protocol}

    def to_lines(self) -> list[str]:
        lines, protocol = [], self.protocol
        for name, score in self.scores.items():
            lines += [f"{name} = {score}", f"  {score.signature}"]
            lines.append(f"  length {score.hyp_len:,}, the references' {score.ref_len:,}")
        if self.likelihood is not None:
            lines += likelihood_lines(self.likelihood)
        if self.by_direction:
            head = f"{'direction':<15}  sentences    BLEU    chrF"
            lines += [head, *(one.to_line() for one in self.by_direction)]
        lines += ["protocol", f"  data       {protocol['data']}", f"  sentences  {protocol['sentences']:,}"]
        lines += reference_lines(protocol)
        if self.likelihood is None:
            return [*lines, f"  judged     {protocol['hypotheses']}"]
        return [
            *lines,
            model_line(protocol),
            f"  search     {search_line(protocol)}",
            f"  truncated  {protocol['truncated_sources']} sources, {protocol['truncated_references']} references",
            *machine_lines(protocol),
        ]


@dataclass(frozen=True)
class DirectionScores:
    """The scores of one direction of a test set of several."""

    direction: LanguagePair
    sentences: int
    scores: dict[str, Score]

    def to_json(self) -> dict[str, Any]:
        """As a record."""
        return {
            "languages": list(self.direction),
            "sentences": self.sentences,
            **{name.lower(): one.value for name, one in self.scores.items()},
            "signatures": {name.lower(): one.signature for name, one in self.scores.items()},
        }

    def to_line(self) -> str:
        """As a row of the table."""
        values = "  ".join(f"{one.value:6.2f}" for one in self.scores.values())
        return f"{' > '.join(self.direction):<15}  {self.sentences:>9,}  {values}"


def evaluate(options: EvaluateOptions, progress: Progress) -> TranslationReport | None:
    """Judge a model, or translations made elsewhere.

    Returns: None on all ranks but the main one.
    Raises: DataError: the texts cannot be read, are empty, or differ in number. RequestError: a text is too long.
    """
    if options.hypotheses is not None:
        refuse_ranks("evaluate of --hypotheses")
    if options.tokenize != AUTO:
        check_tokenizer(options.tokenize)  # now, and not after the search
    read = ReadReport()
    progress("reading", 0, 0)
    test_set = find_test_set(options, read)
    pairs, name = test_set.pairs, test_set.name
    if not pairs:
        raise DataError(f"{name} has no sentences; there is nothing to evaluate.")
    likelihood, protocol = None, {"data": name, "sentences": len(pairs)}
    if options.hypotheses is not None:
        translations = [hypothesis for hypothesis, _ in pairs]
        protocol["hypotheses"] = options.hypotheses
    else:
        found = run_model(test_set, options, progress)
        if found is None:
            return None  # the main rank has all that the others found
        translations, likelihood, more = found
        protocol |= more
    choice = tokenizer_of(test_set, options, protocol)
    hints = [one for one in (choice.warning, *text_hints(translations, test_set.references, choice.name)) if one]
    for hint in hints:
        sys.stderr.write(f"manyheads: warning: {hint}\n")
    scores = _scores(translations, test_set.references, choice.name, options.lowercase, progress)
    by_direction = []
    for direction, part in test_set.directions:
        some = [one[part] for one in test_set.references]
        own = choose_tokenizer(options.tokenize, [direction[1]], some[0]).name
        found_scores = _scores(translations[part], some, own, options.lowercase, progress)
        by_direction.append(DirectionScores(direction, part.stop - part.start, found_scores))
    return TranslationReport(scores, likelihood, protocol, translations, read, by_direction, hints)


def tokenizer_of(test_set: HeldOutSet, options: EvaluateOptions, protocol: dict[str, Any]) -> TokenizerChoice:
    """Choose BLEU's tokenizer for a test set, and add it to the protocol, with the number of references.

    The language is the one that is asked for, or else the data's, or else the model's if it has only one.
    """
    chosen = options.target_lang or protocol.get("target_lang")
    of_model = {target for _, target in protocol.get("languages", ())}
    languages = [chosen] if chosen else test_set.languages or (of_model if len(of_model) == 1 else ())
    choice = choose_tokenizer(options.tokenize, languages, test_set.references[0])
    protocol["references"] = len(test_set.references)
    protocol |= {"bleu_tokenizer": choice.name, "bleu_tokenizer_why": choice.why}
    return choice


def reference_lines(protocol: dict[str, Any]) -> list[str]:
    """The references in a protocol for people, and how BLEU cuts them."""
    lines = [f"  references {protocol['references']} for each sentence"] if protocol["references"] > 1 else []
    return [*lines, f"  tokenizer  {protocol['bleu_tokenizer']} of BLEU, {protocol['bleu_tokenizer_why']}"]


def _scores(
    translations: list[str], references: list[list[str]], tokenize: str, lowercase: bool, progress: Progress
) -> dict[str, Score]:
    common: dict[str, Any] = {"lowercase": lowercase}
    total = len(translations)
    on_progress = phase_progress(progress, "scoring (BLEU)", total)
    bleu = corpus_bleu(translations, *references, tokenize=tokenize, on_progress=on_progress, **common)
    on_progress = phase_progress(progress, "scoring (chrF)", total)
    return {"BLEU": bleu, "chrF": corpus_chrf(translations, *references, on_progress=on_progress, **common)}


@dataclass(frozen=True)
class HeldOutSet:
    """A test set: pairs of texts, and the directions that they translate in.

    Args:
        pairs: (source or hypothesis, reference).
        name: for people.
        directions: of each stretch of pairs, whose sources then have tags; empty if there is one.
        languages: of the references, as far as the data records them.
        more_references: further references of each pair.
    """

    pairs: list[tuple[str, str]]
    name: str
    directions: list[tuple[LanguagePair, slice]] = field(default_factory=list)
    languages: list[str] = field(default_factory=list)
    more_references: list[list[str]] = field(default_factory=list)

    @property
    def references(self) -> list[list[str]]:
        """One list or several, each with a reference for each pair."""
        return [[reference for _, reference in self.pairs], *self.more_references]

    def into(self, target: str | None) -> HeldOutSet:
        """Return the pairs of one target language; None: all.

        Raises: ConfigError: there are none.
        """
        if target is None or not self.directions:
            return self
        pairs: list[tuple[str, str]] = []
        directions = []
        for (source, known), part in self.directions:
            if known.lower() == target.lower():
                first = len(pairs)
                pairs += self.pairs[part]
                directions.append(((source, known), slice(first, len(pairs))))
        if not directions:
            targets = ", ".join(dict.fromkeys(known for (_, known), _ in self.directions))
            raise ConfigError(f"--target-lang is {target}, but {self.name} has translations into {targets}.")
        return HeldOutSet(pairs, f"{self.name}, into {target}", directions, [directions[0][0][1]])


def find_test_set(options: EvaluateOptions, read: ReadReport) -> HeldOutSet:
    """The pairs to compare."""
    first = options.source if options.hypotheses is None else options.hypotheses
    if first is not None and options.reference:
        return _of_files(first, options, read)
    data, seed = (options.data, 1) if options.data is not None else own_data(options.model)
    copy_task = copy_settings(options.model) if data == COPY_TASK else None
    pairs, split = pairs_of_split(data, options.split, seed, copy_task)
    directions, languages = held_out_directions(data, split, len(pairs)), held_out_languages(data)
    chosen = HeldOutSet(pairs, f"{data} {split}", directions, languages).into(options.target_lang)
    pairs = chosen.pairs
    if options.hypotheses is not None:
        found = _lines(options.hypotheses, options, read)
        if len(found) != len(pairs):
            raise DataError(
                f"{describe(options.hypotheses)} has {len(found)} lines, but {chosen.name} has {len(pairs)} pairs."
            )
        pairs = [(hypothesis, reference) for hypothesis, (_, reference) in zip(found, pairs, strict=True)]
    return replace(chosen, pairs=pairs)


def _of_files(first: str, options: EvaluateOptions, read: ReadReport) -> HeldOutSet:
    """The lines of a file of sources or hypotheses beside those of one or several files of references."""
    paths = (first, *options.reference)
    if paths.count("-") > 1:
        raise ConfigError(f"{' and '.join(paths)}: only one of them can be standard input; name files.")
    sides = [_lines(path, options, read) for path in paths]
    for path, lines in zip(paths, sides, strict=True):
        if len(lines) != len(sides[0]):
            raise DataError(
                f"The files are not aligned: {describe(first)} has {len(sides[0])} lines, {describe(path)} has"
                f' {len(lines)} (lines end at "\\n" alone).{first_suspicious(zip(sides[0], lines, strict=False))}'
                " Align the files again."
            )
        for number, (line, other) in enumerate(zip(sides[0], lines, strict=True), 1):
            check_segments(line, other, number, first, path)
    pairs = list(zip(sides[0], sides[1], strict=True))
    return HeldOutSet(pairs, " + ".join(map(describe, paths)), more_references=sides[2:])


def _lines(path: str, options: EvaluateOptions, read: ReadReport) -> list[str]:
    """The texts of a file, one for each sentence."""
    refuse_documents(path)
    return list(read_lines(path, on_bad_utf8=options.on_bad_utf8, report=read))


def run_model(
    test_set: HeldOutSet, options: EvaluateOptions, progress: Progress, *, is_compared: bool = False
) -> tuple[list[str], Likelihood, dict[str, Any]] | None:
    """Return translations, likelihood of the references, and what they depend on; with several ranks, on the main rank.

    Args: is_compared: with other models, some of which may have tags: --target-lang is for these alone.
    """
    pairs = test_set.pairs
    with naming_lines(text=options.source or "the source", reference=next(iter(options.reference), "the reference")):
        translator = options.run_on.load(Translator.from_pretrained, options.models.all(options.model), progress)
        if translator.tokenizer.target_languages or test_set.directions or not is_compared:
            translator = _chosen(translator, test_set, options)
        translator = options.models.reranked(translator)
        overrides = {**options.decoding.overrides(translator.tokenizer), "num_return_sequences": 1}
        settings = translator.options(**overrides)
        if this_process().is_main and _looks_exchanged(translator, pairs, settings):
            sys.stderr.write(
                "manyheads: warning: the model finds the sources as translations of the references likelier than the"
                " references as translations of the sources. Are --source and --reference exchanged?\n"
            )
        judged = _judge(translator, pairs, settings, overrides, options, progress)
    if judged is None:
        return None
    likelihood, translations, num_references, num_sources = judged
    truncated = {"truncated_sources": num_sources, "truncated_references": num_references}
    protocol = search_record(translator, settings, options, **truncated)
    protocol["languages"] = [list(pair) for pair in translator.languages]
    if translator.target_lang is not None:
        protocol["target_lang"] = translator.target_lang
    if options.run_on.shortlist is not None:
        protocol["shortlist"] = options.run_on.shortlist
    return translations, likelihood, protocol


def _chosen(translator: Translator, test_set: HeldOutSet, options: EvaluateOptions) -> Translator:
    """The translator for a test set, whose sources may have tags of their own.

    Raises: ConfigError: the model has no tags but the sources do, or a target language is missing.
    """
    if not test_set.directions:
        return translator.into(options.target_lang, "--target-lang")
    if missing := {pair[1] for pair, _ in test_set.directions} - {*translator.tokenizer.target_languages}:
        raise ConfigError(
            f"{test_set.name} has translations into {', '.join(sorted(missing))}, for which {options.model} has no"
            " tag; give the pairs of one direction by --source and --reference."
        )
    return translator


def _looks_exchanged(translator: Translator, pairs: list[tuple[str, str]], settings: DecodingSettings) -> bool:
    """Return whether the first pairs are clearly likelier in the other direction."""
    short = [pair for pair in pairs if all(0 < len(side.strip()) <= DIRECTION_CHARACTERS for side in pair)]
    some = short[:DIRECTION_PAIRS]
    if not some:
        return False
    try:
        given = likelihood_of(translator, some, settings)
        exchanged = likelihood_of(translator, [(target, source) for source, target in some], settings)
    except RequestError:  # even these texts are too long for the model; the search names the line
        return False
    return exchanged.nats_per_token + CLEARLY_LIKELIER < given.nats_per_token


def _judge(
    translator: Translator,
    pairs: list[tuple[str, str]],
    settings: DecodingSettings,
    overrides: dict[str, Any],
    options: EvaluateOptions,
    progress: Progress,
) -> tuple[Likelihood, list[str], int, int] | None:
    """Likelihood of the references, translations, number of references and of sources that were truncated; None on all
    ranks but the main one.
    """

    def work(first: int, some: list[tuple[str, str]]) -> list[str]:
        on_progress = phase_progress(progress, "likelihood", len(pairs), first)
        with counted_truncations() as long_references:
            found = likelihood_of(translator, some, settings, first=first, on_progress=on_progress)
        sources, on_progress = (
            [source for source, _ in some],
            phase_progress(progress, "translating", len(pairs), first),
        )
        with counted_truncations() as long_sources:
            nbest = translator.translate_nbest(sources, on_progress=on_progress, first_number=first + 1, **overrides)
        translations = [one_line(one[0].text) for one in nbest]
        return [json.dumps([found.nll_sum, found.num_tokens, translations, long_references.count, long_sources.count])]

    identity = {
        "command": "evaluate",
        "model": model_identity(options.model),
        **options.models.identity(),
        "settings": asdict(settings),
        "pairs": hashlib.sha256(json.dumps(pairs).encode()).hexdigest(),
        "precision": translator.precision,
        "compiled": options.run_on.compile,
        "shortlist": options.run_on.shortlist,
        "target_lang": translator.target_lang,
    }
    lines: list[str] = []
    size = BLOCK_PAIRS if is_sharded(options.output) else len(pairs)
    source = GivenItems(pairs, size, [], ReadReport())
    if not run_lines(source, work, lines.extend, output=options.output, identity=identity):
        return None
    nll_sums, num_tokens, translations, references, sources = zip(*map(json.loads, lines), strict=True)
    likelihood = Likelihood(math.fsum(nll_sums), sum(num_tokens))
    return likelihood, [text for some in translations for text in some], sum(references), sum(sources)
