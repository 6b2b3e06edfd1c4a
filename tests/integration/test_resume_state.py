"""Whatever affects the next step is in a checkpoint: a run in many parts has the bytes of one in a single part."""

import errno
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from file_operations import HAS_PROC, Faults, Operation, Watch
from tiny_run import echo, outcome, tiny

import manyheads.training.run.loop
from manyheads.checkpoint.format import list_checkpoints
from manyheads.errors import SaveError
from manyheads.files.verify import verify_folder
from manyheads.training.run.clock import StopFlag
from manyheads.training.run.loop import train

RUN = Path("runs/tiny")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs are named by a relative path, so that their files do not depend on where they are."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


class StopAfter(StopFlag):
    """A stop flag that is raised after one step; reporter and flag in one."""

    def step(self, report: Any) -> None:
        self.stop()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


class OnProgress:
    """A reporter that keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str, level: str = "info") -> None:
        self.messages.append(text)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def test_a_run_in_nine_parts_has_the_bytes_of_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tiny(), translate=echo)
    wanted = outcome(RUN)
    shutil.move(RUN, place / "whole")
    parts = 0
    result = None
    while result is None or result.stopped_by == "signal":
        flag = StopAfter()
        monkeypatch.setattr(manyheads.training.run.loop, "StopFlag", lambda flag=flag: flag)
        result = train(tiny(), reporter=flag, translate=echo)
        parts += 1
    assert parts >= 9
    found = outcome(RUN)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []


def test_a_model_folder_that_is_damaged_lost_or_stale_is_written_again(place: Path) -> None:
    train(tiny(), translate=echo)
    wanted = outcome(RUN)
    (RUN / "model" / "tokenizer.json").write_bytes(b"{}")
    told = OnProgress()
    train(tiny(), reporter=told, translate=echo)
    assert outcome(RUN) == wanted
    assert any("tokenizer.json" in text and "written again" in text for text in told.messages)
    shutil.rmtree(RUN / "model")
    train(tiny(), translate=echo)
    assert outcome(RUN) == wanted


@pytest.mark.skipif(not HAS_PROC, reason="needs /proc to know the path of an open file")
def test_a_model_that_could_not_be_written_is_written_after_the_next_checkpoint(place: Path) -> None:
    train(tiny(), translate=echo)
    wanted = outcome(RUN)
    shutil.rmtree(RUN)
    struck: list[int] = []

    def before(number: int, operation: Operation) -> None:
        if ".tmp-" in operation.path.name and operation.path.name.startswith("model") and len(struck) < 20:
            struck.append(number)
            raise OSError(errno.EIO, "Input/output error")

    told = OnProgress()
    with Watch(place, before):
        train(tiny(training={"on_save_error": "continue"}), reporter=told, translate=echo)
    assert any("model" in text and "Training goes on" in text for text in told.messages)
    assert outcome(RUN)["model/model.safetensors"] == wanted["model/model.safetensors"]


@pytest.mark.skipif(not HAS_PROC, reason="needs /proc to know the path of an open file")
def test_what_is_old_goes_only_once_the_new_one_stands(place: Path) -> None:
    train(tiny(training={"max_steps": 6, "keep": 3}), translate=echo)
    before = [path.name for path in list_checkpoints(RUN / "checkpoints")]
    assert len(before) >= 3

    def full(number: int, operation: Operation) -> None:
        if operation.path.name.startswith("step-00000008.tmp-"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with Watch(place, full), pytest.raises(SaveError):
        train(tiny(training={"max_steps": 9, "keep": 3}, validation={"every_steps": 0}), translate=echo)
    assert [path.name for path in list_checkpoints(RUN / "checkpoints")] == before


def test_a_new_beginning_that_was_cut_off_is_completed(place: Path) -> None:
    train(tiny(training={"max_steps": 4}), translate=echo)
    partial = RUN / "previous-1.partial"
    partial.mkdir()
    (RUN / "checkpoints").rename(partial / "checkpoints")  # so far it came; metrics, model and the rest are left
    metrics = (RUN / "metrics.jsonl").read_bytes()
    told = OnProgress()
    result = train(tiny(training={"max_steps": 3}), reporter=told, translate=echo)
    assert result.step == 3
    assert any("previous-1" in text for text in told.messages)
    assert (RUN / "previous-1" / "metrics.jsonl").read_bytes() == metrics
    assert not partial.exists()
    for path in list_checkpoints(RUN / "previous-1" / "checkpoints"):
        verify_folder(path)


@pytest.mark.skipif(not HAS_PROC, reason="needs /proc to know the path of an open file")
def test_a_new_beginning_can_be_cut_off_anywhere(place: Path) -> None:
    train(tiny(training={"max_steps": 2}), translate=echo)
    shutil.copytree(RUN, place / "kept")
    old = (RUN / "metrics.jsonl").read_bytes()
    number = 0
    while True:
        faults = Faults(number, errno.EIO, lasting=True)
        folder = manyheads.training.run.loop.RunFolder(RUN)
        with Watch(place, faults), suppress(SaveError):
            folder.set_aside()
        train(tiny(training={"max_steps": 1}), translate=echo)
        found = [path.read_bytes() for path in RUN.glob("previous-*/metrics.jsonl")]
        if old in found:  # it had begun
            assert list(RUN.glob("previous-*/checkpoints/step-00000002"))
        else:
            assert (RUN / "checkpoints" / "step-00000002").is_dir()
        shutil.rmtree(RUN)
        shutil.copytree(place / "kept", RUN)
        if not faults.struck:
            break
        number += 1
    assert number > 5
