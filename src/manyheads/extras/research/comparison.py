"""The report of `evaluate` about several models on one test set: a table, the examples that differ most, and a page.

The systems are compared by a paired bootstrap.

Paper: Koehn 2004, "Statistical significance tests for machine translation evaluation", sec. 4.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.significance import PairedTest

from manyheads.data.translation.readers import ReadReport
from manyheads.errors import DataError
from manyheads.evaluation.bleu import AUTO, FastCHRF, bleu_metric, choose_tokenizer, composed
from manyheads.extras.inspect.drawings.attention import shown_token
from manyheads.extras.inspect.drawings.pages import offline_page, save_page

PAGE_EXAMPLES = 1000
"""Maximum number of examples on a page."""
SIGNIFICANT = 0.05
_LONGEST_SHOWN = 4000


@dataclass(frozen=True)
class Example:
    """One sentence or passage.

    Args:
        place: where it is, such as `line 7`.
        source: what the models read; empty for a language model.
        reference: the right translation, or the passage.
        outputs: the translation of each model; empty for language models.
        scores: of each model.
    """

    place: str
    source: str
    reference: str
    outputs: tuple[str, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """See `tasks.report.Report`.

    Args:
        models: their names, the one that the others are compared with first.
        scores: name of a score -> one entry for each model.
        figures: further columns: name -> a text for each model.
        notes: lines below the table.
        examples: those that differ most, the most different first.
        example_score: what the scores of examples are.
        smaller_is_better: of the scores of examples.
        num_shown: how many examples `to_lines` contains.
        protocol: for JSON, with `data`.
        protocol_lines: the same for people.
        page: the file for `to_page`; None: none is written.
    """

    models: list[str]
    scores: dict[str, list[Paired]]
    figures: dict[str, list[str]]
    notes: list[str]
    examples: list[Example]
    example_score: str
    smaller_is_better: bool
    num_shown: int
    protocol: dict[str, Any]
    protocol_lines: list[str]
    page: str | None = None
    read: ReadReport = field(default_factory=ReadReport)
    output: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        scores = {
            name: {"signature": found[0].signature, "models": [_record(one) for one in found]}
            for name, found in self.scores.items()
        }
        return {
            "models": self.models,
            "scores": scores,
            "figures": self.figures,
            "differences": [asdict(one) for one in self.examples[: self.num_shown]],
            "protocol": self.protocol,
            "page": self.page,
        }

    def to_lines(self) -> list[str]:
        names = letters(self.models)
        lines = [f"{letter} = {name}" for letter, name in names.items()]
        head, rows = self.table()
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines += [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]
        ]
        lines += [f"  {note}" for note in self.notes]
        lines += self._example_lines(list(names))
        pages = [] if self.page is None else [f"page         {self.page}"]
        return [*lines, "protocol", *self.protocol_lines, *pages]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the heading and the row of each model."""
        head = [""]
        rows = [[letter] for letter in letters(self.models)]
        for name, found in self.scores.items():
            head += [name, "±", "p"]
            for row, one in zip(rows, found, strict=True):
                is_marked = one.p_value is not None and one.p_value < SIGNIFICANT
                p_value = "-" if one.p_value is None else f"{one.p_value:.3f}{'*' if is_marked else ' '}"
                digits = 2 if one.value >= 10 else 4
                row += [f"{one.value:.{digits}f}", f"{one.interval:.{digits}f}", p_value]
        for name, texts in self.figures.items():
            head.append(name)
            for row, text in zip(rows, texts, strict=True):
                row.append(text)
        return head, rows

    def _example_lines(self, names: Sequence[str]) -> list[str]:
        shown = self.examples[: self.num_shown]
        if not shown:
            return ["all outputs have equal scores"] if not self.examples and self.num_shown else []
        lines = [f"where they differ most ({self.example_score})"]
        for one in shown:
            lines.append(f"  {one.place}  {_short(one.source)}".rstrip())
            lines.append(f"    {'text' if not one.outputs else 'reference':>9}  {_short(one.reference)}")
            for place, (name, score) in enumerate(zip(names, one.scores, strict=True)):
                text = f"  {_short(one.outputs[place])}" if one.outputs else ""
                lines.append(f"  {name} {score:8.2f}{text}".rstrip())
        return lines

    def to_page(self) -> str:
        """Return the comparison as one HTML file that works offline."""
        head, rows = self.table()
        title = f"{len(self.models)} models on {self.protocol['data']}"
        record = {
            "title": shown_token(title),
            "models": [shown_token(name) for name in self.models],
            "letters": list(letters(self.models)),
            "head": head,
            "rows": rows,
            "notes": [shown_token(note) for note in self.notes],
            "score": self.example_score,
            "smaller": self.smaller_is_better,
            "examples": [_shown_example(one) for one in self.examples],
            "protocol": [shown_token(line) for line in self.protocol_lines],
        }
        return offline_page("comparison", record, title=shown_token(title))

    def save(self) -> None:
        """Write the page, if there is to be one. Raises: SaveError: it cannot be written."""
        if self.page is not None:
            save_page(self.to_page(), self.page)


def letters(models: Sequence[str]) -> dict[str, str]:
    """A, B, ... -> the name of a model."""
    return {chr(ord("A") + number): name for number, name in enumerate(models)}


def _record(one: Paired) -> dict[str, Any]:
    return {"score": one.value, "interval": one.interval, "p_value": one.p_value}


def _short(text: str) -> str:
    text = text.replace("\n", "⏎")
    return text if len(text) <= 300 else f"{text[:299]}…"


def _shown_example(one: Example) -> dict[str, Any]:
    def shown(text: str) -> str:
        return shown_token(text[:_LONGEST_SHOWN].replace("\n", "⏎")) if text else ""

    return {
        "place": one.place,
        "source": shown(one.source),
        "reference": shown(one.reference),
        "outputs": [shown(text) for text in one.outputs],
        "scores": [round(score, 2) for score in one.scores],
    }


