"""The parts of a run, built from its config: data, model and optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from manyheads.catalogue import build_model
from manyheads.config.files import to_plain
from manyheads.distributed.group import Group
from manyheads.errors import ConfigError, DataError
from manyheads.seeding import derive_seed
from manyheads.training.optim.optimiser import MovingAverage, build_optimiser
from manyheads.training.optim.schedule import highest_rate
from manyheads.training.record.log import Callbacks
from manyheads.training.run.device import arithmetic_of_run, check_capacity
from manyheads.training.run.objective import Data, Objective, Stream, Translate, open_objective
from manyheads.training.run.resume import begin_from, differences, freeze
from manyheads.training.run.state import Counters, Memory, ParallelModel, named_parameters
from manyheads.training.run.step import TrainStep

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.models.composites import LanguageModel, Seq2Seq
    from manyheads.training.record.report import Reporter
    from manyheads.training.settings import RunConfig

_MAY_DIFFER = (
    "run_dir",
    "device",
    "num_threads",
    "data.path",
    "initial.model",
    "initial.data",
    "training.ignore_memory",
)
"""Settings of a machine, which are not the same for all ranks. (Data and initial model have digests.)"""


@dataclass(frozen=True)
class Surroundings:
    """What surrounds a run in this process; see `training.run.loop.train`."""

    reporter: Reporter
    translate: Translate | None
    group: Group
    callbacks: Callbacks = field(default_factory=Callbacks)


@dataclass
class RunComponents:
    """The parts of a run.

    Attributes:
        model: the whole model, for everything except training steps.
        average: None without EMA.
        memory: the recurrent model's states after the last step.
        parallel_model: the distribution of the model over ranks.
        notes: sentences about the beginning of the run: the model that it continues, and what is frozen.
    """

    objective: Objective
    device: torch.device
    model: Seq2Seq | LanguageModel
    optimiser: torch.optim.Optimizer
    average: MovingAverage | None
    counters: Counters
    memory: Memory = field(default_factory=Memory)
    parallel_model: ParallelModel = field(init=False)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.parallel_model = ParallelModel.alone(self.model)

    @property
    def group(self) -> Group:
        """The ranks of the run."""
        return self.parallel_model.group

    @property
    def config(self) -> RunConfig:
        """The config with vocabulary sizes filled in."""
        return self.objective.config

    @property
    def data(self) -> Data:
        return self.objective.data

    @property
    def stream(self) -> Stream:
        return self.objective.stream

    @property
    def digests(self) -> Mapping[str, str]:
        """Those that a checkpoint must match, of data and tokenizer."""
        return {"data_digest": self.objective.digest, "tokenizer_digest": self.data.tokenizer.digest}

    @property
    def arithmetic(self) -> Mapping[str, str]:
        """The facts on which the bytes of the run depend besides its identity."""
        return arithmetic_of_run(self.device, self.config.precision, self.group)

    def train_step(self) -> TrainStep:
        """The object that computes this run's steps."""
        begin = partial(self.objective.begin, self.model)
        return TrainStep(self.model, self.optimiser, self.config, self.device, self.memory, begin, self.parallel_model)


def assemble(
    config: RunConfig,
    device: torch.device,
    data_dir: Path,
    group: Group | None = None,
    progress: Progress | None = None,
    *,
    begins: bool = True,
) -> RunComponents:
    """Open the data, and build the model, with the seed's weights or those of `config.initial`, and its optimiser.

    Args:
        config: of the run, with its precision resolved (see `precision.resolve_precision`).
        device: device of the model.
        data_dir: folder for an embedded corpus after preparation, which a resumed run reads again.
        group: the ranks of the run, of which the main one prepares; None: a single process.
        progress: called with the progress, as in `data.preparing`.
        begins: False: the weights come from a checkpoint later, so those of `config.initial` are not made.

    Raises: DataError, ConfigError, SaveError, ModelFileError: the data or the initial model cannot be used, or the
        model cannot be built; or the ranks have different data.
    """
    group = group or Group()
    with group.main_first():
        objective = open_objective(config, data_dir, progress)
    _check_same_data(objective, group)
    if progress is not None:
        progress("building the model", 0, 0)
    config = objective.config
    warning = check_capacity(config, objective.model_config, device, group.world)
    torch.manual_seed(derive_seed(config.seed, "weights"))
    model = build_model(objective.model_config)
    notes = [*objective.check_device(device), *([warning] if warning else [])]
    if config.initial.model and begins:
        notes += begin_from(model, config.initial, objective.data.tokenizer)
    elif begins:
        notes += objective.prepare_weights(model, group)
    notes += freeze(model, config.training.freeze)
    model = model.to(device)
    parallel_model = ParallelModel.over(model, config.training.parallel, group)
    decay = config.training.ema_decay
    average = MovingAverage(named_parameters(parallel_model.trained), decay) if decay else None
    width = objective.model_config.d_model
    peak = highest_rate(config.schedule, peak=config.optimiser.learning_rate, d_model=width)
    optimiser = build_optimiser(parallel_model.trained, config.optimiser, config.precision, peak)
    components = RunComponents(objective, device, model, optimiser, average, Counters(), notes=tuple(notes))
    components.parallel_model = parallel_model
    return components


def check_same_settings(config: RunConfig, group: Group) -> None:
    """Raises: ConfigError: this rank has other settings than the main rank, besides those of its machine."""
    mine = to_plain(config)
    differ = [name for name, _ in differences(group.from_main(lambda: mine), mine) if name not in _MAY_DIFFER]
    if differ:
        raise ConfigError(
            f"Rank {group.rank} has other settings than rank 0: {', '.join(differ)}. Give all ranks the same options"
            " and the same files."
        )


def _check_same_data(objective: Objective, group: Group) -> None:
    """Raises: DataError: this rank's data is not that of the main rank, so its part of a batch would be of another."""
    mine = objective.digest
    main = group.from_main(lambda: mine)
    if main != mine:
        raise DataError(
            f"The data of rank {group.rank} (SHA-256 {mine[:12]}...) is not that of rank 0 ({main[:12]}...); copy the"
            " prepared folder to every machine, instead of preparing it on each."
        )
