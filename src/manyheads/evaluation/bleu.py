"""Corpus BLEU and chrF with sacreBLEU, always with the signature of the settings.

Texts are compared in Unicode's composed form (NFC): the same letters may be stored in two ways, which look alike.
"""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU

from manyheads.errors import ConfigError, DataError
from manyheads.evaluation.fast_chrf import FastCHRF
from manyheads.evaluation.tokenizers import AUTO, choose_tokenizer

_BLOCK = 1000
"""Sentences whose statistics are in memory at once."""
_ORDER = 4


@dataclass(frozen=True, slots=True)
class Score:
    """A corpus score.

    Args:
        value: from 0 to 100.
        signature: sacreBLEU's signature; two scores are comparable only if their signatures agree.
        ref_len: length of the references, in BLEU's tokens or chrF's characters without white space; of several
            references for a sentence BLEU counts the closest one, chrF the first.
        hyp_len: the same for the hypotheses.
    """

    value: float
    signature: str
    ref_len: int
    hyp_len: int

    def __str__(self) -> str:
        return f"{self.value:.2f}"


def corpus_bleu(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *more_references: Sequence[str],
    tokenize: str = AUTO,
    languages: Collection[str] = (),
    lowercase: bool = False,
    told: Callable[[int], None] | None = None,
) -> Score:
    """Return corpus BLEU.

    Paper: Papineni et al. 2002; Post 2018, arXiv:1804.08771.

    Args:
        hypotheses: detokenised text (tokenised, if `tokenize` is `none`).
        references: the same number of texts.
        more_references: further ones for each sentence; each n-gram may match any of them.
        tokenize: one of `tokenizers.TOKENIZERS`; `auto` is chosen by `languages` or else by the references' script.
        languages: of the references, as in BCP 47.
        lowercase: ignore case.
        told: called with the number of sentences that are scored so far.

    Raises: DataError: counts differ, or there is nothing to score. ConfigError, MissingExtraError: the tokenizer is
        unknown, or something that it needs is missing; `auto` then warns, and each character is a token.
    """
    all_references = (references, *more_references)
    _check_counts(hypotheses, all_references)
    choice = choose_tokenizer(tokenize, languages, references, "tokenize")
    if choice.warning:
        warnings.warn(choice.warning, stacklevel=2)
    metric = bleu_metric(all_references, choice.name, lowercase)
    result = _summed(metric, hypotheses, all_references, told)
    return Score(float(result.score), str(metric.get_signature()), int(result.ref_len), int(result.sys_len))


def bleu_metric(all_references: Sequence[Sequence[str]], tokenize: str, lowercase: bool) -> BLEU:
    """Return sacreBLEU's metric.

    References without a single 4-gram would give 0 to equal texts, too; then BLEU counts the n-grams that there are
    (`eff:yes` in the signature), which changes no other score.
    """
    metric = BLEU(tokenize=tokenize, lowercase=lowercase, force=True)  # force: no advice on stderr about tokenised text
    texts = (composed(text) for one in all_references for text in one)
    has_longest = any(len(metric.tokenizer(text.rstrip()).split()) >= _ORDER for text in texts)
    return metric if has_longest else BLEU(tokenize=tokenize, lowercase=lowercase, force=True, effective_order=True)


def corpus_chrf(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *more_references: Sequence[str],
    lowercase: bool = False,
    word_order: int = 0,
    told: Callable[[int], None] | None = None,
) -> Score:
    """Return corpus chrF (character 6-grams, beta 2); word_order 2 is chrF++.

    Paper: Popović 2015, 2017.

    Args: see `corpus_bleu`; of several references, each sentence counts the one that gives the highest score.

    Raises: DataError: counts differ, or there is nothing to score. ConfigError: word_order is negative.
    """
    all_references = (references, *more_references)
    _check_counts(hypotheses, all_references)
    if word_order < 0:
        raise ConfigError(f"word_order is {word_order}; it must be at least 0 (2 is chrF++).")
    metric = FastCHRF(lowercase=lowercase, word_order=word_order)
    result = _summed(metric, hypotheses, all_references, told)
    ref_len, hyp_len = (sum(len("".join(composed(text).split())) for text in side) for side in (references, hypotheses))
    return Score(float(result.score), str(metric.get_signature()), ref_len, hyp_len)


def _summed(
    metric: BLEU | FastCHRF,
    hypotheses: Sequence[str],
    all_references: Sequence[Sequence[str]],
    told: Callable[[int], None] | None,
) -> Any:
    """Return `metric.corpus_score`, exactly, without keeping the statistics of all sentences."""
    sums: Any = 0
    for first in range(0, len(hypotheses), _BLOCK):
        some, *references = (
            [composed(text) for text in one[first : first + _BLOCK]] for one in (hypotheses, *all_references)
        )
        sums += np.sum(metric._extract_corpus_statistics(some, references), axis=0)
        if told is not None:
            told(first + len(some))
    return metric._compute_score_from_stats(sums.tolist())


def composed(text: str) -> str:
    """Return a text in NFC."""
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)


def _check_counts(hypotheses: Sequence[str], all_references: Sequence[Sequence[str]]) -> None:
    for references in all_references:
        if isinstance(hypotheses, str) or isinstance(references, str):
            raise DataError("a corpus is a list of sentences, not one string.")
        if len(hypotheses) != len(references):
            raise DataError(
                f"there are {len(hypotheses)} hypotheses but {len(references)} references; the numbers must be equal."
            )
    if not hypotheses:
        raise DataError("there are no sentences to score; give at least one.")
