"""Drawing a token: temperature, top-k, top-p, and random numbers that belong to a sentence, not to a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.top import top_k as largest_first
from manyheads.seeding import derive_seed

__all__ = ["Sampler", "draw"]

_FIRST_WIDTH = 128


class Sampler:
    """Draws the next token of every path by inverting the cumulative distribution.

    Path p of sentence i consumes one uniform number a step, from a stream seeded by (seed, i, p) alone: what is drawn
    for a sentence does not depend on its batch, the device's generator, or the other sentences, up to the rounding of
    the model.

    Args:
        settings: temperature, top_k, top_p, seed, num_return_sequences.
        limits: (sentences,) most tokens of each sentence.
        indices: i of each sentence: its place in the whole input.
    """

    def __init__(self, settings: DecodingSettings, limits: Tensor, indices: Sequence[int]) -> None:
        self._settings = settings
        longest, paths = int(limits.max()), settings.num_return_sequences
        numbers = np.empty((len(indices), paths, longest), dtype=np.float32)
        for line, index in enumerate(indices):
            for path in range(paths):
                generator = np.random.default_rng(derive_seed(settings.seed, "sample", index, path))
                numbers[line, path] = generator.random(longest)
        self._numbers = torch.from_numpy(numbers).to(limits.device)

    def __call__(self, log_probs: Tensor, sentence: Tensor, step: int) -> Tensor:
        """Draw for (rows, vocab_size) log-probabilities; sentence (sentences,) are lines of `indices`. (rows,)"""
        numbers = self._numbers[:, :, step].index_select(0, sentence).flatten()
        settings = self._settings
        return draw(log_probs, numbers, settings.temperature, settings.top_k, settings.top_p)


def draw(
    log_probs: Tensor,
    numbers: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """One token for each row. Filters apply in the order temperature, min-p, top-k, top-p; the rest is renormalised.

    Paper: Fan et al. 2018, arXiv:1805.04833 (top-k); Holtzman et al. 2020, arXiv:1904.09751, sec. 3.1 (top-p): the
    smallest set of likeliest tokens that holds at least top_p; the likeliest token always stays. Nguyen et al. 2024,
    arXiv:2407.01082 (min-p): tokens at least min_p times as likely as the likeliest.

    Args:
        log_probs: (rows, vocab_size), need not be normalised; -inf is never drawn unless a row holds nothing else.
        numbers: (rows,) uniform in [0, 1].
    Returns: (rows,) ids.
    """
    scores, ids = log_probs / temperature, None
    if min_p > 0:
        scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)
    if 0 < top_k < scores.size(1):
        scores, ids = largest_first(scores, top_k)
    if top_p < 1:
        probs, ids = _nucleus(scores, ids, top_p)
    else:
        probs = scores.softmax(-1)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    # Strictly below the total, or rounding could point past the last token that has any probability.
    target = torch.minimum(numbers[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cumulative, target, right=True).clamp(max=probs.size(1) - 1)
    return (place if ids is None else ids.gather(1, place))[:, 0]


def _nucleus(scores: Tensor, ids: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """Probabilities, largest first and 0 outside the likeliest that hold top_p, with their ids; (rows, some) both.

    The 128 likeliest tokens mostly suffice; only if they do not, all are sorted.
    """
    normaliser = scores.logsumexp(-1, keepdim=True)
    for width in (min(_FIRST_WIDTH, scores.size(1)), scores.size(1)):
        largest, places = largest_first(scores, width) if width < scores.size(1) else scores.sort(-1, descending=True)
        probs = (largest - normaliser).exp()
        before = probs.cumsum(-1) - probs
        if width == scores.size(1) or bool((before[:, -1] >= top_p).all()):
            break
    return probs * (before < top_p), places if ids is None else ids.gather(1, places)
