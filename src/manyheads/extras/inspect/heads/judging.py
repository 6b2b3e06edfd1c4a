"""Figures of every head, and the order in which heads are pruned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyheads.architectures.head_names import Head, all_heads
from manyheads.data.progress import Progress, telling
from manyheads.extras.inspect.head_scores import (
    HeadLook,
    head_ablations,
    head_importance,
    head_looks,
    normalised_importance,
)
from manyheads.extras.inspect.heads.options import Order
from manyheads.extras.inspect.heads.subject import HeldPairs, HeldSegments, Subject

__all__ = ["HeadReport", "head_report", "num_removed", "pruning_order"]


@dataclass(frozen=True)
class HeadReport:
    """Figures of every head.

    text: on which they were measured. nats: per token, of the whole model. importance, normalised: see
    `extras.inspect.head_scores`. ablations: nats per token more without the head.
    """

    text: str
    nats: float
    importance: dict[Head, float]
    normalised: dict[Head, float]
    ablations: dict[Head, float]
    looks: dict[Head, HeadLook]

    def rows(self) -> list[dict[str, Any]]:
        """Return one record per head, for JSON, tables and pictures."""
        return [
            {
                "head": str(head),
                "importance": self.importance[head],
                "normalised": self.normalised[head],
                "ablation": self.ablations[head],
                "entropy": look.entropy,
                "confidence": look.confidence,
                "offset": look.offset,
                "offset_share": look.offset_share,
            }
            for head, look in self.looks.items()
        ]

    def table(self) -> str:
        """Return a table of the heads, the most important first."""
        lines = [
            f"{self.text}: {self.nats:.4f} nats a token with all heads",
            "head               importance  normalised  ablation  entropy  confidence  position",
        ]
        for row in sorted(self.rows(), key=lambda one: -one["normalised"]):
            position = ""
            if row["offset"] is not None:
                position = f"{row['offset']:+d} in {100 * row['offset_share']:.0f}%".replace("+0 ", "0 ")
            lines.append(
                f"{row['head']:<17}  {row['importance']:>10.4f}  {row['normalised']:>10.3f}  {row['ablation']:>+8.4f}"
                f"  {row['entropy']:>7.2f}  {row['confidence']:>10.2f}  {position}".rstrip()
            )
        return "\n".join(lines)


def head_report(subject: Subject, held: HeldPairs | HeldSegments, show: Progress) -> HeadReport:
    """Judge every head on a text."""
    model, batches, device = subject.model, held.batches, subject.device
    show("importance", 0, 0)
    importance = head_importance(model, batches, device=device)
    show("weights", 0, 0)
    looks = head_looks(model, batches, device=device)
    told = telling(show, "ablation", len(looks))
    nats, ablations = head_ablations(model, batches, device=device, told=told)
    return HeadReport(held.name, nats, importance, normalised_importance(importance), ablations, looks)


def pruning_order(
    subject: Subject, held: HeldPairs | HeldSegments | None, by: Order, show: Progress, *, seed: int = 1
) -> list[Head]:
    """Return the heads in the order in which they are pruned; of equal heads the earlier one comes first.

    They are measured once, on the whole model. The last head of each layer is left out, because a layer keeps one.

    Args:
        held: the text on which heads are judged; the random order reads none, so it may be None.
        seed: of the random order.
    """
    model, device = subject.model, subject.device
    heads = all_heads(model.config)
    if by == "random":
        order = [heads[place] for place in np.random.default_rng(seed).permutation(len(heads))]
    else:
        assert held is not None
        batches = held.batches
        show(by, 0, 0)
        if by == "importance":
            worth = normalised_importance(head_importance(model, batches, device=device))
        elif by == "ablation":
            worth = head_ablations(model, batches, device=device, told=telling(show, by, len(heads)))[1]
        else:
            worth = {head: look.confidence for head, look in head_looks(model, batches, device=device).items()}
        order = sorted(heads, key=lambda head: worth[head])
    last = {head.layer_name: head for head in order}
    return [head for head in order if last[head.layer_name] != head]


def num_removed(share: float, heads: Sequence[Head]) -> int:
    """Return the number of heads that a share of these is, rounded, but at most all but one of each layer."""
    return min(round(share * len(heads)), len(heads) - len({head.layer_name for head in heads}))
