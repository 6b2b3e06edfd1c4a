"""Validation of a parser: F1 of labelled brackets in place of BLEU."""

from __future__ import annotations

from typing import Any

from manyheads.extras.parsing.brackets import SIGNATURE, judge_written
from manyheads.extras.parsing.tokenizer import task_of
from manyheads.extras.parsing.trees import format_tree
from manyheads.tasks.translation import objective
from manyheads.training.record.report import Sample


class Validator(objective.Validator):
    """See `tasks.translation.objective.Validator`."""

    scores = ("loss", "f1")
    verb = "parses"

    def judged(self, texts: list[tuple[str, str]], outputs: list[str]) -> dict[str, Any]:
        """The scores of a parser. texts: sentences and trees."""
        task = task_of(self.data.tokenizer)
        assert task is not None  # as in all data of this task
        sentences, gold = [sentence for sentence, _ in texts], [tree for _, tree in texts]
        report = judge_written(task, sentences, outputs, gold)
        shown = list(zip(texts, report.trees, strict=True))[: self.config.validation.num_samples]
        return {
            "f1": report.all.f1,
            "exact_match": report.all.exact_match,
            "ill_formed": report.ill_formed,
            "brackets_signature": SIGNATURE,
            "samples": tuple(
                Sample(source=sentence, reference=tree, text="" if found is None else format_tree(found))
                for (sentence, tree), found in shown
            ),
        }
