"""Paired comparison of several systems on the same test set: paired bootstrap, and where the systems differ.

Paper: Koehn 2004, "Statistical significance tests for machine translation evaluation", sec. 4.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.significance import PairedTest

from manyheads.errors import DataError
from manyheads.evaluation.bleu import AUTO, FastCHRF, bleu_metric, choose_tokenizer, composed

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
