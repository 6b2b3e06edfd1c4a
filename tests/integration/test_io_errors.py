"""ENOSPC, EDQUOT, EIO, EROFS, EACCES at every operation of a save, of a run and of `prepare`; real full disks."""

import errno
import io
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from file_operations import HAS_PROC, Faults, Watch
from tiny_run import echo, outcome, tiny

import manyheads.training.record.log
import manyheads.training.run.loop
from manyheads.checkpoint.format import (
    find_latest,
    list_checkpoints,
    load_checkpoint,
    read_pointer,
    save_checkpoint,
    verify_checkpoint,
)
from manyheads.cli.main import guarded
from manyheads.data.language.prepared import TextData
from manyheads.data.language.preparing import prepare_text
from manyheads.data.language.texts import TextBlock
from manyheads.data.preparing import Holdout
from manyheads.data.translation.prepared import PreparedData
from manyheads.data.translation.preparing import PairList, prepare_corpus
from manyheads.errors import DataError, SaveError
from manyheads.models.pretrained import load
from manyheads.text.settings import TokenizerSettings, VocabularySettings
from manyheads.training.record.log import MetricsLog
from manyheads.training.record.recorder import write_samples
from manyheads.training.record.report import Sample, ValidationReport
from manyheads.training.run.checkpoints import CheckpointManager
from manyheads.training.run.clock import StopFlag
from manyheads.training.run.components import RunComponents, assemble
from manyheads.training.run.loop import train
from manyheads.training.run.resume import RunFolder

pytestmark = pytest.mark.skipif(not HAS_PROC, reason="needs /proc to know the path of an open file")

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES)
REPORT = ValidationReport(step=6, loss=1.0, samples=(Sample(source="a", text="c", reference="b"),))
RUN = "runs/tiny"
STRIDE = 15
"""Of the operations that are struck in `make test`, from a random one on; `make check-long` strikes all. It is odd, so
that errors that last and errors that pass take turns."""


class StopAfter(StopFlag):
    """A stop flag that is raised after some steps; reporter and flag in one."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps

    def step(self, report: Any) -> None:
        if report.step == self._steps:
            self.stop()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk with a run that was stopped after 4 of 9 steps, with checkpoints of steps 2, 3 (the best) or 4."""
    disk = tmp_path_factory.mktemp("base") / "disk"
    disk.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(disk)
        flag = StopAfter(4)
        patch.setattr(manyheads.training.run.loop, "StopFlag", lambda: flag)
        train(tiny(), reporter=flag, translate=echo)
    return disk


@pytest.fixture(scope="module")
def components(base: Path) -> RunComponents:
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        return assemble(tiny(), torch.device("cpu"), base / RUN / "data")


class Saving:
    """Saves of all kinds in a copy of the base run, in one process."""

    def __init__(self, base: Path, components: RunComponents, place: Path, policy: str) -> None:
        shutil.copytree(base, place)
        self.folder = RunFolder(place / RUN)
        objective = copy(components.objective)
        training = replace(objective.config.training, on_save_error=policy)
        objective.config = replace(objective.config, training=training)
        self._components = replace(components, objective=objective, counters=replace(components.counters))
        self.told: list[str] = []
        self._metrics = MetricsLog(self.folder.metrics)
        self._keeper = CheckpointManager(self._components, self.folder, self._metrics, self.told.append)
        self._keeper.resume("auto")
        self.told.clear()

    def save(self, step: int) -> None:
        """What a training loop writes at a step that was validated and is the best."""
        counters = self._components.counters
        counters.step = counters.best_step = counters.validated_step = step
        self._metrics.append({"step": step})
        self._keeper.save_model()
        write_samples(self.folder.samples / f"step-{step}.txt", REPORT)
        self._keeper.save(must=False)


def check_message(text: str, place: Path, code: int) -> None:
    assert "\n" not in text
    assert str(place) in text
    assert os.strerror(code) in text
    assert "bytes are free" in text
    assert "(0 bytes" not in text


