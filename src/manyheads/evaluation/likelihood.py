"""Likelihood of held-out pairs: nats per token and perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from manyheads.data.batch import PairBatch
from manyheads.data.language.segments import SegmentBatch
from manyheads.errors import DataError
from manyheads.evaluation.perplexity import perplexity_of
from manyheads.models.protocols import Output

B = TypeVar("B", PairBatch, SegmentBatch)


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Sums over a corpus.

    Args:
        nll_sum: negative log-likelihood, in nats.
        num_tokens: number of target tokens, with EOS, without BOS and padding.
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
        return perplexity_of(self.nats_per_token)


@torch.no_grad()
def evaluate_likelihood(
    model: Callable[[PairBatch], Output],
    batches: Iterable[PairBatch],
    *,
    device: torch.device | str = "cpu",
    stop: Callable[[], bool] | None = None,
) -> Likelihood:
    """Return the likelihood (without label smoothing) over batches, summed in double precision.

    Args:
        model: returns an `Output` for a batch; a module is put into evaluation mode during the call.
        batches: any split of the corpus into batches gives the same result, up to rounding.
        device: the model's device.
        stop: called before each batch; if it returns true, the sums so far are returned.

    Raises: DataError: there is no token to score.
    """
    sums: list[Tensor] = []
    num_tokens = 0
    with evaluation_mode(model):
        for batch in batches:
            if stop is not None and stop():
                break
            sums.append(model(batch.to(device)).nll_sum)  # read at the end, because each read waits for the GPU
            num_tokens += batch.num_target_tokens()
    if not num_tokens:
        raise DataError("there is no target token to score; give at least one sentence pair.")
    return Likelihood(math.fsum(float(value) for value in sums), num_tokens)


@contextmanager
def evaluation_mode(model: object) -> Iterator[None]:
    """Put a module into evaluation mode during the block; do nothing for other objects."""
    if not isinstance(model, torch.nn.Module):
        yield
        return
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def counted(batches: Iterable[B], on_progress: Callable[[int], None] | None) -> Iterator[B]:
    """Yield the batches; after each, `told` is called with the number of rows so far."""
    num_done = 0
    for batch in batches:
        yield batch
        num_done += len(batch.sample_ids)
        if on_progress is not None:
            on_progress(num_done)
