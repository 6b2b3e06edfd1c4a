"""A model that cannot fit is refused before its memory is taken."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import TINY, changed

from manyheads.errors import ConfigError
from manyheads.extras.planning.planner import Planner
from manyheads.training.run import device as capacity
from manyheads.training.run.device import check_capacity

SIZES = {"source_vocab_size": 50, "target_vocab_size": 50}


def test_a_model_larger_than_all_memory() -> None:
    config = changed(TINY, model={**SIZES, "d_model": 1_000_000, "num_heads": 1})
    with pytest.raises(ConfigError, match=r"[0-9,]+ parameters\. To train them takes at least [0-9,.]+ GiB"):
        check_capacity(config, config.model, torch.device("cpu"))
    with pytest.raises(ConfigError, match="parameters"):
        Planner(config).memory(8)


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gradients and one moment, and averages if there are any; FSDP divides all but the weights."""
    config = changed(TINY, model=SIZES, training={"ema_decay": 0.0})
    from manyheads.catalogue import build_model

    weights = 4 * sum(parameter.numel() for parameter in build_model(config.model).parameters())
    averaged = changed(config, training={"ema_decay": 0.9})
    divided = changed(config, training={"parallel": "fsdp"})
    for settings, world, least in (
        (config, 1, 3 * weights),
        (averaged, 1, 4 * weights),
        (divided, 2, 2 * weights),
        (config, 2, 3 * weights),
    ):
        monkeypatch.setattr(capacity, "free_memory_bytes", lambda device, least=least: least)
        check_capacity(settings, settings.model, torch.device("cpu"), world)
        monkeypatch.setattr(capacity, "free_memory_bytes", lambda device, least=least: least - 1)
        with pytest.raises(ConfigError, match="free on cpu"):
            check_capacity(settings, settings.model, torch.device("cpu"), world)


def test_frozen_weights_have_no_gradients_and_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    from manyheads.catalogue import build_model

    config = changed(TINY, model=SIZES, training={"ema_decay": 0.0, "freeze": ("encoder",)})
    model = build_model(config.model)
    weights, frozen = (4 * sum(one.numel() for one in part.parameters()) for part in (model, model.body.encoder))
    least = 3 * weights - 2 * frozen
    monkeypatch.setattr(capacity, "free_memory_bytes", lambda device: least)
    check_capacity(config, config.model, torch.device("cpu"))
    monkeypatch.setattr(capacity, "free_memory_bytes", lambda device: least - 1)
    with pytest.raises(ConfigError, match="free on cpu"):
        check_capacity(config, config.model, torch.device("cpu"))


def test_nothing_is_checked_where_free_memory_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = changed(TINY, model={**SIZES, "d_model": 1_000_000, "num_heads": 1})
    monkeypatch.setattr(capacity, "free_memory_bytes", lambda device: None)
    check_capacity(config, config.model, torch.device("cpu"))


def test_force_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal becomes a warning, which the beginning of the run shows."""
    from manyheads.cli.commands.train import read_arguments

    config = changed(TINY, model=SIZES)
    monkeypatch.setattr(capacity, "free_memory_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match="--force tries it nevertheless"):
        check_capacity(config, config.model, torch.device("cpu"))
    forced = changed(config, training={"ignore_memory": True})
    warning = check_capacity(forced, forced.model, torch.device("cpu"))
    assert warning.startswith("The model has ")
    assert warning.endswith("--force continues; the system may end the process.")
    monkeypatch.undo()
    assert check_capacity(forced, forced.model, torch.device("cpu")) == ""
    assert read_arguments(["--preset", "debug", "--force"])[1].training.ignore_memory


def test_a_forced_run_says_so_and_trains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from manyheads.cli.main import main

    monkeypatch.setattr(capacity, "free_memory_bytes", lambda device: 1000)
    monkeypatch.chdir(tmp_path)
    command = ["train", "--preset", "debug", "--training.max-steps", "1", "--run-dir", "run", "--device", "cpu"]
    assert main(command) == 2
    assert main([*command, "--force"]) == 0
    assert "--force continues" in Path("run/train.log").read_text(encoding="utf-8")