RESAMPLES = 1000
"""Number of resamples of a paired bootstrap; fewer for very large test sets, see `_num_resamples`."""
_MOST_DRAWS = 50_000_000
_SEED = 12_345


@dataclass(frozen=True, slots=True)
class Paired:
    """One system's score beside the first system's.

    Args:
        value: the score of the whole test set.
        interval: half the width of its 95% confidence interval.
        p_value: probability of a difference from the first system as large as this one, if both were alike; None for
            the first system itself.
        signature: of the score and the test; the same for all systems.
    """

    value: float
    interval: float
    p_value: float | None
    signature: str


def paired_scores(
    systems: Sequence[Sequence[str]],
    references: Sequence[str],
    *more_references: Sequence[str],
    tokenize: str = AUTO,
    languages: Collection[str] = (),
    lowercase: bool = False,
) -> dict[str, list[Paired]]:
    """Return BLEU and chrF of each system, compared with the first one by sacreBLEU's paired bootstrap.

    Args:
        systems: the translations of each, two systems or more.
        references: one for each sentence.
        more_references, tokenize, languages, lowercase: see `bleu.corpus_bleu`.

    Raises: DataError: a system and the references have different numbers of sentences, or no sentences.
    """
    size = len(references)
    if len(systems) < 2 or any(len(one) != size for one in (*systems, *more_references)) or not references:
        counts = ", ".join(str(len(one)) for one in systems)
        raise DataError(f"two systems or more need {len(references)} sentences each, at least one; they have {counts}.")
    name = choose_tokenizer(tokenize, languages, references).name
    targets = [[composed(text) for text in one] for one in (references, *more_references)]
    metrics = {"BLEU": bleu_metric(targets, name, lowercase), "chrF": FastCHRF(lowercase=lowercase)}
    named: list[tuple[str, Sequence[str]]] = [
        (str(number), [composed(text) for text in one]) for number, one in enumerate(systems)
    ]
    test = PairedTest(named, metrics, targets, test_type="bs", n_samples=_num_resamples(len(references)))
    signatures, results = test()
    table: Any = results  # of a metric: one result for each system
    found: dict[str, list[Paired]] = {}
    for shown, key in (("BLEU", "BLEU"), ("chrF", "chrF2")):
        signature = str(signatures[key])
        found[shown] = [
            Paired(
                float(one.score),
                float(one.ci),
                None if number == 0 else _p_value(one, table[key][0], len(references)),
                signature,
            )
            for number, one in enumerate(table[key])
        ]
    return found


def _p_value(result: Any, first: Any, num_sentences: int) -> float:
    """The test's; 1 for equal scores and for a single sentence, to which sacreBLEU gives the smallest value.

    Unlike translations often have equal scores before a model has learned much.
    """
    return 1.0 if result.score == first.score or num_sentences < 2 else float(result.p_value)


def paired_losses(systems: Sequence[NDArray[np.float64]], counts: NDArray[np.int64]) -> list[Paired]:
    """Return the mean loss a token of each system, compared with the first one by a paired bootstrap over parts.

    The statistic is that of `paired_scores`.

    Args:
        systems: losses of the parts of a text, summed, in nats; of each system. (parts,) each
        counts: number of tokens of each part. (parts,)

    Returns: intervals and p-values are those of the mean loss a token in nats.
    """
    generator = np.random.default_rng(_SEED)
    resamples = _num_resamples(len(counts))
    draws = generator.integers(len(counts), size=(resamples, len(counts)))
    tokens = counts[draws].sum(1)
    means = [losses[draws].sum(1) / tokens for losses in systems]
    values = [float(losses.sum() / counts.sum()) for losses in systems]
    found = []
    for number, (value, drawn) in enumerate(zip(values, means, strict=True)):
        low, high = np.percentile(drawn, [2.5, 97.5])
        p_value = None
        if number:
            differences = np.abs(drawn - means[0])
            extreme = int(np.sum(differences - differences.mean() > abs(value - values[0])))
            is_same = np.array_equal(systems[number], systems[0])
            # Every resample of a single part is the text itself, so nothing is known about its variation.
            p_value = 1.0 if is_same or len(counts) < 2 else (extreme + 1) / (resamples + 1)
        signature = f"parts:{len(counts)}|bs:{resamples}|seed:{_SEED}"
        found.append(Paired(value, float(high - low) / 2, p_value, signature))
    return found


def _num_resamples(size: int) -> int:
    """Return a number of resamples whose statistics fit into memory."""
    return max(100, min(RESAMPLES, _MOST_DRAWS // (20 * max(size, 1))))


def sentence_chrf(
    translations: Sequence[str], *references: Sequence[str], lowercase: bool = False
) -> NDArray[np.float64]:
    """Return the chrF of each sentence, from 0 to 100. references: one list or several. (sentences,)"""
    metric = FastCHRF(lowercase=lowercase)
    some, *others = ([composed(text) for text in one] for one in (translations, *references))
    counts = metric._extract_corpus_statistics(some, others)
    return np.array([metric._compute_score_from_stats(one).score for one in counts], dtype=np.float64)


def most_different(scores: Sequence[NDArray[np.float64]], most: int) -> list[int]:
    """Return the places where the largest and the smallest score are farthest apart, the farthest first.

    Places where all scores are equal are left out.

    Args:
        scores: of each system. (places,) each
        most: maximum number of places.
    """
    table = np.stack([*scores])
    spread = table.max(0) - table.min(0)
    order = np.argsort(-spread, kind="stable")[:most]
    return [int(place) for place in order if spread[place] > 0]
