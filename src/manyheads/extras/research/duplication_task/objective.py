"""Learning the duplication task: the second half of a sequence repeats the first.

The score is the accuracy on the second half.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from manyheads.errors import ConfigError
from manyheads.extras.research.duplication import DuplicationData, DuplicationStream, evaluate_duplication, held_out
from manyheads.tasks.language_modelling.objective import begin_hashing
from manyheads.training.record.report import ValidationReport
from manyheads.training.run.objective import Objective, PlainObjective, Translate

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.models.composites import LanguageModel
    from manyheads.tasks.language_modelling.settings import TextConfig
    from manyheads.training.run.clock import StopFlag


def open_objective(config: TextConfig, data_dir: Path, progress: Progress | None = None) -> Objective:
    """See `training.run.objective.open_objective`. The sequences are computed, so nothing is read or written."""
    return DuplicationObjective(config)


class DuplicationObjective(PlainObjective):
    """0w0w for a language model; `data.lanes` sequences of `data.segment_len` tokens a step.

    Args: config: of the run.

    Raises: ConfigError: the length is odd, or the model knows too few ids.
    """

    def __init__(self, config: TextConfig) -> None:
        if config.data.mix:
            raise ConfigError("data.mix is for prepared data; the duplication task computes its own. Leave it out.")
        self.data = DuplicationData(config.seed, config.data.segment_len)
        self.digest = self.data.digest
        needed = self.data.vocabulary.vocab_size
        size = config.model.vocab_size or needed
        if size < needed:
            raise ConfigError(f"model.vocab_size is {size}; the duplication task has {needed} ids, set it to 0.")
        self.config = replace(config, model=replace(config.model, vocab_size=size))
        self.model_config, self.generation = self.config.model, self.config.generation
        self.task = "duplication"
        hashes = config.model.hash_rounds is not None
        self.next_command = "evaluate {run} --num-hashes full 8 4 2 1" if hashes else "evaluate {run}"
        self.stream = DuplicationStream(config.data, config.seed)

    def describe(self) -> str:
        return f"{self.data.describe()}\n{self.stream.describe()}"

    def first_state(self, model: LanguageModel) -> Any:
        return model.start(1, projected=False)

    def begin(self, model: LanguageModel, lanes: int, seed: int) -> Any:
        return begin_hashing(self.config, model, lanes, seed)

    def judge(
        self, model: LanguageModel, device: torch.device, stop: StopFlag, translate: Translate | None
    ) -> DuplicationJudge:
        return DuplicationJudge(model, self.config, device, stop)

    def judge_sets(self, model: LanguageModel, device: torch.device, stop: StopFlag) -> dict[str, DuplicationJudge]:
        return {"duplication-task valid": DuplicationJudge(model, self.config, device, stop)}

    def lighter(self) -> str:
        data = self.config.data
        return (
            f"(data.lanes {data.lanes}, data.segment_len {data.segment_len}, data.accumulate {data.accumulate}): lower"
            " one of the first two, or raise accumulate; either makes it a new run."
        )


@dataclass(frozen=True)
class DuplicationJudge:
    """Judges a model on sequences that it has never seen.

    Args:
        model: a composite.
        config: of the run.
        device: where the model is.
        stop: looked at between batches.
    """

    model: LanguageModel
    config: TextConfig
    device: torch.device
    stop: StopFlag

    def __bool__(self) -> bool:
        """Whether there is anything to validate on: always."""
        return True

    def run(self, step: int) -> ValidationReport | None:
        config = self.config
        rows = max(1, config.data.lanes // config.data.accumulate)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            found = evaluate_duplication(
                self.model,
                held_out(config.seed, "valid", config.data.segment_len, rows),
                device=self.device,
                stop=lambda: bool(self.stop),
            )
        if found is None:
            return None
        return ValidationReport(step=step, loss=found.nats_per_token, accuracy=found.accuracy)
