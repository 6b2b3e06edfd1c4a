"""A small prepared corpus and the config of a run that takes a second."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import TINY_TEXT, changed

from manyheads.data.settings import DataSettings
from manyheads.data.translation.prepared import open_data
from manyheads.decoding.settings import DecodingSettings
from manyheads.models.transformer.config import TransformerConfig
from manyheads.tasks.language_modelling.settings import TextConfig
from manyheads.tasks.translation.settings import TrainConfig, ValidationSettings
from manyheads.text.settings import TokenizerSettings
from manyheads.training.run.components import assemble
from manyheads.training.settings import OptimiserSettings, ScheduleSettings, TrainingSettings

SMALL = TrainConfig(
    precision="fp32",
    num_threads=1,
    data=DataSettings(max_tokens=256, max_source_len=16, max_target_len=16),
    model=TransformerConfig(d_model=16, num_heads=2, d_ff=32, num_encoder_layers=1, num_decoder_layers=1),
    optimiser=OptimiserSettings(learning_rate=3e-3),
    schedule=ScheduleSettings(kind="constant", warmup_steps=1),
    training=TrainingSettings(max_steps=6, log_every=2, save_every=3, keep=2, plots=False, tensorboard=False),
    validation=ValidationSettings(every_steps=3, bleu_sentences=0),
    decoding=DecodingSettings(num_beams=1, max_len_offset=5),
)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = DataSettings(path="copy-task", max_source_len=16, max_target_len=16, num_train_pairs=200)
    tokenizer = TokenizerSettings(kind="word", vocab_size=32)
    return open_data(settings, tokenizer, 1, tmp_path_factory.mktemp("corpus")).path


@pytest.fixture
def small(corpus: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Makes a config: sections are given as dicts of changes."""

    def make(**sections: Any) -> TrainConfig:
        config = replace(SMALL, run_dir=str(tmp_path / "run"), data=replace(SMALL.data, path=str(corpus)))
        made: TrainConfig = changed(config, **sections)
        return made

    return make


@pytest.fixture(scope="session")
def novel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded novel, prepared once."""
    folder = tmp_path_factory.mktemp("novel")
    assemble(TINY_TEXT, torch.device("cpu"), folder)
    return next(folder.iterdir())


@pytest.fixture
def text_run(novel: Path, tmp_path: Path) -> Callable[..., TextConfig]:
    """Makes a config of a run on the novel: from another one, with sections as dicts of changes."""

    def make(base: TextConfig, run: str = "run", **sections: Any) -> TextConfig:
        config = replace(base, run_dir=str(tmp_path / run), data=replace(base.data, path=str(novel)))
        made: TextConfig = changed(config, **sections)
        return made

    return make
