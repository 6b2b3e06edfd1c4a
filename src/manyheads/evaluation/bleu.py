"""sacreBLEU's chrF with the n-grams of many sentences counted at once, several times as fast.

Corpus BLEU and chrF with sacreBLEU, always with the signature of the settings.

Texts are compared in Unicode's composed form (NFC): the same letters may be stored in two ways, which look alike.
"""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from manyheads.errors import ConfigError, DataError
from manyheads.evaluation.tokenizers import AUTO, choose_tokenizer

_BLOCK = 1000
"""Sentences that are counted at once."""
_CHARACTERS = 0x110000
"""Unicode's code points."""


class FastCHRF(CHRF):
    """chrF: statistics and scores are exactly those of sacreBLEU. With n-grams of words (chrF++) it counts them too."""

    def _extract_corpus_statistics(self, hypotheses: Sequence[str], references: Any) -> Any:
        """Return for each sentence and order the n-grams of hypothesis and reference, and those of both.

        Of several references, a sentence counts the first one with the highest score.
        """
        if self.word_order:
            return super()._extract_corpus_statistics(hypotheses, references)
        self.num_refs = len(references)
        found: list[list[int]] = []
        for first in range(0, len(hypotheses), _BLOCK):
            some, *others = (
                ["".join(self._preprocess_segment(text).split()) for text in one[first : first + _BLOCK]]
                for one in (hypotheses, *references)
            )
            each = [_counts(some, one, self.char_order).tolist() for one in others]
            found += (
                each[0] if len(each) == 1 else [max(row, key=self._compute_f_score) for row in zip(*each, strict=True)]
            )
        return found


def _counts(hypotheses: Sequence[str], references: Sequence[str], orders: int) -> NDArray[np.int64]:
    """Count the character n-grams of each pair of texts without white space. (pairs, 3 x orders)"""
    size, texts = len(hypotheses), [*hypotheses, *references]
    lengths = np.array([len(text) for text in texts])
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)
    text_of = np.repeat(np.arange(2 * size), lengths)
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(codes))  # characters up to the end of the text
    pair_of, is_reference = text_of % size, text_of >= size
    counts = np.zeros((size, orders, 3), dtype=np.int64)
    ids = pair_of  # of the n-gram that begins at each character; equal n-grams of a pair have equal ids
    for order in range(orders):
        begins = np.flatnonzero(left > order)
        grams, inverse = np.unique(ids[begins] * _CHARACTERS + codes[begins + order], return_inverse=True)
        pairs, of_reference = pair_of[begins], is_reference[begins]
        own, others = (np.bincount(inverse[mask], minlength=len(grams)) for mask in (~of_reference, of_reference))
        pair_of_gram = np.zeros(len(grams), dtype=np.int64)
        pair_of_gram[inverse] = pairs
        both = np.minimum(own, others)
        for place, number in enumerate((own, others, both)):
            counts[:, order, place] = np.bincount(pair_of_gram, weights=number, minlength=size)
        ids = np.zeros(len(codes), dtype=np.int64)
        ids[begins] = inverse
    counts[counts[:, :, 1] == 0, 0] = 0  # n-grams of an order that the reference lacks do not count
    return counts.reshape(size, 3 * orders)


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
    on_progress: Callable[[int], None] | None = None,
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
        on_progress: called with the number of sentences that are scored so far.

    Raises: DataError: counts differ, or there is nothing to score. ConfigError, MissingExtraError: the tokenizer is
        unknown, or something that it needs is missing; `auto` then warns, and each character is a token.
    """
    all_references = (references, *more_references)
    _check_counts(hypotheses, all_references)
    choice = choose_tokenizer(tokenize, languages, references, "tokenize")
    if choice.warning:
        warnings.warn(choice.warning, stacklevel=2)
    metric = bleu_metric(all_references, choice.name, lowercase)
    result = _summed(metric, hypotheses, all_references, on_progress)
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
    on_progress: Callable[[int], None] | None = None,
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
    result = _summed(metric, hypotheses, all_references, on_progress)
    ref_len, hyp_len = (sum(len("".join(composed(text).split())) for text in side) for side in (references, hypotheses))
    return Score(float(result.score), str(metric.get_signature()), ref_len, hyp_len)


def _summed(
    metric: BLEU | FastCHRF,
    hypotheses: Sequence[str],
    all_references: Sequence[Sequence[str]],
    on_progress: Callable[[int], None] | None,
) -> Any:
    """Return `metric.corpus_score`, exactly, without keeping the statistics of all sentences."""
    sums: Any = 0
    for first in range(0, len(hypotheses), _BLOCK):
        some, *references = (
            [composed(text) for text in one[first : first + _BLOCK]] for one in (hypotheses, *all_references)
        )
        sums += np.sum(metric._extract_corpus_statistics(some, references), axis=0)
        if on_progress is not None:
            on_progress(first + len(some))
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
