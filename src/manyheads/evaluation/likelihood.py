"""Likelihood of held-out pairs: nats for each token, and perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.architectures.protocols import Output
from manyheads.data.batch import PairBatch
from manyheads.errors import DataError

__all__ = ["Likelihood", "evaluate_likelihood"]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Sums over a corpus.

    Args:
        nll_sum: negative log-likelihood, in nats.
        num_tokens: target tokens, EOS counted, BOS and padding not.
    """

    nll_sum: float
    num_tokens: int

    @property
    def nats_per_token(self) -> float:
        """Mean negative log-likelihood."""
        return self.nll_sum / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp of nats_per_token; infinite if that overflows."""
        try:
            return math.exp(self.nats_per_token)
        except OverflowError:
            return math.inf


@torch.no_grad()
def evaluate_likelihood(
    model: Callable[[PairBatch], Output],
    batches: Iterable[PairBatch],
    *,
    device: torch.device | str = "cpu",
    stop: Callable[[], bool] | None = None,
) -> Likelihood:
    """Plain likelihood (no label smoothing) over batches, summed in double precision.

    Args:
        model: gives an `Output` for a batch; a module is put into evaluation mode for the time being.
        batches: any cut of the corpus into batches gives the same result, up to rounding.
        device: where the model is.
        stop: asked before each batch; what was summed until then is returned.

    Raises: DataError: there was no token to measure.
    """
    was_training = isinstance(model, torch.nn.Module) and model.training
    if isinstance(model, torch.nn.Module):
        model.eval()
    sums: list[Tensor] = []
    num_tokens = 0
    try:
        for batch in batches:
            if stop is not None and stop():
                break
            sums.append(model(batch.to(device)).nll_sum)  # read at the end: on a GPU each read waits
            num_tokens += batch.num_target_tokens()
    finally:
        if isinstance(model, torch.nn.Module):
            model.train(was_training)
    if not num_tokens:
        raise DataError("there is no target token to measure; give at least one sentence pair.")
    return Likelihood(math.fsum(float(value) for value in sums), num_tokens)
