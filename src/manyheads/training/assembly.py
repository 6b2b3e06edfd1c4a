"""Everything a run needs, made from its config: data, model, optimiser, and the checkpoint it goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.table import build_model
from manyheads.config.files import to_plain
from manyheads.data.prepared import PreparedData, open_data
from manyheads.data.stream import TrainingStream
from manyheads.errors import ConfigError
from manyheads.seeding import derive_seed
from manyheads.training.ema import MovingAverage
from manyheads.training.optimiser import build_optimiser
from manyheads.training.settings import TrainConfig
from manyheads.training.state import Counters, named_parameters

__all__ = ["Assembly", "assemble", "resolve_config"]


@dataclass
class Assembly:
    """The parts of a run. config: with vocabulary sizes filled in; average: None without EMA."""

    config: TrainConfig
    device: torch.device
    data: PreparedData
    stream: TrainingStream
    model: Seq2Seq
    optimiser: torch.optim.Optimizer
    average: MovingAverage | None
    counters: Counters

    @property
    def identity(self) -> Mapping[str, Any]:
        """What a checkpoint must agree with: the config as plain data and the digests of data and tokenizer."""
        return {
            "config": to_plain(self.config),
            "data_digest": self.data.digest,
            "tokenizer_digest": self.data.tokenizer.digest,
        }


def resolve_config(config: TrainConfig, data: PreparedData) -> TrainConfig:
    """Fill in the vocabulary sizes that were left to the tokenizer.

    A parser's targets need few of its ids; unless all embeddings are one matrix, its decoder has no others.

    Raises: ConfigError: the best checkpoint is to be found by a score that the data's task does not have.
    """
    best_by, task = config.validation.best_by, "translation" if data.task is None else "parsing"
    if best_by == ("f1" if data.task is None else "bleu"):
        raise ConfigError(f"validation.best_by is {best_by!r}, but {data.path} is prepared for {task}.")
    size = data.tokenizer.vocab_size
    model = config.model
    target_size = size if model.tie_embeddings == "all" else data.tokenizer.num_target_ids
    sizes = (model.source_vocab_size or size, model.target_vocab_size or target_size)
    return replace(config, model=replace(model, source_vocab_size=sizes[0], target_vocab_size=sizes[1]))


def assemble(config: TrainConfig, device: torch.device, data_dir: Path) -> Assembly:
    """Open the data, build the model with the seed's weights, and an optimiser over it.

    Args:
        config: of the run.
        device: where the model goes.
        data_dir: where an embedded corpus is prepared, and found again by a resumed run.

    Raises: DataError, ConfigError, SaveError: the data cannot be used, or the model cannot be built.
    """
    data = open_data(config.data, config.tokenizer, config.seed, data_dir)
    config = resolve_config(config, data)
    tokenizer = data.tokenizer
    stream = TrainingStream(
        data.train,
        config.data,
        config.seed,
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
    )
    torch.manual_seed(derive_seed(config.seed, "weights"))
    model = build_model(config.model).to(device)
    decay = config.training.ema_decay
    average = MovingAverage(named_parameters(model), decay) if decay else None
    optimiser = build_optimiser(model, config.optimiser)
    return Assembly(config, device, data, stream, model, optimiser, average, Counters())
