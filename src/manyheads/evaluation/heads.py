"""What the heads of a translator do, and which of them it needs.

Papers: Michel et al. 2019, arXiv:1905.10650, sec. 2.3 and 4.1 (importance, ablation); Voita et al. 2019,
arXiv:1905.09418, sec. 4 and 5 (confidence, positional heads).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.architectures.attentions import attentions_of
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.transformer.pruning import Head, heads_of, masks_without
from manyheads.data.batch import PairBatch
from manyheads.errors import DataError
from manyheads.evaluation.likelihood import evaluate_likelihood, evaluation_mode

__all__ = [
    "HeadLook",
    "head_ablations",
    "head_importance",
    "head_looks",
    "least_important",
    "normalised_importance",
]


@dataclass(frozen=True)
class HeadLook:
    """Where one head looks, on average over all queries.

    entropy: of its weights, in bits. confidence: its largest weight. offset: the distance key - query that the largest
    weight has most often, and offset_share how often; None for attention to another sequence.
    """

    entropy: float
    confidence: float
    offset: int | None = None
    offset_share: float | None = None


def head_importance(
    model: Seq2Seq, batches: Iterable[PairBatch], *, device: torch.device | str = "cpu"
) -> dict[Head, float]:
    """Return how much the loss changes with each head's factor, to first order.

    Paper: Michel et al. 2019, eq. 2: I_h = E_x |dL(x) / dxi_h|, where xi_h is the factor of head h, at 1. The loss
        L(x) of a sentence is summed over its tokens here, and I_h is per token.
    Raises: DataError: there is no token.
    """
    heads, sums, num_tokens = heads_of(model.config), dict[Head, float](), 0
    with evaluation_mode(model), torch.enable_grad():
        for batch in batches:
            here = batch.to(device)
            masks = masks_without(model.config, (), next(model.parameters()), rows=len(batch.sample_ids))
            leaves = [leaf.requires_grad_() for layers in masks if layers is not None for leaf in layers]
            # Each sentence has factors of its own, so one backward pass gives the gradients of all sentences.
            loss = model(here, head_masks=masks).loss_sum
            found = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.numel()])
            changes = torch.cat([gradient.abs().sum(0) for gradient in found]).tolist()
            for head, change in zip(heads, changes, strict=True):
                sums[head] = sums.get(head, 0.0) + change
            num_tokens += batch.num_target_tokens()
    if not num_tokens:
        raise DataError("there is no target token, so heads cannot be judged; give at least one sentence pair.")
    return {head: total / num_tokens for head, total in sums.items()}


def normalised_importance(importance: dict[Head, float]) -> dict[Head, float]:
    """Return the importance of each head divided by the l2 norm of its layer, as before pruning (sec. 4.1)."""
    norms: dict[tuple[str, int], float] = {}
    for head, value in importance.items():
        norms[head.kind, head.layer] = math.hypot(norms.get((head.kind, head.layer), 0.0), value)
    return {head: value / (norms[head.kind, head.layer] or 1.0) for head, value in importance.items()}


def least_important(importance: dict[Head, float], count: int) -> list[Head]:
    """Return the heads to be pruned first, by normalised importance; of equal ones the earlier."""
    ranks = normalised_importance(importance)
    return sorted(ranks, key=lambda head: ranks[head])[:count]


def head_ablations(
    model: Seq2Seq,
    batches: Sequence[PairBatch],
    *,
    device: torch.device | str = "cpu",
    told: Callable[[int], None] | None = None,
) -> tuple[float, dict[Head, float]]:
    """Return nats per token of the whole model, and how many more there are without each head alone.

    Paper: Michel et al. 2019, sec. 3.2, with the likelihood in place of BLEU.
    Args: told: told after each head how many are done.
    """
    like = next(model.parameters())

    def nats(*removed: Head) -> float:
        masks = masks_without(model.config, removed, like)
        return evaluate_likelihood(lambda batch: model(batch, head_masks=masks), batches, device=device).nats_per_token

    with evaluation_mode(model):
        whole, found = nats(), dict[Head, float]()
        for head in heads_of(model.config):
            found[head] = nats(head) - whole
            if told is not None:
                told(len(found))
    return whole, found


def head_looks(
    model: Seq2Seq, batches: Iterable[PairBatch], *, device: torch.device | str = "cpu"
) -> dict[Head, HeadLook]:
    """Return where each head looks. Padding does not count.

    Paper: Voita et al. 2019: confidence is the average of a head's largest weight (sec. 4; theirs leaves out the end
        of the sentence), and a head is positional if its largest weight is at one distance at least 90% of the time
        (sec. 5.1).
    """
    tallies: dict[tuple[str, int], _Tally] = {}
    with evaluation_mode(model):
        for batch in batches:
            here = batch.to(device)
            found = attentions_of(model, here.source, here.source_lengths, here.target_input)
            lengths = {"encoder": here.source_lengths, "decoder": here.target_lengths - 1}
            lengths["cross"] = lengths["decoder"]
            for kind, queries in lengths.items():
                # A layer without heads has no weights, and `found` skips it.
                layers = sorted({head.layer for head in heads_of(model.config) if head.kind == kind})
                for layer, weights in zip(layers, getattr(found, kind), strict=True):
                    real = torch.arange(weights.shape[2], device=weights.device) < queries[:, None]
                    tallies.setdefault((kind, layer), _Tally(is_self=kind != "cross")).add(weights, real)
    return {head: tallies[head.kind, head.layer].look(head.number - 1) for head in heads_of(model.config)}


class _Tally:
    """Sums of one layer. is_self: queries and keys are one sequence."""

    def __init__(self, *, is_self: bool) -> None:
        self._is_self = is_self
        self._count = 0
        self._entropy: list[Tensor] = []
        self._largest: list[Tensor] = []
        self._offsets: list[dict[int, int]] = []

    def add(self, weights: Tensor, real: Tensor) -> None:
        """Add weights (batch, heads, q_len, k_len) at the real queries (batch, q_len)."""
        rows = weights.float().transpose(0, 1)[:, real]  # (heads, queries, k_len)
        self._count += rows.shape[1]
        self._entropy.append(torch.special.entr(rows).sum((1, 2)).cpu() / math.log(2))
        largest, places = rows.max(dim=2)
        self._largest.append(largest.sum(1).cpu())
        if self._is_self:
            self._offsets = self._offsets or [{} for _ in range(rows.shape[0])]
            queries = torch.arange(weights.shape[2], device=weights.device).expand(real.shape)[real]
            for tally, offsets in zip(self._offsets, places - queries, strict=True):
                for offset, times in zip(*(x.tolist() for x in offsets.unique(return_counts=True)), strict=True):
                    tally[offset] = tally.get(offset, 0) + times

    def look(self, number: int) -> HeadLook:
        """Return the means of one head, numbered from 0."""
        entropy, largest = (float(torch.stack(sums)[:, number].sum()) for sums in (self._entropy, self._largest))
        if not self._is_self:
            return HeadLook(entropy / self._count, largest / self._count)
        offset, times = max(self._offsets[number].items(), key=lambda item: (item[1], -abs(item[0])))
        return HeadLook(entropy / self._count, largest / self._count, offset, times / self._count)
