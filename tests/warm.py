"""A fixture: `manyheads` as a process that takes milliseconds to start, a fork of one that has imported torch already.

What holds from the start of Python on (help without torch, variables that are read before torch is imported) is tested
with processes of its own.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

__all__ = ["fork_of", "warm_program"]

TESTS = Path(__file__).parent
PATIENCE_SECONDS = 300


SERVERS: list[subprocess.Popen[bytes]] = []


def fork_of(stub: int) -> int:
    """The process for which a process that was started by `warm_program` stands; 0: there is none (now)."""
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdecimal() and (folder / "comm").read_text() == f"for-{stub}\n":
                return int(folder.name)
    return 0


def connected(path: Path) -> socket.socket:
    """A connection to the server at this path, which is started unless another process has done so."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        try:
            os.close(os.open(f"{path}.started", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            paths = [str(TESTS.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
            command = [sys.executable, str(TESTS / "warm_server.py"), str(path)]
            server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
            SERVERS.append(server)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
            connection.sendall(bytes(8))
        except OSError:  # not yet, or not any more
            connection.close()
            time.sleep(0.05)
        else:
            return connection
    raise TimeoutError(path)


@pytest.fixture(scope="session")
def warm_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The beginning of a command line: `[*warm_program, "translate", ...]`, or `[*warm_program, "-c", CODE]`.

    Where forks or sockets of this kind are missing, a real start of the program.
    """
    if not hasattr(socket, "AF_UNIX") or sys.platform != "linux":
        yield [sys.executable, "-c", PLAIN]
        return
    folder = tmp_path_factory.getbasetemp()
    path = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "warm"
    connection = connected(path)
    yield [sys.executable, "-IS", str(TESTS / "warm_stub.py"), str(path)]
    connection.close()
    for server in SERVERS if "PYTEST_XDIST_WORKER" not in os.environ else ():
        server.wait(PATIENCE_SECONDS)  # under xdist other processes may use it still


PLAIN = """
import sys
if sys.argv[1:2] == ["-c"]:
    code, sys.argv = sys.argv[2], ["-c", *sys.argv[3:]]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
else:
    from manyheads.cli.main import main
    sys.exit(main())
"""
"""Does what the server's forks do."""
