"""Accuracy of a model on the second halves of the duplication task 0w0w."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from manyheads.architectures.language_model import LanguageModel
from manyheads.data.segments import SegmentBatch
from manyheads.evaluation.likelihood import evaluation_mode

__all__ = ["Duplicated", "evaluate_duplication"]


@dataclass(frozen=True)
class Duplicated:
    """Sums over the scored targets. num_correct: how many of them have the highest probability."""

    nll_sum: float
    num_tokens: int
    num_correct: int

    @property
    def nats_per_token(self) -> float:
        """Mean negative log-likelihood."""
        return self.nll_sum / max(self.num_tokens, 1)

    @property
    def accuracy(self) -> float:
        """In percent, as in the paper's table 2."""
        return 100 * self.num_correct / max(self.num_tokens, 1)


@torch.no_grad()
def evaluate_duplication(
    model: LanguageModel,
    batches: Iterable[SegmentBatch],
    *,
    device: torch.device | str = "cpu",
    stop: Callable[[], bool] | None = None,
) -> Duplicated | None:
    """Predict each token from the correct tokens before it (teacher forcing); targets after the context are scored.

    Paper: Kitaev et al. 2020, sec. 2.1, table 2.
    Args:
        model: put into evaluation mode during the call.
        batches: of `extras.research.duplication.held_out`.
        device: the model's device.
        stop: called before each batch.

    Returns: sums; None if `stop` returned true.
    """
    sums, num_tokens, num_correct = [], 0, 0
    with evaluation_mode(model):
        for batch in batches:
            if stop is not None and stop():
                return None
            batch = batch.to(device)
            targets = batch.targets[:, batch.num_context :]
            log_probs = model.log_probs(batch.tokens)[:, batch.num_context :]
            sums.append(-float(log_probs.gather(2, targets[:, :, None]).sum(dtype=torch.float64)))
            num_correct += int((log_probs.argmax(-1) == targets).sum())
            num_tokens += targets.numel()
    return Duplicated(math.fsum(sums), num_tokens, num_correct)
