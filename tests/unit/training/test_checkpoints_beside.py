"""Checkpoints that a thread writes while the next steps run: the same bytes, one at a time, and no error is lost."""

import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyheads.checkpoint.format import find_latest, list_checkpoints, verify_checkpoint
from manyheads.errors import SaveError
from manyheads.nn.kernels import policy
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.record.log import Callback
from manyheads.training.record.report import CheckpointReport
from manyheads.training.run import checkpoints
from manyheads.training.run.loop import train
from manyheads.training.run.step import TrainStep

Make = Callable[..., TrainConfig]
MAIN, THREAD = "MainThread", "checkpoints"


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(policy, "writes_beside", lambda device: True)
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("checkpoints")] == []


class Recording:
    """Keeps the messages that a reporter is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str, *rest: Any) -> None:
        self.messages.append(text)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


class Order:
    """What happened in which order. What a thread writes ends when two more steps are done, or the last one."""

    def __init__(self, patch: pytest.MonkeyPatch, last: int) -> None:
        self.seen: list[str] = []
        self.threads: dict[int, str] = {}
        self.memory: dict[int, int] = {}
        done = [threading.Event() for _ in range(last + 1)]
        run, save = TrainStep.run, checkpoints.save_checkpoint

        def noted(step: TrainStep, batches: Any, number: int, rate: float) -> Any:
            result = run(step, batches, number, rate)
            self.seen.append(f"step {number}")
            done[number].set()
            return result

        def slow(folder: Path, number: int, tensors: Any, scalars: Any) -> Path:
            self.threads[number] = threading.current_thread().name.partition("_")[0]
            self.memory[number] = next(iter(tensors["model"].values())).data_ptr()
            if self.threads[number] != MAIN:
                assert done[min(number + 2, last)].wait(300)
            self.seen.append(f"writes {number}")
            return save(folder, number, tensors, scalars)

        patch.setattr(TrainStep, "run", noted)
        patch.setattr(checkpoints, "save_checkpoint", slow)


def _bytes(run: Path) -> dict[str, bytes]:
    files = [path for step in list_checkpoints(run / "checkpoints") for path in step.glob("*.safetensors")]
    files += [run / "model" / "model.safetensors", run / "metrics.jsonl"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def test_the_bytes_are_those_of_the_step_whatever_follows(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {"max_steps": 7, "save_every": 2, "keep": 9, "ema_decay": 0.9}
    found = {}
    for name in ("plain", "beside"):
        config = replace(small(training=training, validation={"every_steps": 7}), run_dir=str(tmp_path / name))
        with monkeypatch.context() as patch:
            patch.setattr(policy, "writes_beside", lambda device, name=name: name == "beside")
            order = Order(patch, last=7) if name == "beside" else None
            train(config)
        found[name] = _bytes(Path(config.run_dir))
    assert order.threads == {2: THREAD, 4: THREAD, 6: THREAD, 7: MAIN}
    assert order.seen == [  # the save after step 4 waits for that of step 2
        "step 1", "step 2", "step 3", "step 4", "writes 2", "step 5", "step 6", "writes 4", "step 7", "writes 6",
        "writes 7",
    ]  # fmt: skip
    assert order.memory[2] == order.memory[4] == order.memory[6] != order.memory[7]
    assert {name.split("/")[1] for name in found["plain"] if name.startswith("checkpoints/step")} == {
        f"step-0000000{step}" for step in (2, 4, 6, 7)
    }
    assert found["plain"].keys() == found["beside"].keys()
    assert [name for name, data in found["plain"].items() if found["beside"][name] != data] == []


@pytest.mark.usefixtures("beside")
def test_the_main_thread_tells_callbacks_once_of_each_checkpoint(small: Make) -> None:
    told: list[tuple[int, bool, str]] = []

    class Noting(Callback):
        def on_checkpoint(self, report: CheckpointReport) -> None:
            verify_checkpoint(report.path)
            told.append((report.step, report.best, threading.current_thread().name))

    train(small(training={"max_steps": 6, "save_every": 1}, validation={"every_steps": 3}), callbacks=[Noting()])
    assert [(step, thread) for step, _, thread in told] == [(step, MAIN) for step in range(1, 7)]
    assert [step for step, best, _ in told if best][:1] == [3]


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("policy_of_errors", ["stop", "continue"])
def test_an_error_of_the_thread_is_told_like_any(
    small: Make, monkeypatch: pytest.MonkeyPatch, policy_of_errors: str
) -> None:
    """It ends the run at a later step, or is survived, in the words of a save that nobody moved to a thread."""
    real, texts = os.fsync, []

    def fsync(handle: int) -> None:
        if "step-00000002" in os.readlink(f"/proc/self/fd/{handle}"):  # noqa: PTH115
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    training = {"max_steps": 5, "save_every": 2, "on_save_error": policy_of_errors}
    for beside in (True, False):
        monkeypatch.setattr(policy, "writes_beside", lambda device, beside=beside: beside)
        config = small(training=training, validation={"every_steps": 0})
        config = replace(config, run_dir=f"{config.run_dir}-{beside}")
        reporter = Recording()
        if policy_of_errors == "stop":
            with pytest.raises(SaveError, match="No space left on device") as error:
                train(config, reporter=reporter)
            texts.append(str(error.value))
        else:
            assert train(config, reporter=reporter).step == 5
            texts += [text for text in reporter.messages if "Training goes on" in text]
        names = sorted(path.name for path in (Path(config.run_dir) / "checkpoints").iterdir())
        assert names == ([] if policy_of_errors == "stop" else ["best", "latest", "step-00000004", "step-00000005"])
    mine, other = (re.sub(r"\d+ bytes are free|run-\w+", "", text) for text in texts)
    assert mine == other


@pytest.mark.usefixtures("beside")
def test_the_last_checkpoint_must_be_written(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a stop comes at the step whose checkpoint the thread could not write."""
    save = checkpoints.save_checkpoint

    def failing(folder: Path, step: int, tensors: Any, scalars: Any) -> Path:
        if step >= 4:
            raise SaveError("The disk is full.")
        return save(folder, step, tensors, scalars)

    monkeypatch.setattr(checkpoints, "save_checkpoint", failing)

    class Stopping(Callback):
        def on_step(self, report: Any) -> Any:
            return "stop" if report.step == 4 else None

    training = {"max_steps": 9, "save_every": 2, "on_save_error": "continue", "log_every": 1}
    with pytest.raises(SaveError, match="The disk is full"):
        train(small(training=training, validation={"every_steps": 0}), callbacks=[Stopping()])


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_being_written_when_a_run_fails_is_completed(
    small: Make, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    save, run, ended = checkpoints.save_checkpoint, TrainStep.run, threading.Event()

    def slow(folder: Path, step: int, tensors: Any, scalars: Any) -> Path:
        assert ended.wait(300)
        if fails:
            raise SaveError("The disk is full.")
        return save(folder, step, tensors, scalars)

    def failing(self: TrainStep, batches: Any, step: int, rate: float) -> Any:
        if step < 4:
            return run(self, batches, step, rate)
        ended.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "save_checkpoint", slow)
    monkeypatch.setattr(TrainStep, "run", failing)
    config, reporter = small(training={"save_every": 3}, validation={"every_steps": 0}), Recording()
    with pytest.raises(KeyboardInterrupt):
        train(config, reporter=reporter)
    newest, _ = find_latest(Path(config.run_dir) / "checkpoints")
    assert (newest is None) is fails
    assert ("The disk is full." in reporter.messages) is fails
