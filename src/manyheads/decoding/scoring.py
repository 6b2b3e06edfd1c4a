"""Log-probabilities of given targets with teacher forcing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from manyheads.architectures.protocols import Scorable
from manyheads.decoding.batching import Told, cut_batches, map_batches, padded
from manyheads.decoding.hypothesis import Stop, check_stop

__all__ = ["token_log_probs"]

_MAX_BATCH_VALUES = 2**25
"""Most numbers in a batch's table of log-probabilities: 128 MiB in float32."""


@torch.no_grad()
def token_log_probs(
    model: Scorable,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    pad_id: int,
    max_tokens: int,
    vocab_size: int,
    device: torch.device | str = "cpu",
    stop: Stop | None = None,
    told: Told | None = None,
) -> list[list[float]]:
    """Return the model's log-probability of each target token except the first, in nats.

    Args:
        model: computes log-probabilities; it should be in evaluation mode.
        sources: ids of each source, EOS included.
        targets: ids of each target from BOS to EOS.
        max_tokens: maximum number of tokens of a batch on either side; batches are smaller for a large vocabulary.
        stop: called before each batch.
        told: called after each batch with the number of finished pairs.

    Returns: for each pair one number per token after BOS.
    Raises: SearchStopped: `stop` returned true.
    """
    lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    budget = max(1, min(max_tokens, _MAX_BATCH_VALUES // vocab_size))

    def score(batch: list[int]) -> list[list[float]]:
        check_stop(stop)
        source, source_lengths = padded([sources[place] for place in batch], pad_id, device)
        target, target_lengths = padded([targets[place] for place in batch], pad_id, device)
        log_probs = model.log_probs(source, source_lengths, target[:, :-1])
        found = log_probs.gather(2, target[:, 1:, None])[:, :, 0].float().tolist()
        return [row[: length - 1] for row, length in zip(found, target_lengths.tolist(), strict=True)]

    return map_batches(score, cut_batches(lengths, budget), told)
