"""Batches that a thread makes in advance: the same run, however it is interrupted, and no thread after it."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import TINY_TEXT, changed

from manyheads.data.batch import PairBatch
from manyheads.data.translation.batches import TrainingStream
from manyheads.errors import DataError
from manyheads.nn.kernels import modes, policy
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.run.loop import train
from manyheads.training.run.objective import Batches
from manyheads.training.run.step import TrainStep

Make = Callable[..., TrainConfig]
CPU = torch.device("cpu")


class Rows:
    """A stream with epochs of 3, 4, 5, ... rows. made: the threads and the places of its batches."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int, float]] = []
        self.threads: set[str] = set()
        self.counted: list[int] = []

    def rows(self, epoch: int) -> int:
        self.counted.append(epoch)
        return 3 + epoch

    def at(self, epoch: int, row: int, progress: float = 1.0) -> list[Any]:
        self.made.append((epoch, row, progress))
        self.threads.add(threading.current_thread().name)
        if (epoch, row) == (2, 1):
            raise DataError("row 1 of epoch 2 is damaged.")
        return [epoch, row]


def places(first: tuple[int, int, int], count: int) -> list[tuple[int, int, int]]:
    found = [first]
    while len(found) < count:
        epoch, row, step = found[-1]
        found.append((epoch, row + 1, step + 1) if row + 1 < 3 + epoch else (epoch + 1, 0, step + 1))
    return found


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_batches_come_in_order_from_any_row(ahead: int) -> None:
    for first in places((0, 0, 0), 7):
        stream = Rows()
        batches = Batches(stream, lambda step: step / 10, CPU, ahead)
        wanted = [one for one in places(first, 7) if one[:2] < (2, 1)]
        assert [batches.at(*place) for place in wanted] == [[epoch, row] for epoch, row, _ in wanted]
        batches.close()
        count = len(wanted)
        assert stream.made[:count] == [(epoch, row, step / 10) for epoch, row, step in wanted]
        assert len(stream.made) <= count + ahead
        assert all("batches" in name for name in stream.threads) is bool(ahead)
        # An epoch is planned by the thread, with its first batch: the loop does not ask for it before.
        assert set(stream.counted) <= ({place[0] for place in wanted} if ahead else set())


def test_another_place_than_the_next_one_throws_away_what_was_made() -> None:
    stream = Rows()
    batches = Batches(stream, float, CPU, 2)
    for place in [(0, 0, 0), (0, 1, 1), (1, 1, 4), (0, 0, 0), (0, 0, 7)]:
        assert batches.at(*place) == list(place[:2])
    assert stream.made[-1][2] in (7.0, 8.0, 9.0)
    batches.close()
    assert [thread for thread in threading.enumerate() if thread.name.startswith("batches")] == []


def test_an_error_of_the_thread_is_told_at_its_row_and_not_before() -> None:
    batches = Batches(Rows(), float, CPU, 4)
    assert batches.at(1, 3, 0) == [1, 3]
    assert batches.at(2, 0, 1) == [2, 0]
    with pytest.raises(DataError, match="row 1 of epoch 2 is damaged"):
        batches.at(2, 1, 2)
    batches.close()


