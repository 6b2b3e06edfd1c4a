"""Runs `manyheads` in forks of a process that has imported it: `python warm_server.py SOCKET`.

To start Python and torch takes seconds of processor time, a fork takes milliseconds. A request (see warm_stub.py)
brings arguments, environment, folder and the open ones of the descriptors 0, 1 and 2; the fork becomes a program that
was started with these. It ends when nobody is connected any more.
"""

import array
import contextlib
import gc
import importlib
import io
import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from preloading import read_settings

STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def preload() -> None:
    """What most commands import. Nothing here may read the environment of a request when it is imported."""
    from manyheads.cli import main as program

    for name in ("translate", "train", "serve"):
        program.module_of(name)
    for module in ("torch._dynamo", "manyheads.decoding.translator", "manyheads.training.run.loop"):
        importlib.import_module(module)
    read_settings()
    if "huggingface_hub" in sys.modules:
        raise RuntimeError("huggingface_hub reads the environment when it is imported, so a fork has to do that")
    gc.freeze()


def received(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """A request, and the descriptors that came with it. None: a client that only holds the connection."""
    size = connection.recv(8)
    if not int.from_bytes(size, "big"):
        return None
    descriptors = array.array("i")
    content, ancillary, _, _ = connection.recvmsg(1 << 16, socket.CMSG_LEN(3 * descriptors.itemsize))
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    while len(content) < int.from_bytes(size, "big"):
        content += connection.recv(1 << 16)
    return json.loads(content), list(descriptors)


def serve(path: Path) -> list[str]:
    """Fork for each request. Returns: in a fork, its arguments; in the server, once it is to end, nothing."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(32)
    awake, wake = socket.socketpair()
    for end in (awake, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    for one in (listener, awake):
        selector.register(one, selectors.EVENT_READ)
    children: dict[int, socket.socket] = {}
    clients: set[socket.socket] = set()
    Path(f"{path}.new").rename(path)  # it can be seen when it can be connected to
    while True:
        for key, _ in selector.select():
            ready: Any = key.fileobj
            if ready is listener:
                connection, _ = listener.accept()
                request = received(connection)
                child = os.fork() if request else 0
                if request and not child:
                    signal.set_wakeup_fd(-1)
                    for one in (listener, awake, wake, connection, *clients):
                        one.close()
                    return become(*request)
                if request:
                    children[child] = connection
                    for descriptor in request[1]:
                        os.close(descriptor)
                    connection.sendall(child.to_bytes(8, "big"))
                clients.add(connection)
                selector.register(connection, selectors.EVENT_READ)
            elif ready is awake:
                awake.recv(4096)
                for child in list(children):
                    done, status = os.waitpid(child, os.WNOHANG)
                    if done:
                        code = os.waitstatus_to_exitcode(status)
                        with contextlib.suppress(OSError):
                            children[child].sendall(code.to_bytes(8, "big", signed=True))
                        del children[child]
            else:  # a client has gone
                for child in [child for child, connection in children.items() if connection is ready]:
                    os.kill(child, signal.SIGKILL)
                selector.unregister(ready)
                clients.discard(ready)
                ready.close()
        if not clients and not children:
            path.unlink()
            Path(f"{path}.started").unlink()
            return []


def become(request: dict[str, Any], descriptors: list[int]) -> list[str]:
    """Make this fork what a program is that was just started. Returns: its arguments."""
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in range(3):
        os.close(number)
    for number, descriptor in zip(request["open"], descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    places = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    if places:
        sys.path[:0] = places
        look_for_plugins()
    Path("/proc/self/comm").write_text(f"for-{request['stub']}", encoding="ascii")  # tests find it by this name
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    for number, (name, mode) in enumerate(STREAMS):
        stream = None
        if number in request["open"]:
            raw = open(number, f"{mode}b", closefd=False)  # noqa: SIM115
            errors = "backslashreplace" if name == "stderr" else None
            lines = name == "stderr" or raw.isatty()
            stream = io.TextIOWrapper(raw, encoding=encoding, errors=errors, line_buffering=lines)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["manyheads", *request["arguments"]]
    return list(request["arguments"])


def look_for_plugins() -> None:
    """As a program that was just started does, for some may be in folders that were added to the path."""
    from manyheads import catalogue

    catalogue._plugins.cache_clear()
    for table in vars(catalogue).values():
        if isinstance(table, catalogue.Table):
            table._has_plugins = False


if __name__ == "__main__":
    preload()
    given = serve(Path(sys.argv[1]))
    if given[:1] == ["-c"]:
        sys.argv = ["-c", *given[2:]]
        exec(compile(given[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - the tests' own
    elif given:
        from manyheads.cli.main import main

        sys.exit(main())
