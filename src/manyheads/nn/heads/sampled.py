"""Sampled softmax: a training loss over a few candidates instead of the whole vocabulary."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import ConfigError
from manyheads.nn.shapes import Float, Int


class LogUniformCandidates:
    """Draws candidate ids, frequent ones more often: P(k) = log((k + 2) / (k + 1)) / log(V + 1).

    Paper: Jean et al. 2015, arXiv:1412.2007, sec. 3. Symbols: V = vocab_size. Ids must be ordered by decreasing
        frequency, as in a word vocabulary.
    Args:
        vocab_size: number of tokens.
        num_draws: draws with replacement for one set of candidates; an id that is drawn twice is one candidate.
    """

    def __init__(self, vocab_size: int, num_draws: int) -> None:
        if vocab_size < 2 or num_draws < 1:
            raise ConfigError(f"vocab_size {vocab_size} and num_draws {num_draws} must be at least 2 and 1.")
        ranks = torch.arange(vocab_size, dtype=torch.float64, device="cpu")
        self.probabilities = ((ranks + 2).log() - (ranks + 1).log()) / math.log(vocab_size + 1)
        # Probability of being among the candidates: 1 - (1 - p)^n, in a form that is precise for a small p.
        inclusion = -torch.expm1(num_draws * torch.log1p(-self.probabilities))
        self.log_inclusion = inclusion.log().float()
        self.num_draws = num_draws
        self._cumulated = self.probabilities.cumsum(0)

    def draw(self, generator: torch.Generator | None = None) -> Int[Tensor, " candidates"]:
        """Return distinct ids in increasing order, at most num_draws of them."""
        uniform = torch.rand(self.num_draws, dtype=torch.float64, generator=generator, device="cpu")
        uniform = uniform * self._cumulated[-1]
        drawn = torch.searchsorted(self._cumulated, uniform, right=True).clamp_(max=len(self.probabilities) - 1)
        return torch.unique(drawn)  # type: ignore[no-any-return]


def sampled_loss(
    hidden: Float[Tensor, "tokens d_model"],
    targets: Int[Tensor, " tokens"],
    weight: Float[Tensor, "vocab_size d_model"],
    bias: Float[Tensor, " vocab_size"] | None,
    candidates: Int[Tensor, " candidates"],
    log_inclusion: Float[Tensor, " vocab_size"],
) -> Float[Tensor, " tokens"]:
    """Return the cross-entropy of each target over itself and the candidates.

    Paper: Jean et al. 2015, sec. 3, with Z estimated after Horvitz and Thompson (1952): exp(logit) of the target, which
        is always included, plus exp(logit) / inclusion of each other candidate. Its mean is exactly the whole
        vocabulary's sum, so with more draws the loss tends to that of the full softmax.

    Shape: log_inclusion[k] = log of the probability that k is among the candidates.
    Cost: memory tokens x candidates.
    """
    candidates, log_inclusion = candidates.to(hidden.device), log_inclusion.to(hidden.device)
    rows = torch.cat([targets, candidates])
    own, others = torch.split(F.embedding(rows, weight), [len(targets), len(candidates)])
    true = (hidden * own).sum(-1, dtype=torch.float32)
    sampled = (hidden @ others.t()).float() - log_inclusion[candidates]
    if bias is not None:
        true, sampled = true + bias[targets], sampled + bias[candidates]
    sampled = sampled.masked_fill(targets[:, None] == candidates[None, :], -torch.inf)
    total: Tensor = torch.logsumexp(torch.cat([true[:, None], sampled], dim=1), dim=1)
    return total - true
