"""Callbacks and loggers of a run: what they get, what they cannot change, and what happens when they fail."""

import csv
import dataclasses
import json
import random
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import echo, outcome

from manyheads.catalogue import LOGGERS
from manyheads.errors import ConfigError
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.record import log as callbacks
from manyheads.training.record.log import Callback, Logger
from manyheads.training.run.loop import train

Make = Callable[..., TrainConfig]
EVENTS = ("on_start", "on_step", "on_validation", "on_checkpoint", "on_end")


class Noting(Logger):
    """Keeps what it gets, and disturbs every generator of random numbers."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return object.__getattribute__(self, name)

        def note(report: Any) -> None:
            self.got.append((name, report))
            torch.manual_seed(len(self.got))
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002  (the global generator is what is disturbed)

        return note

    def of(self, event: str) -> list[Any]:
        return [report for name, report in self.got if name == event]


def plain(value: Any) -> bool:
    """Whether a value consists of numbers, texts, paths and records of them."""
    if dataclasses.is_dataclass(value):
        return all(plain(getattr(value, item.name)) for item in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return all(plain(one) for one in value.values())
    if isinstance(value, tuple | list):
        return all(map(plain, value))
    return value is None or type(value) in (int, float, bool, str) or isinstance(value, Path)


def log_of(config: TrainConfig) -> str:
    return (Path(config.run_dir) / "train.log").read_text("utf-8")


def test_what_a_callback_gets_and_that_a_run_has_the_same_bytes(small: Make, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {"dropout": 0.3}, "validation": {"every_steps": 3, "bleu_sentences": 2}}
    noting = Noting()
    outcomes = []
    for name, chosen in (("alone", ()), ("beside", ["csv", noting])):
        config = small(**changes, run_dir=str(tmp_path / name))
        result = train(config, translate=echo, callbacks=chosen)
        found = outcome(Path(config.run_dir))
        outcomes.append({key: value.replace(name.encode(), b"run") for key, value in found.items()})
    assert outcomes[0] == outcomes[1]
    half = [*["on_step"] * 3, "on_validation", "on_checkpoint"]
    assert [name for name, _ in noting.got if name != "on_log"] == ["on_start", *half, *half, "on_end"]
    assert all(plain(report) for _, report in noting.got)
    [start], [*steps] = noting.of("on_start"), noting.of("on_step")
    assert (start.step, start.config["training"]["max_steps"], start.run_dir) == (0, 6, tmp_path / "beside")
    assert [report.step for report in steps] == [1, 2, 3, 4, 5, 6]
    assert [(report.step, report.path.name) for report in noting.of("on_checkpoint")] == [
        (3, "step-00000003"),
        (6, "step-00000006"),
    ]
    assert noting.of("on_end") == [result]
    lines = [json.loads(line) for line in (tmp_path / "beside" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert noting.of("on_log") == lines


def test_csv_has_the_lines_of_metrics_also_after_a_resume(small: Make) -> None:
    config = small(training={"max_steps": 3, "save_every": 3})
    train(config, callbacks="csv")
    run = Path(config.run_dir)
    (run / "metrics.csv").write_text("step\n99\n", "utf-8")  # steps after the checkpoint, which the run makes again
    train(dataclasses.replace(config, training=dataclasses.replace(config.training, max_steps=6)), callbacks=["csv"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{name: value for name, value in row.items() if value} for row in rows] == [
        {name: str(value) for name, value in line.items()} for line in lines
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("event", EVENTS)
def test_one_that_raises_is_reported_once_and_off(event: str, small: Make) -> None:
    class Failing(Callback):
        calls = 0

    def fail(self: Failing, report: Any) -> None:
        type(self).calls += 1
        raise ZeroDivisionError("of mine")

    setattr(Failing, event, fail)
    config, other = small(), Noting()
    result = train(config, callbacks=[Failing(), other])
    log = log_of(config)
    assert result.step == 6
    assert log.count(f"Failing failed in {event} (ZeroDivisionError: of mine) and is off from now on") == 1
    assert log.count("Traceback (most recent call last)") == 1
    assert 'raise ZeroDivisionError("of mine")' in log
    assert Failing.calls == 1
    assert len(other.of("on_step")) == 6


def test_what_on_step_returns(small: Make, tmp_path: Path) -> None:
    class Stopping:
        def on_step(self, report: Any) -> Any:
            return "stop" if report.step == 4 else None

    class Wrong:
        def on_step(self, report: Any) -> Any:
            return report.step == 4

    config = small(training={"save_every": 0}, validation={"every_steps": 0})
    result = train(config, callbacks=[Stopping()])
    assert (result.stopped_by, result.step, result.signal_number) == ("callback", 4, None)
    assert result.checkpoint.name == "step-00000004"
    assert result.last_validation is not None
    assert "ended at step 4" in log_of(config)
    assert train(config).step == 6  # the same run goes on without it
    wrong = small(run_dir=str(tmp_path / "wrong"))
    assert train(wrong, callbacks=[Wrong()]).step == 6
    assert log_of(wrong).count("on_step returned False; it returns 'stop' or None") == 2  # with its traceback


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes(error: type[BaseException], small: Make) -> None:
    class Interrupting(Logger):
        closed = 0

        def on_step(self, report: Any) -> None:
            raise error

        def close(self) -> None:
            type(self).closed += 1

    with pytest.raises(error):
        train(small(), callbacks=[Interrupting()])
    assert Interrupting.closed == 1


def test_one_that_is_slow_is_named_once(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Callback):
        def on_step(self, report: Any) -> None:
            time.sleep(0.02)

    config = small()
    monkeypatch.setattr(callbacks, "SLOW_SECONDS", 0.01)
    train(config, callbacks=[Slow(), object.__new__(Slow)])
    named = re.findall(r"(Slow|Slow 2) took \d+\.\d s in on_step; training waits for it\.", log_of(config))
    assert sorted(named) == ["Slow", "Slow 2"]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (["csvv"], "there is no logger 'csvv'; there are: csv,"),
        ([object()], "is no callback: an object is needed that has one of the methods on_start"),
        (Callback, "is no callback"),
        (3, "3 is no callback"),
    ],
)
def test_what_is_no_callback(chosen: Any, message: str, small: Make) -> None:
    config = small()
    with pytest.raises(ConfigError) as refused:
        train(config, callbacks=chosen)
    assert message in str(refused.value)
    assert not Path(config.run_dir).exists()


def test_one_can_refuse_to_begin_and_the_others_are_closed(small: Make) -> None:
    class Refusing:
        def on_start(self, start: Any) -> None:
            raise ConfigError("not logged in")

    class Open(Logger):
        closed = 0

        def close(self) -> None:
            type(self).closed += 1

    config = small()
    with pytest.raises(ConfigError, match="not logged in"):
        train(config, callbacks=[Open(), Refusing()])
    assert Open.closed == 1
    assert "error: not logged in" in log_of(config)


def test_the_table_of_loggers() -> None:
    assert {"csv", "tensorboard", "wandb", "mlflow", "trackio"} <= set(LOGGERS)
