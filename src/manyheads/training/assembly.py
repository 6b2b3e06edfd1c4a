"""Everything a run needs, made from its config: data, model, optimiser, and the checkpoint it goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.table import build_model
from manyheads.config.files import to_plain
from manyheads.data.preparing import Progress
from manyheads.data.settings import DUPLICATION
from manyheads.distributed.group import Group
from manyheads.seeding import derive_seed
from manyheads.training.duplication import DuplicationObjective
from manyheads.training.ema import MovingAverage
from manyheads.training.language_modelling import LanguageObjective
from manyheads.training.memory import Memory
from manyheads.training.objective import Data, Objective, Stream
from manyheads.training.optimiser import build_optimiser
from manyheads.training.parallel import Spread
from manyheads.training.settings import RunConfig, TextConfig, TrainConfig
from manyheads.training.state import Counters, named_parameters
from manyheads.training.step import Stepper
from manyheads.training.translation import TranslationObjective

__all__ = ["Assembly", "assemble"]


@dataclass
class Assembly:
    """The parts of a run.

    Attributes:
        model: whole, for all but training steps.
        average: None without EMA.
        memory: what a recurrent model remembers of the last step.
        spread: how the model is spread over ranks.
    """

    objective: Objective
    device: torch.device
    model: Seq2Seq | LanguageModel
    optimiser: torch.optim.Optimizer
    average: MovingAverage | None
    counters: Counters
    memory: Memory = field(default_factory=Memory)
    spread: Spread = field(init=False)

    def __post_init__(self) -> None:
        self.spread = Spread.alone(self.model)

    @property
    def group(self) -> Group:
        """The ranks of the run."""
        return self.spread.group

    @property
    def config(self) -> RunConfig:
        """With vocabulary sizes filled in."""
        return self.objective.config

    @property
    def data(self) -> Data:
        return self.objective.data

    @property
    def stream(self) -> Stream:
        return self.objective.stream

    @property
    def identity(self) -> Mapping[str, Any]:
        """What a checkpoint must agree with: the config as plain data and the digests of data and tokenizer."""
        return {
            "config": to_plain(self.config),
            "data_digest": self.data.digest,
            "tokenizer_digest": self.data.tokenizer.digest,
        }

    def stepper(self) -> Stepper:
        """What takes this run's steps."""
        begin = partial(self.objective.begin, self.model)
        return Stepper(self.model, self.optimiser, self.config, self.device, self.memory, begin, self.spread)


def assemble(
    config: RunConfig,
    device: torch.device,
    data_dir: Path,
    group: Group | None = None,
    progress: Progress | None = None,
) -> Assembly:
    """Open the data, build the model with the seed's weights, and an optimiser over it.

    Args:
        config: of the run, with its precision resolved (see `precision.resolve_precision`).
        device: where the model goes.
        data_dir: where an embedded corpus is prepared, and found again by a resumed run.
        group: the ranks of the run, of which the main one prepares; None: this process is alone.
        progress: told what is done, as of `data.preparing`.

    Raises: DataError, ConfigError, SaveError: the data cannot be used, or the model cannot be built.
    """
    group = group or Group()
    with group.main_first():
        objective = _objective(config, data_dir, progress)
    if progress is not None:
        progress("building the model", 0, 0)
    config = objective.config
    torch.manual_seed(derive_seed(config.seed, "weights"))
    model = build_model(objective.model_config).to(device)
    spread = Spread.over(model, config.training.parallel, group)
    decay = config.training.ema_decay
    average = MovingAverage(named_parameters(spread.holder), decay) if decay else None
    optimiser = build_optimiser(spread.holder, config.optimiser, config.precision)
    assembly = Assembly(objective, device, model, optimiser, average, Counters())
    assembly.spread = spread
    return assembly


def _objective(config: RunConfig, data_dir: Path, progress: Progress | None) -> Objective:
    """A newcomer adds one line."""
    if isinstance(config, TrainConfig):
        return TranslationObjective(config, data_dir, progress)
    if isinstance(config, TextConfig) and config.data.path == DUPLICATION:
        return DuplicationObjective(config)
    if isinstance(config, TextConfig):
        return LanguageObjective(config, data_dir, progress)
    raise TypeError(f"nothing trains by a {type(config).__name__}")
