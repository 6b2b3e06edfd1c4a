"""Two ranks in network namespaces of their own, joined by one cable that is pulled out: no packet says so."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_run import TINY, TINY_TEXT, changed

from manyheads.checkpoint.format import list_checkpoints
from manyheads.config.files import to_yaml
from manyheads.files.verify import verify_folder

STEPS = 4000  # more than are made before the cable is pulled
TIMEOUT_SECONDS = 6
MORE_SECONDS = 10
"""After the timeout; see docs/scaling.md."""
PATIENCE_SECONDS = 300
ADDRESSES = ("10.213.77.1", "10.213.77.2")
SENTENCES = (
    r"rank 1 \(process \d+ on .*\) is lost: no sign of life for",
    "the launcher's store is lost, and with it torchrun, rank 0's machine or the network to it: no answer for",
)
CONFIGS = {"transformer": TINY, "xl": TINY_TEXT}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Cable:
    """names: of the namespaces, one for each rank. interface: of each end of the cable."""

    names: tuple[str, str]
    interface: str

    def set(self, side: int, state: str) -> None:
        """Put the cable in ("up") at one end or pull it out ("down")."""
        ip("-n", self.names[side], "link", "set", self.interface, state)


@pytest.fixture
def cable() -> Iterator[Cable]:
    if shutil.which("ip") is None:
        pytest.skip("this machine has no iproute2")
    names, interface = (f"mh-{os.getpid()}-a", f"mh-{os.getpid()}-b"), "cable"
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            other = ("peer", "name", interface, "netns", names[1])
            ip("link", "add", interface, "netns", names[0], "type", "veth", *other)
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
                for one in ("lo", interface):
                    ip("-n", name, "link", "set", one, "up")
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield Cable(names, interface)
    finally:
        for name in names:
            with suppress(OSError):
                ip("netns", "delete", name)


def start(cable: Cable, settings: Path, *options: str) -> list[subprocess.Popen[str]]:
    """Start both ranks, by the variables that a scheduler sets."""
    ranks = []
    for rank, name in enumerate(cable.names):
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": cable.interface,
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29571",
        }  # fmt: skip
        program = [sys.executable, "-m", "manyheads", "train", "--config", str(settings), "-q"]
        command = ["ip", "netns", "exec", name, *program, "--timeout", str(TIMEOUT_SECONDS), *options]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    return ranks


def end(ranks: list[subprocess.Popen[str]], seconds: float) -> list[tuple[int, str]]:
    """Exit code and output of both, which must end by then."""
    until = time.monotonic() + seconds
    try:
        texts = [one.communicate(timeout=max(until - time.monotonic(), 0.1))[0] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    return [(one.returncode, text) for one, text in zip(ranks, texts, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "side"), [("xl", 0), ("transformer", 1)])
def test_a_lost_network_ends_both_ranks_and_the_run_goes_on(cable, kind, side, tmp_path, figure):
    run, settings = tmp_path / "run", tmp_path / "run.yaml"
    sections = {
        "training": {"max_steps": STEPS, "save_every": 10, "log_every": 5, "max_minutes": 0.0},
        "validation": {"every_steps": 100_000, "num_samples": 1},
    }
    settings.write_text(to_yaml(changed(CONFIGS[kind], **sections, run_dir=str(run))), encoding="utf-8")
    ranks, began = start(cable, settings), time.monotonic()
    while len(list_checkpoints(run / "checkpoints")) < 2:
        for one in ranks:
            assert one.poll() is None, one.communicate()[0]
        assert time.monotonic() - began < PATIENCE_SECONDS
        time.sleep(0.05)
    cable.set(side, "down")
    pulled = time.monotonic()
    ended = end(ranks, TIMEOUT_SECONDS + MORE_SECONDS)
    took = time.monotonic() - pulled
    for rank, (code, text) in enumerate(ended):
        assert code == 3, text
        [said] = [line for line in text.split("\n") if line.startswith("manyheads")]
        assert re.match(rf"manyheads \(rank {rank}\): {SENTENCES[rank]} \d+ s.*What was saved is intact\.$", said)
        assert "Traceback" not in text
    saved = list_checkpoints(run / "checkpoints")
    verify_folder(saved[-1])
    before = int(saved[-1].name.rpartition("-")[2])

    cable.set(side, "up")
    ranks = start(cable, settings, "--training.max_steps", str(before + 20))
    for code, text in end(ranks, PATIENCE_SECONDS):
        assert code == 0, text
    assert list_checkpoints(run / "checkpoints")[-1].name.endswith(f"{before + 20:08}")
    figure("R11", f"network lost between 2 ranks, {kind}, timeout {TIMEOUT_SECONDS} s", seconds=round(took, 1))
