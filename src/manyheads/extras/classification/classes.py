"""Scores of a classifier: accuracy, F1 of each label and their mean, and the confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Z = 1.959964  # 95% of a normal distribution lie within this many standard deviations


@dataclass(frozen=True)
class LabelScores:
    """The scores of one label, as fractions; `support` texts have it, `predicted` were given it."""

    label: str
    precision: float
    recall: float
    f1: float
    support: int
    predicted: int


@dataclass(frozen=True)
class Confusion:
    """Counts of each right label with each predicted label.

    Attributes:
        labels: in the order of their ids.
        counts: (labels, labels); row: the right label, column: the predicted one.
    """

    labels: tuple[str, ...]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, labels: Sequence[str], pairs: Iterable[tuple[int, int]]) -> Confusion:
        """Count pairs of ids: the right label, the predicted one."""
        counts = np.zeros((len(labels), len(labels)), np.int64)
        for right, predicted in pairs:
            counts[right, predicted] += 1
        return cls(tuple(labels), counts)

    @property
    def total(self) -> int:
        """Number of texts."""
        return int(self.counts.sum())

    @property
    def accuracy(self) -> float:
        """Fraction of texts with the right label."""
        return int(self.counts.trace()) / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the accuracy (Wilson 1927), for texts drawn independently."""
        n, p = self.total, self.accuracy
        middle = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
        half = _Z / (1 + _Z**2 / n) * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
        return max(0.0, middle - half), min(1.0, middle + half)

    @property
    def most_frequent(self) -> tuple[str, float]:
        """The most frequent right label, and the accuracy of always answering it."""
        sums = self.counts.sum(axis=1)
        best = int(sums.argmax())
        return self.labels[best], int(sums[best]) / self.total

    def scores(self) -> list[LabelScores]:
        """Return the scores of each label. A ratio of nothing to nothing is 0."""
        right = self.counts.diagonal()
        support, predicted = self.counts.sum(axis=1), self.counts.sum(axis=0)

        def ratio(part: float, whole: float) -> float:
            return float(part) / float(whole) if whole else 0.0

        return [
            LabelScores(
                label=label,
                precision=ratio(right[i], predicted[i]),
                recall=ratio(right[i], support[i]),
                f1=ratio(2 * right[i], support[i] + predicted[i]),
                support=int(support[i]),
                predicted=int(predicted[i]),
            )
            for i, label in enumerate(self.labels)
        ]

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the labels that a text has or was given; each counts the same, however rare it is."""
        found = [one.f1 for one in self.scores() if one.support or one.predicted]
        return math.fsum(found) / len(found)

    def to_json(self) -> dict[str, Any]:
        """Return the scores as plain data."""
        low, high = self.interval
        label, share = self.most_frequent
        return {
            "accuracy": self.accuracy,
            "accuracy_interval_95": [low, high],
            "macro_f1": self.macro_f1,
            "texts": self.total,
            "most_frequent": {"label": label, "accuracy": share},
            "labels": [vars(one) for one in self.scores()],
            "confusion": {"rows": "right", "columns": "predicted", "counts": self.counts.tolist()},
        }

    def to_lines(self) -> list[str]:
        """Return the scores, a table of the labels and the matrix, for people."""
        low, high = self.interval
        label, share = self.most_frequent
        lines = [
            f"accuracy = {100 * self.accuracy:.2f}% ({int(self.counts.trace()):,} of {self.total:,} texts,"
            f" 95% interval {100 * low:.1f} to {100 * high:.1f})",
            f"macro F1 = {100 * self.macro_f1:.2f}",
            f"  always answering {label} would give {100 * share:.2f}%",
        ]
        width = max(5, *(len(name) for name in self.labels))
        lines.append(f"{'label':<{width}}  precision  recall     F1    texts  predicted")
        for one in self.scores():
            values = f"{100 * one.precision:9.2f}  {100 * one.recall:6.2f} {100 * one.f1:6.2f}"
            lines.append(f"{one.label:<{width}}  {values} {one.support:8,} {one.predicted:10,}")
        return [*lines, *self.matrix_lines()]

    def matrix_lines(self) -> list[str]:
        """Return the matrix: a row for each right label, a column for each predicted one."""
        width = max(len(name) for name in (*self.labels, "right"))
        columns = [max(len(name), len(f"{int(self.counts[:, i].max()):,}")) for i, name in enumerate(self.labels)]
        heads = "  ".join(f"{name:>{columns[i]}}" for i, name in enumerate(self.labels))
        lines = ["confusion matrix: rows are right labels, columns predicted ones", f"{'right':<{width}}  {heads}"]
        for name, row in zip(self.labels, self.counts, strict=True):
            cells = "  ".join(f"{int(count):>{columns[i]},}" for i, count in enumerate(row))
            lines.append(f"{name:<{width}}  {cells}")
        return lines
