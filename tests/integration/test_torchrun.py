"""Runs under torchrun: signals, lost ranks, beginning again."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import Ranks
from tiny_run import TINY, TINY_TEXT, changed, outcome
from warm import fork_of

from manyheads.checkpoint.format import list_checkpoints
from manyheads.config.files import to_yaml
from manyheads.files.verify import verify_folder

STEPS = 40
PATIENCE_SECONDS = 400
TORCHRUN = "from torch.distributed.run import main; main()"
CONFIGS = {"transformer": TINY, "xl": TINY_TEXT}
SECTIONS = {
    "training": {"max_steps": STEPS, "save_every": 10, "log_every": 5},
    "validation": {"every_steps": 20, "num_samples": 1},
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches processes through /proc")


class Launched:
    """`torchrun -m manyheads train` of a tiny run."""

    def __init__(
        self,
        run: Path,
        kind: str,
        world: int = 2,
        *options: str,
        launcher: tuple[str, ...] = (),
        warm: list[str] | None = None,
    ) -> None:
        """warm: the fixture `warm_program`, to start everything by it."""
        self.run, self.is_warm = run, bool(warm)
        run.parent.mkdir(parents=True, exist_ok=True)
        settings = run.with_suffix(".yaml")
        settings.write_text(to_yaml(replace(changed(CONFIGS[kind], **SECTIONS), run_dir=str(run))), encoding="utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        started = [*warm, "-c", TORCHRUN] if warm else [sys.executable, "-m", "torch.distributed.run"]
        command = [*started, "--standalone", "--nproc-per-node", str(world)]
        self.settings = str(settings)
        program = ["--no-python", *warm] if warm else ["-m", "manyheads"]
        train = [*program, "train", "--config", str(settings), "-q", *options]
        self.process = subprocess.Popen(
            [*command, *launcher, *train], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def ranks(self) -> dict[int, int]:
        """rank -> process id, of those that run now."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdecimal() and self.settings in (folder / "cmdline").read_text().split("\0"):
                    names = dict(one.partition("=")[::2] for one in (folder / "environ").read_text().split("\0"))
                    found[int(names["RANK"])] = int(folder.name)
            except (OSError, KeyError):  # it has ended, or is the launcher
                continue
        return {rank: fork_of(process) for rank, process in found.items()} if self.is_warm else found

    def wait_for_checkpoint(self, number: int = 1) -> None:
        began = time.monotonic()
        while len(list_checkpoints(self.run / "checkpoints")) < number:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() - began < PATIENCE_SECONDS
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        """Exit code and all that was printed."""
        text, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, text


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """A run on two ranks that nothing happened to."""
    place, ranks = tmp_path_factory.mktemp("undisturbed"), Ranks()

    def make(kind: str, parallel: str = "ddp") -> Path:
        run = place / f"{kind}-{parallel}"
        if not run.exists():
            ranks.run(2, "run", kind=kind, run_dir=run, parallel=parallel, sections=SECTIONS)
        return run

    yield make
    ranks.close()


def check(wanted: Path, found: Path) -> None:
    """The run ended with the bytes of the other."""
    first, second = outcome(wanted), outcome(found)
    assert first.keys() == second.keys()
    own, other = (str(path).encode() for path in (found, wanted))
    assert [name for name in first if second[name].replace(own, other) != first[name]] == []
    assert not list(found.rglob("*.tmp-*"))


@pytest.mark.slow
def test_a_killed_rank_is_named_and_begun_again(warm_program: list[str], tmp_path: Path) -> None:
    """`--max-restarts` goes on by itself from the newest checkpoint, and ends with the same bytes."""
    again = ("--max-restarts", "1")
    left_alone = Launched(tmp_path / "wanted", "xl", 2, warm=warm_program)
    code, text = left_alone.end()
    assert code == 0, text
    launched = Launched(tmp_path / "run", "xl", 2, "--resume", "none", launcher=again, warm=warm_program)
    launched.wait_for_checkpoint()
    killed = launched.ranks()[1]
    os.kill(killed, signal.SIGKILL)
    code, text = launched.end()
    assert code == 0, text
    assert f"rank 1 (process {killed} on " in text
    assert "is lost: no sign of life" in text
    assert not list(launched.run.glob("previous-*"))  # --resume none counts for the first start alone
    check(left_alone.run, launched.run)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_signal_to_one_or_all_ends_in_one_checkpoint(undisturbed, tmp_path, number, to_all):
    wanted = undisturbed("transformer")
    launched = Launched(tmp_path / "run", "transformer")
    launched.wait_for_checkpoint()
    ranks = launched.ranks()
    os.kill(launched.process.pid if to_all else ranks[1], number)
    code, text = launched.end()
    assert code != 0
    assert f"stopped  by {number.name}" in text
    if not to_all:
        assert text.count(f"exitcode  : {128 + number}") == 2, text
    for path in list_checkpoints(launched.run / "checkpoints"):
        verify_folder(path)
    again = Launched(tmp_path / "run", "transformer")
    assert again.end()[0] == 0
    check(wanted, launched.run)


