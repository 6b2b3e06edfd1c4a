"""The command line of a run that begins from a model: sizes from the model, defaults, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from manyheads.catalogue import build_model
from manyheads.cli.commands.train import read_arguments
from manyheads.config.files import to_yaml
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import ConfigError
from manyheads.files.verify import file_sha256
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer.config import TransformerConfig
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.tasks.language_modelling.settings import TextConfig
from manyheads.tasks.translation.settings import TrainConfig


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    sizes = {"d_model": 16, "num_heads": 2, "d_ff": 24}
    configs = {
        "pairs": TransformerConfig(**sizes, num_encoder_layers=1, num_decoder_layers=2, source_vocab_size=40,
                                   target_vocab_size=40),
        "text": TransformerXLConfig(**sizes, num_layers=2, vocab_size=30, memory_len=8),
    }  # fmt: skip
    for name, config in configs.items():
        save_pretrained(build_model(config), folder / name)
    return folder


def read(models: Path, name: str, *more: str) -> TrainConfig | TextConfig:
    config = read_arguments(["--init", str(models / name), "--data.path", "new", *more])[1]
    assert isinstance(config, TrainConfig | TextConfig)
    return config


def test_sizes_and_digest_come_from_the_model(models: Path) -> None:
    config = read(models, "pairs")
    assert (config.model.d_model, config.model.num_decoder_layers, config.model.source_vocab_size) == (16, 2, 40)
    assert config.initial.model == str(models / "pairs")
    assert config.initial.sha256 == file_sha256(models / "pairs" / "model.safetensors")
    assert (config.optimiser.name, config.optimiser.learning_rate) == ("adamw", 5e-4)
    assert config.training.max_minutes == 5.0
    assert config.decoding.length_penalty == DecodingSettings().length_penalty  # not that of a run of five minutes
    assert isinstance(read(models, "text"), TextConfig)


def test_the_optimiser_of_the_run_goes_on_at_three_quarters_of_its_rates(models: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(models / "pairs", run / "model")
    optimiser = {"name": "muon", "learning_rate": 0.006, "muon_learning_rate": 0.02, "beta2": 0.97}
    values = {"optimiser": optimiser, "schedule": {"kind": "linear"}, "decoding": {"length_penalty": 1.3}}
    (run / "config.yaml").write_text(json.dumps(values))
    for place in (run, run / "model"):
        config = read(place.parent, place.name)
        assert isinstance(config, TrainConfig)
        found = config.optimiser
        assert (found.name, found.learning_rate, found.muon_learning_rate, found.beta2) == ("muon", 0.0045, 0.015, 0.97)
        assert config.decoding.length_penalty == 1.3
        assert config.schedule.kind == "linear"
    (run / "config.yaml").write_text(json.dumps({**values, "schedule": {"kind": "noam"}}))
    assert read(tmp_path, "run").optimiser.learning_rate == 5e-4


def test_a_preset_gives_batches_but_neither_sizes_nor_rate(models: Path) -> None:
    config = read(models, "pairs", "--preset", "tiny", "--optimiser.learning_rate", "0.001")
    assert (config.data.max_tokens, config.training.max_steps) == (8192, 8000)
    assert (config.model.d_model, config.optimiser.name, config.optimiser.learning_rate) == (16, "adamw", 1e-3)


def test_dropout_can_change_but_no_size(models: Path) -> None:
    config = read(models, "pairs", "--model.dropout", "0.25", "--model.d_model", "16")
    assert config.model.dropout == 0.25
    with pytest.raises(ConfigError, match=r"model.d_model is 32, but 16 in the model .*leave these settings out"):
        read(models, "pairs", "--model.d_model", "32")
    with pytest.raises(ConfigError, match="source_vocab_size 50 differs from"):
        read(models, "pairs", "--model.source_vocab_size", "50")
    with pytest.raises(ConfigError, match=r"model.vocab_size is 50, but 30"):
        read(models, "text", "--model.vocab_size", "50")


def test_a_file_cannot_change_a_size_either(models: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: {d_ff: 48}\nseed: 7\n")
    with pytest.raises(ConfigError, match=r"model\.d_ff is 48, but 24"):
        read(models, "pairs", "--config", str(tmp_path / "mine.yaml"))
    (tmp_path / "mine.yaml").write_text(f"initial: {{model: {models / 'pairs'}}}\nseed: 7\n")
    config = read_arguments(["--config", str(tmp_path / "mine.yaml"), "--data.path", "new"])[1]
    assert isinstance(config, TrainConfig)
    assert (config.seed, config.model.d_model) == (7, 16)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--architecture", "reformer"), "contradict each other"),
        (("--preset", "xl-demo"), "model.architecture is set twice"),
    ],
)
def test_contradictions(models: Path, more: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(models, "pairs", *more)


def test_models_that_cannot_be_used(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        read(models, "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"is not a model that a run can begin from: .*No such file"):
        read(tmp_path, "empty")
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"architecture": "other"}))
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="names no architecture that can be trained"):
        read(tmp_path, "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; a model is a folder"):
        read(tmp_path, "file")


def test_a_run_with_checkpoints_does_not_read_the_model(models: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = read(models, "pairs", "--run-dir", str(run))
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    text = to_yaml(config).replace(str(models / "pairs"), str(models / "gone"))
    (run / "config.yaml").write_text(text)
    again = read(models, "gone", "--run-dir", str(run), "--training.max_minutes", "9")
    assert (again.model, again.initial.sha256) == (config.model, config.initial.sha256)
    with pytest.raises(ConfigError, match="there is no folder"):
        read(models, "gone", "--run-dir", str(run), "--resume", "none")


def test_a_mix_is_given_as_words_and_names_the_path(models: Path) -> None:
    arguments = [
        "--init",
        str(models / "pairs"),
        "--data.mix",
        "old=0.2",
        "new=0.8",
        "--training.freeze",
        "encoder",
        "x.*",
    ]
    config = read_arguments(arguments)[1]
    assert isinstance(config, TrainConfig)
    assert (config.data.path, config.data.mix) == ("new", ("old=0.2", "new=0.8"))
    assert config.training.freeze == ("encoder", "x.*")
    again = read_arguments([*arguments[:2], "--data.mix", "[old=0.2, new=0.8]", "--data.path", "old"])[1]
    assert isinstance(again, TrainConfig)
    assert (again.data.path, again.data.mix) == ("old", ("old=0.2", "new=0.8"))


@pytest.mark.parametrize("name", ["--data.mix", "--training.freeze"])
def test_a_list_needs_a_value(models: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name[2:]):
        read(models, "pairs", name)
