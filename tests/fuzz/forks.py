"""Functions that run in forked children, with limits of time and memory.

A fork has everything imported already, so a case takes milliseconds. torch must not have started threads before: they
do not exist in a fork, and what waits for them hangs. So the processes that use this set OMP_NUM_THREADS=1.
"""

import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MOST_GROWTH", "MOST_LINES", "MOST_SECONDS", "Outcome", "ended_within", "forked", "resident_bytes"]

MOST_SECONDS = 5.0
MOST_GROWTH = 200 * 2**20
MOST_LINES = 11
"""Of a message: ten, and a line of progress that may stand before them."""
SPARE_BYTES = 2 * 2**30
"""Address space that a child may take besides what it has: it ends before the machine runs out of memory."""
SIGNALLED = -1
KEPT_BYTES = 2**20


@dataclass(frozen=True)
class Outcome:
    """What became of a child.

    code: its exit code; negative: the signal that ended it. grown_bytes: its largest resident size, less the parent's
    when it began. hung: it was ended because its time was over. cpu_seconds: of processor time. stdout, stderr: their
    first MiB.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    grown_bytes: int
    hung: bool = False
    cpu_seconds: float = 0.0

    def fault(self, *, trains: bool = False) -> str:
        """What is wrong with it: anything but exit 0, or exit 2 with a message of a few lines; empty: nothing.

        Args: trains: how much memory and processor time it took does not matter.
        """
        if self.hung:
            return "hung"
        if "Traceback (most recent call last)" in self.stderr:
            kinds = re.findall(r"^([A-Za-z_.]+)(?::|$)", self.stderr, re.MULTILINE)
            return f"a traceback: {kinds[-1] if kinds else 'of nothing'}"
        if self.code not in (0, 2):
            return f"exit code {self.code}"
        said = self.stderr.rpartition("manyheads: ")[2]
        if self.code == 2 and not (said or self.stdout).strip():
            return "exit code 2 without a message"
        if self.code == 2 and said.count("\n") > MOST_LINES:
            return f"a message of {said.count(chr(10))} lines"
        if "\x1b" in self.stderr:
            return "an escape sequence on standard error"
        if self.grown_bytes > MOST_GROWTH and not trains:
            return "memory grew by more than 200 MiB"
        if self.cpu_seconds > MOST_SECONDS and not trains:
            return "more than 5 s of processor time"
        return ""


def resident_bytes() -> int:
    """The resident size of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def forked(
    work: Callable[[], int],
    *,
    seconds: float = MOST_SECONDS,
    work_seconds: float = MOST_SECONDS,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: Path | None = None,
) -> Outcome:
    """Call a function in a forked child.

    Args:
        work: returns the exit code. An exception is printed and gives 70.
        seconds: after which the child is killed if it sleeps.
        work_seconds: of processor time, after which it is killed then.
        folder: its working directory.
        environment: variables that are set in it.
        stdin: its standard input; None: empty.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as size:
        process = os.fork()
        if process == 0:
            # Of the child: a fork leaves out pages of files that its parent had mapped.
            os.write(size.fileno(), str(resident_bytes()).encode("ascii"))
            _child(work, out.fileno(), err.fileno(), folder, environment or {}, stdin)
        hung = not ended_within(process, seconds, work_seconds)
        if hung:
            os.killpg(process, signal.SIGKILL) if _leads_group(process) else os.kill(process, signal.SIGKILL)
        _, status, usage = os.wait4(process, 0)
        took = time.monotonic() - started
        before = int(os.pread(size.fileno(), 32, 0) or 0)
        told, wrong = (os.pread(file.fileno(), KEPT_BYTES, 0).decode("utf-8", "replace") for file in (out, err))
    code = os.waitstatus_to_exitcode(status)
    grown = usage.ru_maxrss * 1024 - before
    return Outcome(code, told, wrong, took, grown, hung, usage.ru_utime + usage.ru_stime)


def _leads_group(process: int) -> bool:
    try:
        return os.getpgid(process) == process
    except ProcessLookupError:
        return False


def ended_within(process: int, seconds: float, work_seconds: float = MOST_SECONDS) -> bool:
    """Wait for a child. One that has not had its turn on a busy machine gets more time: it does not hang.

    A child hangs if it sleeps after this time, or has taken `work_seconds` of processor time.
    """
    handle = os.pidfd_open(process)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        until = time.monotonic() + seconds
        while not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            if not _waits_for_its_turn(process, work_seconds):
                return bool(poll.poll(0))
            until = time.monotonic() + 1
        return True
    finally:
        os.close(handle)


def _waits_for_its_turn(process: int, work_seconds: float) -> bool:
    for _ in range(5):
        try:
            fields = (
                Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            )
        except OSError:
            return False
        taken = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        if taken > work_seconds:
            return False
        if fields[0] in "RTtD":
            return True
        time.sleep(0.1)
    return False


def _child(
    work: Callable[[], int], out: int, err: int, folder: Path | None, environment: Mapping[str, str], stdin: Path | None
) -> None:
    """Become the child: never returns."""
    code = 70
    try:
        os.setpgid(0, 0)
        taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + SPARE_BYTES, taken + SPARE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (SPARE_BYTES, SPARE_BYTES))
        os.dup2(os.open(stdin or os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  (pytest had put others in place)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        os.environ.update(environment)
        if folder is not None:
            os.chdir(folder)
        code = work()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
