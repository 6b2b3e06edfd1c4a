"""Corpus BLEU and chrF with sacreBLEU, always with the signature of the settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from manyheads.errors import ConfigError, DataError

__all__ = ["TOKENIZERS", "Score", "corpus_bleu", "corpus_chrf"]

TOKENIZERS = ("13a", "none", "intl", "char", "zh")
"""sacreBLEU's tokenizers that need no further package."""


@dataclass(frozen=True, slots=True)
class Score:
    """A corpus score.

    Args:
        value: from 0 to 100.
        signature: sacreBLEU's signature; two scores are comparable only if their signatures agree.
        ref_len: length of the references, in BLEU's tokens or chrF's characters without white space.
        hyp_len: the same for the hypotheses.
    """

    value: float
    signature: str
    ref_len: int
    hyp_len: int

    def __str__(self) -> str:
        return f"{self.value:.2f}"


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a", lowercase: bool = False
) -> Score:
    """Return corpus BLEU with one reference for each sentence.

    Paper: Papineni et al. 2002; Post 2018, arXiv:1804.08771.

    Args:
        hypotheses: detokenised text (tokenised, if `tokenize` is `none`).
        references: the same number of texts.
        tokenize: one of TOKENIZERS.
        lowercase: ignore case.

    Raises: DataError: counts differ, or there is nothing to score. ConfigError: an unknown tokenizer.
    """
    _check_counts(hypotheses, references)
    if tokenize not in TOKENIZERS:
        raise ConfigError(f"BLEU tokenizer {tokenize!r} is unknown; use one of {', '.join(TOKENIZERS)}.")
    metric = BLEU(tokenize=tokenize, lowercase=lowercase, force=True)  # force: no advice on stderr about tokenised text
    result = metric.corpus_score(list(hypotheses), [list(references)])
    return Score(float(result.score), str(metric.get_signature()), int(result.ref_len), int(result.sys_len))


def corpus_chrf(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False, word_order: int = 0
) -> Score:
    """Return corpus chrF (character 6-grams, beta 2) with one reference for each sentence; word_order 2 is chrF++.

    Paper: Popović 2015, 2017.

    Raises: DataError: counts differ, or there is nothing to score. ConfigError: word_order is negative.
    """
    _check_counts(hypotheses, references)
    if word_order < 0:
        raise ConfigError(f"word_order is {word_order}; it must be at least 0 (2 is chrF++).")
    metric = CHRF(lowercase=lowercase, word_order=word_order)
    result = metric.corpus_score(list(hypotheses), [list(references)])
    ref_len, hyp_len = (sum(len("".join(text.split())) for text in side) for side in (references, hypotheses))
    return Score(float(result.score), str(metric.get_signature()), ref_len, hyp_len)


def _check_counts(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if isinstance(hypotheses, str) or isinstance(references, str):
        raise DataError("a corpus is a list of sentences, not one string.")
    if len(hypotheses) != len(references):
        raise DataError(
            f"there are {len(hypotheses)} hypotheses but {len(references)} references; the numbers must be equal."
        )
    if not hypotheses:
        raise DataError("there are no sentences to score; give at least one.")