def one_save(base: Path, components: RunComponents, place: Path, faults: Faults, policy: str) -> bool:
    """A save with faults, then a good one. Returns: whether the first was refused (or its failure told)."""
    saving = Saving(base, components, place, policy)
    run = saving.folder.path
    before = {path.name: (path / "manifest.json").read_bytes() for path in list_checkpoints(saving.folder.checkpoints)}
    refused = []
    with Watch(place, faults):
        try:
            saving.save(6)
        except SaveError as error:
            refused.append(str(error))
    refused += saving.told
    assert faults.struck, "nothing was struck"
    for text in refused:
        check_message(text.removesuffix(" Training goes on."), place, faults.code)
    newest, skipped = find_latest(saving.folder.checkpoints)
    assert newest is not None
    assert not skipped
    after = {path.name: (path / "manifest.json").read_bytes() for path in list_checkpoints(saving.folder.checkpoints)}
    assert set(list(before)[-1:]) <= set(after)
    for name, manifest in after.items():
        verify_checkpoint(saving.folder.checkpoints / name)
        assert before.get(name, manifest) == manifest
    if "step-00000006" not in after:
        assert after == before, "an older checkpoint is gone, and there is no new one"
        assert refused, "the checkpoint was not written, and nothing was said"
    load(run / "model")
    saving.save(8)
    assert read_pointer(saving.folder.checkpoints, "latest") == saving.folder.checkpoints / "step-00000008"
    assert load_checkpoint(saving.folder.checkpoints / "step-00000008").step == 8
    assert [path for path in run.rglob("*.tmp-*") if "data" not in path.parts] == []
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    assert lines[-3:] == ['{"step": 6}', '{"step": 8}', ""]
    shutil.rmtree(place)
    return bool(refused)


def count_operations(base: Path, components: RunComponents, place: Path) -> int:
    saving = Saving(base, components, place, "stop")
    with Watch(place) as watch:
        saving.save(6)
    kinds = {operation.kind for operation in watch.operations}
    assert kinds >= {"create", "write", "fsync", "rename", "swap", "mkdir", "unlink", "rmdir", "open"}
    return watch.count


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_an_error_at_each_operation_of_a_save(base, components, tmp_path, policy):
    count = count_operations(base, components, tmp_path / "count")
    struck = range(random.randrange(STRIDE), count, STRIDE)
    refused = 0
    for number in struck:
        faults = Faults(number, ERRORS[number % 5], lasting=number % 2 == 0)
        refused += one_save(base, components, tmp_path / "disk", faults, policy)
    assert refused > len(struck) // 3


@pytest.mark.slow
def test_every_error_at_every_operation_of_a_save(base, components, tmp_path, figure):
    count = count_operations(base, components, tmp_path / "count")
    cases = refused = 0
    for number in range(count):
        for code in ERRORS:
            for lasting in (False, True):
                policy = "continue" if (number + code + lasting) % 2 else "stop"
                faults = Faults(number, code, lasting=lasting)
                refused += one_save(base, components, tmp_path / "disk", faults, policy)
                cases += 1
    figure(
        "R3",
        "five errors, passing and lasting, at every operation of a save",
        operations=count,
        cases=cases,
        refused_or_told=refused,
        survived_by_what_was_cleaning_up=cases - refused,
        older_checkpoints_lost=0,
        tracebacks=0,
        stray_folders_after_the_next_save=0,
    )