def survivors_end(tmp_path: Path, number: signal.Signals, world: int, lost: int, parallel: str) -> float:
    """Seconds until all others have ended."""
    launched = Launched(
        tmp_path / "run", "xl", world, "--timeout", "20", "--training.parallel", parallel,
        "--training.max-steps", "1000000",
    )  # fmt: skip
    launched.wait_for_checkpoint()
    ranks = launched.ranks()
    assert len(ranks) == world
    os.kill(ranks[lost], number)
    began = time.monotonic()
    others = [pid for rank, pid in ranks.items() if rank != lost]
    while any(Path(f"/proc/{pid}").exists() for pid in others):
        assert time.monotonic() - began < PATIENCE_SECONDS
        time.sleep(0.05)
    seconds = time.monotonic() - began
    code, text = launched.end()
    assert code != 0
    assert f"rank {lost} (process {ranks[lost]} on " in text, text
    for path in list_checkpoints(launched.run / "checkpoints"):
        verify_folder(path)
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(("number", "world", "lost"), [("SIGKILL", 3, 0), ("SIGSTOP", 2, 1), ("SIGSTOP", 3, 0)])
def test_the_others_end_and_name_the_lost_rank(tmp_path, number, world, lost, parallel, figure):
    seconds = survivors_end(tmp_path, signal.Signals[number], world, lost, parallel)
    figure("R11", f"{number} of rank {lost} of {world}, {parallel}, timeout 20 s", seconds=round(seconds, 1))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_twenty_five_signals(undisturbed, tmp_path, parallel, part, figure):
    """At random moments, to one rank or the launcher, SIGTERM or SIGINT; after each a whole checkpoint, at last the
    same bytes."""
    rng, sent, runs, longest = random.Random(), 0, 0, 0.0
    wanted = undisturbed("xl", parallel)
    while sent < 25:
        run = tmp_path / f"run-{runs}"
        runs += 1
        while True:
            launched = Launched(run, "xl", 2, "--training.parallel", parallel)
            log = run / "train.log"
            before = log.stat().st_size if log.exists() else 0
            while launched.process.poll() is None and not (log.exists() and log.stat().st_size > before):
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 1.5))
            ranks = launched.ranks()
            if launched.process.poll() is None and len(ranks) == 2 and sent < 25:
                number = rng.choice([signal.SIGTERM, signal.SIGINT])
                os.kill(rng.choice([launched.process.pid, *ranks.values()]), number)
                asked = time.monotonic()
                code, text = launched.end()
                longest = max(longest, time.monotonic() - asked)
                sent += 1
                for path in list_checkpoints(run / "checkpoints"):
                    verify_folder(path)
                if "stopped  by" in text:
                    assert code != 0
                    continue  # any other end must be that of a whole run, where the signal came too late
            elif launched.end()[0] != 0:
                continue
            break
        check(wanted, run)
    name = f"signals at random moments, 2 ranks, {parallel}, part {part}"
    figure("R11", name, sent=sent, longest_seconds=round(longest, 1))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_twenty_five_kills(undisturbed, tmp_path, part, figure):
    """SIGKILL of the launcher and all ranks at random moments, every second one while a checkpoint is written."""
    rng, kills, within_saves, runs = random.Random(), 0, 0, 0
    wanted = undisturbed("xl")
    while kills < 25:
        run = tmp_path / f"run-{runs}"
        runs += 1
        for _ in range(6):
            launched = Launched(run, "xl")
            first = len(list_checkpoints(run / "checkpoints"))
            while launched.process.poll() is None and len(launched.ranks()) < 2:
                time.sleep(0.01)
            aims = rng.random() < 0.5
            moment = time.monotonic() + rng.uniform(0, 3)
            while launched.process.poll() is None and time.monotonic() < moment + 20 * aims:
                if aims and time.monotonic() > moment and list(run.glob("checkpoints/*.tmp-*")):
                    break
                time.sleep(0.002)
            ranks = launched.ranks()
            within = bool(list(run.glob("checkpoints/*.tmp-*")))
            for process in (launched.process.pid, *ranks.values()):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            launched.end()
            kills += launched.process.returncode == -signal.SIGKILL
            within_saves += within
            assert len(list_checkpoints(run / "checkpoints")) >= min(first, 1)
        again = Launched(run, "xl")
        code, text = again.end()
        assert code == 0, text
        check(wanted, run)
    figure("R1", f"SIGKILL under torchrun, 2 ranks, part {part}", kills=kills, within_saves=within_saves, runs=runs,
           unequal_bytes=0)  # fmt: skip


def test_worlds_that_contradict_themselves() -> None:
    from manyheads.distributed.process import this_process
    from manyheads.errors import ConfigError

    assert this_process({}).world == 1
    process = this_process({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert (process.rank, process.world, process.local_rank, process.restarts, process.is_main) == (3, 4, 1, 2, False)
    cases: list[Any] = [({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4"), ({"RANK": "x", "WORLD_SIZE": "4"}, "'x'")]
    for environment, message in cases:
        with pytest.raises(ConfigError, match=message):
            this_process(environment)
