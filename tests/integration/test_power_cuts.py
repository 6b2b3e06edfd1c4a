"""All changes that a training run makes on disk are recorded; a crash after any of them leaves a run that goes on."""

import hashlib
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from crash_states import LOSSES, Disk, write_out
from file_operations import HAS_PROC, Operation, Watch
from tiny_run import choose_checkpoint, echo, outcome, tiny
from write_order import check_metrics, check_order, commits

from manyheads.checkpoint.format import list_checkpoints, step_of, verify_checkpoint
from manyheads.config.files import load_yaml
from manyheads.data.translation.prepared import PreparedData
from manyheads.files.verify import MANIFEST
from manyheads.models.pretrained import load
from manyheads.training.run.checkpoints import CheckpointManager
from manyheads.training.run.loop import train

pytestmark = pytest.mark.skipif(not HAS_PROC, reason="needs /proc to know the path of an open file")

RUN = "runs/tiny"
FAST_STATES, FAST_RESUMES = 150, 4
LONG_RESUMES = 40
SEED = 20261121


@dataclass(frozen=True)
class Recording:
    """operations: of a whole run. saves: (operations done, step) whenever a save had returned. result: its bytes."""

    root: Path
    operations: list[Operation]
    saves: list[tuple[int, int]]
    manifests: dict[str, bytes]
    result: dict[str, bytes]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    root = tmp_path_factory.mktemp("recorded") / "disk"
    root.mkdir()
    saves: list[tuple[int, int]] = []
    manifests: dict[str, bytes] = {}
    with pytest.MonkeyPatch.context() as patch, Watch(root) as watch:
        patch.chdir(root)
        real = CheckpointManager._save

        def save(self: CheckpointManager, **given: bool) -> None:
            real(self, **given)
            assert self.last is not None
            saves.append((len(watch.operations), step_of(self.last) or 0))
            manifests[self.last.name] = (self.last / MANIFEST).read_bytes()

        patch.setattr(CheckpointManager, "_save", save)
        train(tiny(), translate=echo)
    return Recording(root, watch.operations, saves, manifests, outcome(root / RUN))


def test_every_commit_is_synced_before_and_its_parent_after(recording: Recording) -> None:
    found = commits(recording.operations)
    targets = [recording.operations[number].target for number in found]
    names = {path.name for path in targets if path is not None}
    assert names >= {"step-00000002", "step-00000009", "model", "latest", "best", "config.yaml", "step-9.txt"}
    for number in found:
        check_order(recording.operations, number)
        check_metrics(recording.operations, number)
    swapped = {operation.target.name for operation in recording.operations if operation.kind == "swap"}
    assert swapped == {"model"}  # which existed before; at no instant there was none


def test_what_is_replayed_is_what_was_written(recording: Recording, tmp_path: Path) -> None:
    """The recording knows every byte: nothing was written past it."""
    disk = Disk(recording.root)
    for operation in recording.operations:
        disk.apply(operation)
    write_out(disk.after_crash("none", random.Random(0)), tmp_path / "again")
    found = {
        str(path.relative_to(tmp_path / "again")): path.read_bytes()
        for path in (tmp_path / "again").rglob("*")
        if path.is_file()
    }
    wanted = {
        str(path.relative_to(recording.root)): path.read_bytes() for path in recording.root.rglob("*") if path.is_file()
    }
    assert found == wanted


class HeldOutScorer:
    """Whether the run in a crash state goes on."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._seen: set[str] = set()  # intact folders, by all their bytes

    def check(self, state: dict[str, bytes | None], done: int, place: Path) -> None:
        """Every final name is whole, and the newest checkpoint no older than the last save that had returned."""
        write_out(state, place)
        run = place / RUN
        expected = max((step for count, step in self._recording.saves if count <= done), default=None)
        checkpoint, warnings = choose_checkpoint(run / "checkpoints", "auto")
        assert warnings == []
        if checkpoint is None:
            assert expected is None, f"step {expected} was saved and is lost"
        else:
            assert expected is None or checkpoint.step >= expected
            counters = checkpoint.scalars["counters"]
            metrics = (run / "metrics.jsonl").read_bytes()[: counters["metrics_bytes"]]
            assert len(metrics) == counters["metrics_bytes"], "lines of metrics are lost"
            assert self._recording.result["metrics.jsonl"].startswith(metrics)
            if counters["best_step"] not in (None, checkpoint.step):
                assert (run / "checkpoints" / f"step-{counters['best_step']:08d}").is_dir()
        for folder in list_checkpoints(run / "checkpoints"):
            self._once(folder, verify_checkpoint)
        if (run / "model").exists():
            self._once(run / "model", load)
        for folder in (run / "data").glob("copy-task-????????????"):
            self._once(folder, PreparedData.open)
        if (run / "config.yaml").exists():
            assert load_yaml(run / "config.yaml").values["run_dir"] == RUN

    def _once(self, folder: Path, verify: Callable[[Path], object]) -> None:
        content = hashlib.sha256(folder.name.encode())
        for path in sorted(folder.rglob("*")):
            content.update(str(path.relative_to(folder)).encode() + (path.read_bytes() if path.is_file() else b""))
        if content.hexdigest() not in self._seen:
            verify(folder)
            self._seen.add(content.hexdigest())


def replay(recording: Recording, place: Path, states: int | None, resumes: int, rng: random.Random) -> tuple[int, int]:
    """Judge crash states (all, or so many), and resume some. Returns: states, and those that were resumed."""
    wanted = [(done, loss) for done in range(len(recording.operations) + 1) for loss in LOSSES]
    if states is not None:
        wanted = sorted(rng.sample(wanted, min(states, len(wanted))))
    resumed = set(rng.sample(wanted, min(resumes, len(wanted))))
    judge, disk, applied = HeldOutScorer(recording), Disk(recording.root), 0
    for number, (done, loss) in enumerate(wanted):
        for operation in recording.operations[applied:done]:
            disk.apply(operation)
        applied = done
        here = place / str(number)
        try:
            judge.check(disk.after_crash(loss, rng), done, here)
        except Exception as error:
            last = recording.operations[done - 1] if done else "nothing"
            raise AssertionError(f"crash after operation {done} ({last}), loss of {loss}: {error}") from error
        if (done, loss) in resumed:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(here)
                train(tiny(), translate=echo)
            assert outcome(here / RUN) == recording.result, f"crash after operation {done}, loss of {loss}"
            assert not [path for path in (here / RUN).rglob("*.tmp-*") if "data" not in path.parts]
        shutil.rmtree(here)
    return len(wanted), len(resumed)


def test_some_crash_states_resume(recording: Recording, tmp_path: Path) -> None:
    replay(recording, tmp_path, FAST_STATES, FAST_RESUMES, random.Random())


@pytest.mark.slow
def test_every_prefix_of_the_operations_resumes(recording, tmp_path, figure):
    states, resumed = replay(recording, tmp_path, None, LONG_RESUMES, random.Random(SEED))
    figure(
        "R2",
        "every prefix of a run's operations on disk, five degrees of loss each",
        operations=len(recording.operations),
        states=states,
        failures=0,
        trained_to_the_end=resumed,
        unequal=0,
    )