def _files(run: Path) -> dict[str, bytes]:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return {
        **{path.name: path.read_bytes() for path in newest.glob("*.safetensors")},
        "metrics": (run / "metrics.jsonl").read_bytes(),
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["pairs", "text"])
def test_a_run_that_is_killed_at_any_row_has_the_bytes_of_one_without_a_thread(small, tmp_path, kind, monkeypatch):
    """Over the ends of epochs; the text has shorter segments at first, by the progress in steps."""
    if kind == "pairs":
        config: Any = small(training={"max_steps": 6, "save_every": 1}, data={"num_train_pairs": 60, "accumulate": 2})
    else:
        schedule = {"length_schedule": ("8=0.4", "16=1"), "segment_len": 16, "segment_lengths": "fixed"}
        without = changed(TINY_TEXT, model={"memory_len": 0})  # a memory continues lanes of one length
        config = changed(without, training={"max_steps": 6, "save_every": 1}, data=schedule)
    whole = replace(config, run_dir=str(tmp_path / "whole"))
    result = train(whole)
    wanted = _files(Path(whole.run_dir))
    monkeypatch.setattr(policy, "steps_made_ahead", lambda device: 4)
    run, killed = TrainStep.run, set()

    def until_killed(self: TrainStep, batches: Any, step: int, rate: float) -> Any:
        assert [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
        if step not in killed:
            killed.add(step)
            raise KeyboardInterrupt
        return run(self, batches, step, rate)

    monkeypatch.setattr(TrainStep, "run", until_killed)
    config = replace(config, run_dir=str(tmp_path / "killed"))
    for _ in range(6):
        with pytest.raises(KeyboardInterrupt):
            train(config)
        assert [thread for thread in threading.enumerate() if thread.name.startswith("batches")] == []
    assert train(config).epoch == result.epoch >= (kind == "pairs")
    assert _files(Path(config.run_dir)) == wanted


def test_an_error_of_the_data_ends_the_run_as_without_a_thread(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    at = TrainingStream.at

    def damaged(self: TrainingStream, epoch: int, row: int, progress: float = 1.0) -> Any:
        if row == 2:
            raise DataError("Cannot read the pairs: the disk is failing.")
        return at(self, epoch, row, progress)

    monkeypatch.setattr(TrainingStream, "at", damaged)
    monkeypatch.setattr(policy, "steps_made_ahead", lambda device: 4)
    steps: list[int] = []
    run = TrainStep.run
    monkeypatch.setattr(TrainStep, "run", lambda self, *given: (steps.append(given[1]), run(self, *given))[1])
    with pytest.raises(DataError, match=r"^Cannot read the pairs: the disk is failing\.$"):
        train(small(training={"max_steps": 9}))
    assert steps == [1, 2]
    assert [thread for thread in threading.enumerate() if thread.name.startswith("batches")] == []


def test_a_schedule_by_the_clock_makes_nothing_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of a later step is not known."""
    made: list[int] = []
    init = Batches.__init__

    def noted(self: Batches, stream: Any, progress: Any, device: Any, ahead: int) -> None:
        made.append(ahead)
        init(self, stream, progress, device, ahead)

    monkeypatch.setattr(Batches, "__init__", noted)
    monkeypatch.setattr(policy, "steps_made_ahead", lambda device: 4)
    config = replace(TINY_TEXT, run_dir=str(tmp_path / "run"))
    for minutes, schedule in ((0.0, ("8=0.4", "16=1")), (60.0, ("8=0.4", "16=1")), (60.0, ())):
        data = {"length_schedule": schedule, "segment_len": 16, "segment_lengths": "fixed"}
        training = {"max_steps": 1, "max_minutes": minutes}
        train(changed(config, model={"memory_len": 0}, training=training, data=data), resume="none")
    assert made == [4, 0, 4]


def test_only_a_card_that_was_tried_makes_batches_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps() -> list[int]:
        return [policy.steps_made_ahead(torch.device(name)) for name in ("cpu", "meta", "mps", "cuda")]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with modes.fast():
        assert steps() == [0, 0, 0, 0]
        with modes.saving_launches():
            assert steps() == [0, 0, 0, 4]
        monkeypatch.setattr(policy, "_PROVEN", {((9, 0), torch.__version__)})
        assert steps() == [0, 0, 0, 4]


def test_pinned_batches_are_copies_of_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x.clone())
    monkeypatch.setattr(policy, "pinning", lambda device: nullcontext())
    batch = PairBatch.of(torch.tensor([[5, 2]]), torch.tensor([[1, 6, 2]]))
    stream = Rows()
    monkeypatch.setattr(stream, "at", lambda *place: [batch])
    batches = Batches(stream, float, CPU, 1)
    (pinned,) = batches.at(0, 0, 0)
    batches.close()
    for name, value in vars(batch).items():
        mine = getattr(pinned, name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(mine, value), name
            assert mine is not value, name
        else:
            assert mine == value, name
