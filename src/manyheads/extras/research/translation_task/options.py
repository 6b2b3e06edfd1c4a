"""Options of `manyheads evaluate` for translation: those of the task, and several models."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.config.options import CommandPage, argument, option
from manyheads.extras.research.comparing import check_comparison
from manyheads.tasks.translation import options as task
from manyheads.tasks.translation.options import PREPARE, SCORE

__all__ = ["EVALUATE", "PREPARE", "SCORE", "EvaluateOptions"]


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(task.EvaluateOptions):
    """Options of `manyheads evaluate` for a translator."""

    others: tuple[str, ...] = argument(
        "Other models, to be compared with the first one on the same test set.",
        default=(),
        metavar="MODEL ...",
        after="model",
    )
    page: str | None = option("Of several models: write the comparison as one HTML page.", default=None, metavar="FILE")
    differences: int = option("Of several models: show the N sentences that differ most.", default=10, metavar="N")

    def __post_init__(self) -> None:
        if self.hypotheses is None and not self.model:
            object.__setattr__(self, "others", self._find_models())
        super().__post_init__()
        for_one_model = {
            "--output": self.output,
            "--hypotheses": self.hypotheses,
            "--ensemble": self.models.ensemble,
            "--rerank": self.models.rerank,
        }
        check_comparison(self, for_one_model)


EVALUATE = CommandPage(
    EvaluateOptions,
    task.EVALUATE.description.replace(
        "without a model.\n",
        """without a model. Several models are compared on the same test set: scores with a paired bootstrap against the
first model, and the sentences that differ most; --page writes them as a page.
""",
    ),
    (
        *task.EVALUATE.examples[:4],
        "manyheads evaluate runs/demo runs/mine --source test.en --reference test.de --page compared.html",
        *task.EVALUATE.examples[4:],
    ),
)
