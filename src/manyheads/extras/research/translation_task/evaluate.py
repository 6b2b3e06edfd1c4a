"""Evaluation of translators: one as the task does it, or several on one test set."""

from __future__ import annotations

from manyheads.data.progress import Progress
from manyheads.extras.research.translation_task.options import EvaluateOptions
from manyheads.tasks.report import Report
from manyheads.tasks.translation.evaluate import evaluate as evaluate_one

__all__ = ["evaluate"]


def evaluate(options: EvaluateOptions, show: Progress) -> Report | None:
    """See `tasks.translation.evaluate.evaluate`."""
    if not options.others:
        return evaluate_one(options, show)
    from manyheads.extras.research.compare_translations import compare

    return compare(options, show)
