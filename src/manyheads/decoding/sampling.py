"""Sampling of tokens with temperature, top-k and top-p; the random numbers depend on the sentence, not on its batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from manyheads.decoding.settings import DecodingSettings
from manyheads.nn.kernels.topk import top_k as largest_first
from manyheads.seeding import derive_seed

_FIRST_WIDTH = 128
# Below this, log-probability / temperature overflows in float32, so the most probable token is taken.
_LOWEST_TEMPERATURE = 1e-30


class Sampler:
    """Samples the next token of every path by inverting the cumulative distribution.

    Path p of sentence i uses one uniform number per step from a stream that is seeded by (seed, i, p) only. So the
    samples of a sentence do not depend on its batch, the device's generator or other sentences, up to rounding in the
    model.

    Args:
        settings: temperature, top_k, top_p, seed, num_return_sequences.
        limits: (sentences,) maximum number of tokens of each sentence.
        indices: i of each sentence: its index in the whole input.
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
        """Sample for (rows, vocab_size) log-probabilities; sentence (sentences,) indexes `indices`. Returns (rows,)."""
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
    """Sample one token per row. Filters are applied in the order temperature, min-p, top-k, top-p; the rest is
    renormalised.

    Paper: Fan et al. 2018, arXiv:1805.04833 (top-k); Holtzman et al. 2020, arXiv:1904.09751, sec. 3.1 (top-p): the
    smallest set of most probable tokens with a total of at least top_p; it always includes the most probable token.
    Nguyen et al. 2024, arXiv:2407.01082 (min-p): tokens with at least min_p times the highest probability.

    Args:
        log_probs: (rows, vocab_size), not necessarily normalised; -inf is drawn only if a row contains nothing else.
        numbers: (rows,) uniform in [0, 1].
    Returns: (rows,) ids.
    """
    scores, ids = log_probs / max(temperature, _LOWEST_TEMPERATURE), None
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
    # Stay strictly below the total: otherwise rounding could select a token after the last one with any probability.
    target = torch.minimum(numbers[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cumulative, target, right=True).clamp(max=probs.size(1) - 1)
    return (place if ids is None else ids.gather(1, place))[:, 0]


def _nucleus(scores: Tensor, ids: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """Return probabilities, largest first and 0 outside the top_p set, and their ids; both (rows, some).

    The 128 most probable tokens are usually enough; all tokens are sorted only if not.
    """
    normaliser = scores.logsumexp(-1, keepdim=True)
    for width in (min(_FIRST_WIDTH, scores.size(1)), scores.size(1)):
        largest, places = largest_first(scores, width) if width < scores.size(1) else scores.sort(-1, descending=True)
        probs = (largest - normaliser).exp()
        before = probs.cumsum(-1) - probs
        if width == scores.size(1) or bool((before[:, -1] >= top_p).all()):
            break
    return probs * (before < top_p), places if ids is None else ids.gather(1, places)