def one_run(
    base: Path, place: Path, faults: Faults, policy: str, wanted: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> bool:
    """A run that goes on from step 4 under faults, through the command's own error handling, then once more without."""
    shutil.copytree(base, place)
    config = tiny(training={"on_save_error": policy, "plots": False})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        with Watch(place, faults):
            code = guarded(lambda: train(config, translate=echo) and 0)
        told = capsys.readouterr()
        assert code in (0, 2)
        assert "Traceback" not in told.err + told.out
        if code:
            assert told.err.startswith("manyheads: ")
            assert told.err.count("\n") == 1
            assert os.strerror(faults.code) in told.err
        for path in list_checkpoints(place / RUN / "checkpoints"):
            verify_checkpoint(path)
        again = guarded(lambda: train(tiny(), translate=echo) and 0)
        assert again == 0, capsys.readouterr().err
        found = outcome(place / RUN)
        assert [name for name in wanted if found.get(name) != wanted[name]] == []
        assert found.keys() == wanted.keys()
        assert list((place / RUN).rglob("*.tmp-*")) == []
    shutil.rmtree(place)
    return code != 0


def whole_run(base: Path, place: Path) -> tuple[int, dict[str, bytes]]:
    """How many operations the rest of the run has, and how it ends."""
    shutil.copytree(base, place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        with Watch(place) as watch:
            train(tiny(), translate=echo)
        return watch.count, outcome(place / RUN)


def test_an_error_anywhere_in_a_run(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count, wanted = whole_run(base, tmp_path / "whole")
    for number in sorted(random.sample(range(count), 3)):
        faults = Faults(number, random.choice(ERRORS), lasting=random.random() < 0.3)
        try:
            one_run(base, tmp_path / "disk", faults, random.choice(["stop", "continue"]), wanted, capsys)
        except Exception as error:
            raise AssertionError(f"{faults.code} at {faults.struck[:1]}: {error}") from error


@pytest.mark.slow
def test_an_error_at_every_operation_of_a_run(base, tmp_path, capsys, figure):
    count, wanted = whole_run(base, tmp_path / "whole")
    ended = 0
    for number in range(count):
        faults = Faults(number, ERRORS[number % 5], lasting=number % 7 == 0)
        try:
            ended += one_run(base, tmp_path / "disk", faults, ("stop", "continue")[number % 2], wanted, capsys)
        except Exception as error:
            raise AssertionError(f"{faults.code} at {number}, {faults.struck[:1]}: {error}") from error
    figure(
        "R3",
        "an error at every operation of a run, from start-up to the end, then the same command again",
        operations=count,
        ended_with_exit_code_2=ended,
        went_on=count - ended,
        tracebacks=0,
        unequal_in_the_end=0,
    )


def prepare(folder: Path, word: str, task: str) -> None:
    if task == "lm":
        text = TextBlock("test", f"{word} a b\n".encode() * 5)
        words = VocabularySettings(level="words", documents="lines")
        prepare_text(folder, train=text, vocabulary=words, holdout=Holdout(valid=12), replace=True)
        return
    pairs = PairList("test", [(f"{word} a b", f"{word} c")] * 5)
    prepare_corpus(
        folder, train=pairs, valid=pairs, tokenizer=TokenizerSettings(kind="word", vocab_size=16), replace=True
    )


def prepared_word(folder: Path, task: str) -> tuple[str, str]:
    """The digest of a prepared folder, which must be whole, and the first word of its validation data."""
    if task == "lm":
        text = TextData.open(folder)
        assert text.valid is not None
        return text.digest, text.vocabulary.decode(text.valid.ids.tolist()).split(" ")[0]
    pairs = PreparedData.open(folder)
    return pairs.digest, pairs.valid_text[0][0].split(" ")[0]


def one_preparation(place: Path, faults: Faults, task: str) -> bool:
    """Returns: whether it was refused."""
    place.mkdir()
    folder = place / "prepared"
    prepare(folder, "old", task)
    digest, _ = prepared_word(folder, task)
    refused = ""
    with Watch(place, faults):
        try:
            prepare(folder, "new", task)
        except (SaveError, DataError) as error:  # it also reads back what it wrote
            refused = str(error)
    assert "\n" not in refused
    assert not refused or (os.strerror(faults.code) in refused and str(place) in refused)
    found, word = prepared_word(folder, task)
    assert found == digest or word == "new", "the older folder was lost"
    assert refused or found != digest
    prepare(folder, "new", task)
    assert prepared_word(folder, task)[1] == "new"
    assert [path.name for path in place.iterdir()] == ["prepared"]
    shutil.rmtree(place)
    return bool(refused)


def prepared_operations(place: Path, task: str) -> int:
    place.mkdir()
    prepare(place / "prepared", "old", task)
    with Watch(place) as watch:
        prepare(place / "prepared", "new", task)
    return watch.count


@pytest.mark.parametrize("task", ["translation", "lm"])
def test_an_error_at_each_operation_of_a_preparation(tmp_path: Path, task: str) -> None:
    count = prepared_operations(tmp_path / "count", task)
    for number in range(random.randrange(STRIDE), count, STRIDE):
        one_preparation(tmp_path / "disk", Faults(number, ERRORS[number % 5], lasting=number % 4 == 0), task)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["translation", "lm"])
def test_every_error_at_every_operation_of_a_preparation(tmp_path, task, figure):
    count = prepared_operations(tmp_path / "count", task)
    cases = [(number, code, lasting) for number in range(count) for code in ERRORS for lasting in (False, True)]
    refused = sum(
        one_preparation(tmp_path / "disk", Faults(number, code, lasting=lasting), task)
        for number, code, lasting in cases
    )
    figure(
        "R3",
        f"five errors, passing and lasting, at every operation of `prepare`, {task}",
        operations=count,
        cases=len(cases),
        refused=refused,
        older_folders_lost=0,
        tracebacks=0,
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB of our own."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "manyheads-test", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which("mount") else None
    if done is None or done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip() if done else 'there is no mount'}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def save(step: int) -> None:
        save_checkpoint(small_disk / "checkpoints", step, {"model": {"w": torch.zeros(60_000)}}, {})

    with pytest.raises(SaveError, match=r"No space left .* bytes are needed, \d+ bytes are free"):
        save(1)
    monkeypatch.setattr("manyheads.files.commit.free_bytes", lambda path: -1)  # begin all the same
    for step in (1, 2, 3, 4):
        save(step)
    with pytest.raises(SaveError, match=r"step-00000005: No space left on device .*free space unknown"):
        save(5)
    assert sorted(path.name for path in (small_disk / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in (1, 2, 3, 4)
    ]
    for step in (1, 2, 3, 4):
        load_checkpoint(small_disk / "checkpoints" / f"step-{step:08d}")


def test_a_run_on_a_disk_that_is_too_small_does_not_begin_unless_it_must(small_disk, monkeypatch, corpus_beside):
    config = tiny(run_dir=str(small_disk / "run"), data={"path": str(corpus_beside)})
    told: list[Any] = []

    class Teller:
        def message(self, text: str, level: str = "info") -> None:
            told.append(text)

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args: told.append(name) if name == "step" else None

    with pytest.raises(SaveError, match=r"bytes are free.*with training.on_save_error continue the run begins anyway"):
        train(config, reporter=Teller(), translate=echo)
    assert "step" not in told
    forced = replace(config, training=replace(config.training, on_save_error="continue"))
    with pytest.raises(SaveError, match="No space left"):  # the last checkpoint must be written
        train(forced, reporter=Teller(), translate=echo)
    assert told.count("step") == 9
    assert any("Training goes on" in text for text in told)
    assert all("\n" not in text for text in told)


@pytest.fixture
def corpus_beside(base: Path) -> Path:
    return next((base / RUN / "data").glob("copy-task-*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_logs_on_a_full_device(tmp_path: Path, corpus_beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = manyheads.training.record.log.open_to_append

    def on_a_full_device(path: Path) -> io.FileIO:
        return io.FileIO("/dev/full", "a") if path.name == "train.log" else real_open(path)

    monkeypatch.setattr(manyheads.training.record.log, "open_to_append", on_a_full_device)
    config = tiny(run_dir=str(tmp_path / "run"), data={"path": str(corpus_beside)}, training={"max_steps": 4})
    told: list[str] = []

    class Teller:
        def message(self, text: str, level: str = "info") -> None:
            told.append(text)

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args: None

    assert train(config, reporter=Teller(), translate=echo).step == 4
    assert [text for text in told if "train.log" in text] == [
        f"{tmp_path / 'run' / 'train.log'} cannot be written (No space left on device); its lines are lost."
    ]
    with pytest.raises(SaveError, match="No space left"):
        MetricsLog(tmp_path / "train.log").append({"step": 1})


def test_a_line_that_was_refused_is_written_with_the_next(tmp_path: Path) -> None:
    """Also if a part of it got through."""
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1})
    with Watch(tmp_path, Faults(1, errno.ENOSPC)), pytest.raises(SaveError, match="No space left"):
        log.append({"step": 2})
    with log.path.open("ab") as file:
        file.write(b'{"st')
    log.append({"step": 3})
    assert log.path.read_text(encoding="utf-8") == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert log.num_bytes() == 36


def test_what_cannot_be_drawn_or_boarded_never_ends_a_run(tmp_path: Path, corpus_beside: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("plots", "tensorboard"):
        (run / name).write_text("a file, where a folder should be", encoding="utf-8")
    config = tiny(
        run_dir=str(run),
        data={"path": str(corpus_beside)},
        training={"max_steps": 4, "plots": True, "tensorboard": True},
    )
    assert train(config, translate=echo).step == 4
    log = (run / "train.log").read_text(encoding="utf-8")
    assert log.count("No learning curve") == 1
    assert log.count("No more TensorBoard files") == 1
