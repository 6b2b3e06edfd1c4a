"""sacreBLEU's chrF with the n-grams of many sentences counted at once, several times as fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.chrf import CHRF

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
