"""Evaluation of language models: one text and one model as the task does it, or an experiment of this extra."""

from __future__ import annotations

from dataclasses import replace

from manyheads.data.progress import Progress
from manyheads.data.settings import DUPLICATION
from manyheads.errors import ConfigError
from manyheads.extras.research.text_task.options import EvaluateOptions
from manyheads.tasks.report import Report
from manyheads.tasks.text.evaluate import evaluate as evaluate_text

__all__ = ["evaluate"]


def evaluate(options: EvaluateOptions, show: Progress) -> Report | None:
    """See `tasks.text.evaluate.evaluate`."""
    if options.others:
        from manyheads.extras.research.compare_texts import compare

        return compare(options, show)
    if options.data == DUPLICATION:
        raise ConfigError(f"{options.model} is not a run on the {DUPLICATION}, so seed and length are unknown.")
    if options.recl:
        from manyheads.extras.research.recl import evaluate_recl

        return evaluate_recl(options, show)
    if options.num_hashes:
        from manyheads.extras.research.hash_rounds import evaluate_hash_rounds

        return evaluate_hash_rounds(options, show)
    if options.dynamic is None:
        return evaluate_text(options, show)
    from manyheads.extras.research.dynamic import Dynamic

    # One set of weights can follow only one lane of the text.
    return evaluate_text(replace(options, lanes=1 if options.lanes is None else options.lanes), show, Dynamic)
