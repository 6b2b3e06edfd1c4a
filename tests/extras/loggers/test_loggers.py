"""Loggers of other packages, by stand-ins of the same signatures; `make check-loggers` has the packages themselves."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from manyheads.catalogue import LOGGERS
from manyheads.errors import ConfigError, MissingExtraError
from manyheads.training.record.log import Callbacks
from manyheads.training.record.report import RunStart, TrainResult

NAMES = ("wandb", "mlflow", "trackio")
LINES: list[dict[str, Any]] = [
    {"step": 2, "train_loss": 2.5, "epoch": 0},
    {"step": 4, "valid_nll": float("inf"), "best": True, "bleu": 1.5, "bleu_signature": "nrefs:1"},
]
CONFIG = {"seed": 1, "model": {"d_model": 16, "norm_position": "x" * 600}}


class Board:
    """What the stand-ins of the three packages store: run -> its numbers, and how it ended."""

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.config: dict[str, dict[str, Any]] = {}
        self.ended: dict[str, Any] = {}
        self.deleted: set[str] = set()
        self.key: str | None = "a key"
        self.fails = False

    def begin(self, name: str, config: Mapping[str, Any] | None) -> str:
        if self.fails:
            raise OSError("no route to host\nand more lines")
        if name in self.deleted:
            raise ValueError(f"{name} was deleted")
        self.runs.setdefault(name, [])
        self.config.setdefault(name, dict(config or {}))
        return name

    def add(self, name: str, step: int, numbers: Mapping[str, float]) -> None:
        if self.fails:
            raise OSError("connection lost")
        self.runs[name].append((step, dict(numbers)))


def wandb(board: Board) -> Any:
    def init(
        *, project: str, name: str, dir: str, config: dict[str, Any], id: str | None, resume: str | None, reinit: str,
        settings: Any,
    ) -> Any:  # fmt: skip
        assert (Path(dir).is_dir(), resume, reinit) == (True, "allow" if id else None, "create_new")
        assert settings == {"console": "off"}
        identity = board.begin(id or f"w{len(board.runs)}", config)

        def log(data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            board.add(identity, data.pop("step"), data)

        def finish(exit_code: int | None = None) -> None:
            board.ended[identity] = exit_code == 0

        def define_metric(name: str, step_metric: str | None = None) -> None:
            assert (name, step_metric) == ("*", "step")

        return SimpleNamespace(id=identity, log=log, finish=finish, define_metric=define_metric)

    mode = SimpleNamespace(settings=SimpleNamespace(mode="online"))
    api = SimpleNamespace(api_key=board.key)
    return SimpleNamespace(init=init, setup=lambda: mode, api=api, Settings=lambda **given: given)


def mlflow(board: Board) -> Any:
    class MlflowClient:
        def get_experiment_by_name(self, name: str) -> Any:
            assert name == "manyheads"

        def create_experiment(self, name: str) -> str:
            return "1"

        def create_run(self, experiment_id: str, run_name: str | None = None) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id=board.begin(f"m{len(board.runs)}", {})))

        def get_run(self, run_id: str) -> Any:
            stage = "deleted" if run_id in board.deleted else "active"
            return SimpleNamespace(info=SimpleNamespace(lifecycle_stage=stage))

        def update_run(self, run_id: str, status: str | None = None) -> None:
            assert status == "RUNNING"

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            assert len(params) <= 100
            board.config[run_id] |= dict(params)
            for name, value, timestamp, step in metrics:
                assert timestamp > 1e12  # milliseconds
                board.add(run_id, step, {name: value})

        def set_terminated(self, run_id: str, status: str | None = None) -> None:
            board.ended[run_id] = status == "FINISHED"

    def param(key: str, value: str) -> tuple[str, str]:
        assert len(value) <= 500
        return key, value

    entities = SimpleNamespace(Param=param, Metric=lambda *values: values)
    return SimpleNamespace(MlflowClient=MlflowClient, entities=entities)


def trackio(board: Board) -> Any:
    def init(
        project: str, name: str | None = None, config: dict[str, Any] | None = None, resume: str = "never",
        embed: bool = True,
    ) -> Any:  # fmt: skip
        print("Trackio project initialized")
        assert name is not None
        assert (resume == "must") == (name in board.runs or name in board.deleted)
        assert not embed
        board.begin(name, config)

        def finish() -> None:
            board.ended[name] = True

        return SimpleNamespace(log=lambda metrics, step=None: board.add(name, step, metrics), finish=finish)

    return SimpleNamespace(init=init)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    stored = Board()
    for name, make in (("wandb", wandb), ("mlflow", mlflow), ("trackio", trackio)):
        module = ModuleType(name)
        module.__dict__.update(vars(make(stored)))
        monkeypatch.setitem(sys.modules, name, module)
    return stored


@pytest.fixture
def begun(tmp_path: Path) -> Callable[..., Callbacks]:
    """Begins the callbacks of a run at a step, and gives the lines from there."""

    def begin(*names: str, step: int = 0, ends: bool = True, on_progress: list[str] | None = None) -> Callbacks:
        found = Callbacks(names, (on_progress if on_progress is not None else []).append)
        start = RunStart(
            run_dir=tmp_path, device="cpu", precision="fp32", num_parameters=1, data="", step=step, max_steps=4,
            max_minutes=0.0, config=CONFIG,
        )  # fmt: skip
        try:
            found.call("on_start", start)
            for line in LINES[step // 2 :]:
                found.call("on_log", line)
            if ends:
                result = TrainResult(
                    run_dir=tmp_path, step=4, epoch=0, tokens=1, elapsed_seconds=1.0, stopped_by="steps",
                    signal_number=None, checkpoint=None, model_dir=None, best_step=None, best_score=None,
                )  # fmt: skip
                found.call("on_end", result)
        finally:
            found.close()
        return found

    return begin


def ids(tmp_path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((tmp_path / "loggers.json").read_text("utf-8"))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_stored_and_a_resume_goes_on(name, board, begun, tmp_path, capsys):
    begun(name)
    [run] = board.runs
    assert ids(tmp_path) == {name: run}
    merged = [(step, key, value) for step, numbers in board.runs[run] for key, value in numbers.items()]
    assert merged == [(2, "train_loss", 2.5), (2, "epoch", 0), (4, "best", True), (4, "bleu", 1.5)]
    assert board.ended == {run: True}
    assert {"model", "model.d_model"} & board.config[run].keys()
    begun(name, step=2)
    assert list(board.runs) == [run]
    assert [step for step, _ in board.runs[run]][-1] == 4
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_run_that_fails_is_marked_there(name: str, board: Board, begun: Any) -> None:
    begun(name, ends=False)
    assert list(board.ended.values()) == [False]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_there_that_was_deleted(name: str, board: Board, begun: Any, tmp_path: Path) -> None:
    begun(name)
    board.deleted = {*board.runs}
    [run] = board.runs
    with pytest.raises(ConfigError, match=rf"The logger {name} cannot continue its run {run}: .*deleted.*loggers.json"):
        begun(name, step=2)
    (tmp_path / "loggers.json").unlink()
    begun(name, step=2)
    assert len(board.runs) == 2


@pytest.mark.parametrize("name", NAMES)
def test_without_a_network_or_a_login(name: str, board: Board, begun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    board.fails = True
    with pytest.raises(ConfigError, match=rf"^The logger {name} cannot begin: no route to host\. [A-Z].*\.$"):
        begun(name)
    monkeypatch.setattr(sys.modules["wandb"], "api", SimpleNamespace(api_key=None))
    with pytest.raises(ConfigError, match=r"there is no API key. Log in with `wandb login`"):
        begun("wandb")
    assert board.runs == {}


def test_two_loggers_of_which_one_fails(board: Board, begun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: Any, **others: Any) -> None:
        raise OSError("connection lost")

    monkeypatch.setattr(sys.modules["mlflow"].MlflowClient, "set_terminated", lost)
    monkeypatch.setattr(sys.modules["mlflow"].entities, "Metric", lost)
    told: list[str] = []
    begun("mlflow", "trackio", on_progress=told)
    assert len(told) == 1
    assert told[0].startswith("The callback mlflow failed in on_log (OSError: connection lost) and is off")
    [stored] = [numbers for name, numbers in board.runs.items() if not name.startswith("m")]
    assert len(stored) == 2


@pytest.mark.parametrize("name", NAMES)
def test_one_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"The logger {name} needs the package {name}: pip install"):
        LOGGERS[name]()


def test_a_damaged_record(board: Board, begun: Any, tmp_path: Path) -> None:
    (tmp_path / "loggers.json").write_text("{", "utf-8")
    with pytest.raises(ConfigError, match=r"loggers.json cannot be read: .* Remove it"):
        begun("trackio")
