"""A run folder that somebody sent: no run writes through its links or to its pipes and devices, and none waits."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from manyheads.cli.main import guarded
from manyheads.errors import ConfigError, SaveError
from manyheads.extras.planning.first_step import first_step
from manyheads.files.commit import temporary_name
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.record.log import LogFile, MetricsLog
from manyheads.training.run.loop import train
from manyheads.training.run.resume import RunFolder

Make = Callable[..., TrainConfig]

KEPT = "a thesis\n"
IN_PLACE = (".lock", "train.log", "metrics.jsonl", "timing.jsonl")
FOLDERS = ("samples", "plots", "tensorboard", "checkpoints", "data", "previous-1.partial")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A file of the user's, outside the run folder."""
    path = tmp_path / "home" / "thesis.txt"
    path.parent.mkdir()
    path.write_text(KEPT, encoding="utf-8")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def unharmed(kept: Path) -> bool:
    return [path.name for path in kept.parent.iterdir()] == [kept.name] and kept.read_text(encoding="utf-8") == KEPT


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_link_in_place_of_a_file_is_refused_before_anything_is_written(run: Path, kept: Path, name: str) -> None:
    (run / name).symlink_to(kept)
    message = f"{run / name} is refused, since a run writes to it: it is a symbolic link, not a regular file; remove it"
    with pytest.raises(ConfigError, match=message):
        RunFolder(run).create()
    assert [path.name for path in run.iterdir()] == [name]
    (run / name).unlink()
    (run / name).symlink_to(kept.parent / "new.txt")
    with pytest.raises(ConfigError, match=message):
        RunFolder(run).create()
    assert unharmed(kept)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_link_in_place_of_a_folder_is_refused(run: Path, kept: Path, name: str) -> None:
    (run / name).symlink_to(kept.parent)
    with pytest.raises(ConfigError, match=f"{name} is refused, since a run writes to it: it is a symbolic link"):
        RunFolder(run).create()
    assert unharmed(kept)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_pipe_is_not_waited_for(run: Path, name: str) -> None:
    os.mkfifo(run / name)
    with pytest.raises(ConfigError, match=f"{name} is refused, since a run writes to it: it is a named pipe"):
        RunFolder(run).create()


def test_training_there_ends_with_one_sentence(small, run, kept, capsys):
    (run / ".lock").symlink_to(kept)
    config = small()
    assert Path(config.run_dir) == run
    for start in (train, first_step):
        assert guarded(lambda start=start: start(config)) == 2  # type: ignore[misc]
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert str(run / ".lock") in said
        assert "choose another folder" in said
    assert unharmed(kept)
    assert [path.name for path in run.iterdir()] == [".lock"]


def test_what_was_put_there_later_is_refused_too(run: Path, kept: Path, tmp_path: Path) -> None:
    """Each file is checked once more when it is opened."""
    for name in IN_PLACE:
        (run / name).symlink_to(kept)
    with pytest.raises(SaveError, match=r"Cannot save .*\.lock: it is a symbolic link"), RunFolder(run).locked():
        pass
    with pytest.raises(SaveError, match=r"train\.log: it is a symbolic link, not a regular file; remove it, or choose"):
        LogFile(run / "train.log", lambda text: None)
    for name in ("metrics.jsonl", "timing.jsonl"):
        log = MetricsLog(run / name)
        for write in (lambda log=log: log.append({"step": 1}), lambda log=log: log.cut(0)):  # type: ignore[misc]
            with pytest.raises(SaveError, match=f"{name}: it is a symbolic link"):
                write()
    assert unharmed(kept)


def test_the_run_folder_itself_may_be_a_link(tmp_path: Path, small: Make) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    config = small(training={"max_steps": 1})
    assert train(config).step == 1
    assert (tmp_path / "disk" / "checkpoints" / "step-00000001").is_dir()
    assert (tmp_path / "run").is_symlink()


def test_links_in_place_of_what_is_renamed_are_replaced(small: Make, run: Path, kept: Path) -> None:
    """Settings, pointers, samples and the model; the files that are written aside first have names of their own."""
    (run / "checkpoints").mkdir()
    (run / "samples").mkdir()
    samples, model = run / "samples" / "step-3.txt", run / "model"
    files = [run / "config.yaml", run / "environment.json", run / "checkpoints" / "latest", samples]
    for path in files:
        path.symlink_to(kept)
        temporary_name(path).symlink_to(kept)
    model.symlink_to(kept.parent)
    temporary_name(model).symlink_to(kept.parent)
    (run / "checkpoints" / "best").symlink_to("/dev/zero")
    config = small(training={"max_steps": 3}, validation={"every_steps": 3, "bleu_sentences": 2, "num_samples": 1})
    assert train(config, translate=lambda texts, stop: texts).step == 3
    assert unharmed(kept)
    for path in (*files, run / "checkpoints" / "best"):
        assert path.is_file(), path
        assert not path.is_symlink(), path
    assert (model / "config.json").is_file()
    assert not model.is_symlink()
    assert not list(run.rglob("*.tmp-*"))


def test_a_model_link_that_leads_nowhere_is_replaced(small: Make, run: Path, tmp_path: Path) -> None:
    (run / "model").symlink_to(tmp_path / "nowhere")
    train(small(training={"max_steps": 1}))
    assert (run / "model" / "config.json").is_file()
    assert not (tmp_path / "nowhere").exists()


def test_an_earlier_run_is_not_set_aside_into_a_link(run: Path, kept: Path) -> None:
    (run / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    (run / "previous-1").symlink_to(kept.parent / "nothing")
    assert RunFolder(run).set_aside() == run / "previous-2"
    assert (run / "previous-2" / "metrics.jsonl").is_file()
    assert unharmed(kept)


def test_files_of_the_user_stay_where_an_earlier_run_is_set_aside(run: Path) -> None:
    own = ("notes.txt", "corpus", "data", "previous-0")
    for name in ("corpus", "data", "checkpoints", "model"):
        (run / name).mkdir()
    for name in ("notes.txt", "previous-0", "metrics.jsonl", "config.yaml", "nonfinite-step-3.json"):
        (run / name).write_text(KEPT, encoding="utf-8")
    aside = RunFolder(run).set_aside()
    moved = ["checkpoints", "config.yaml", "metrics.jsonl", "model", "nonfinite-step-3.json"]
    assert sorted(path.name for path in aside.iterdir()) == moved
    assert {path.name for path in run.iterdir()} == {*own, aside.name}


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not UTF-8"):
        RunFolder(tmp_path / "\udcff").check()
