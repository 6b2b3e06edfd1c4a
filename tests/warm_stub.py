"""`python -IS warm_stub.py SOCKET ARGUMENTS`: stands for a `manyheads ARGUMENTS` that a fork of warm_server.py runs.

It passes on its standard streams (those that are open), environment and folder, the signals that it gets, and the exit
code or signal that ended the fork. Imports are few, since it is started often.
"""

import array
import json
import os
import signal
import socket
import sys


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def answer(server: socket.socket) -> bytes:
    return server.recv(8) or sys.exit("the server of forks has ended")


def main() -> int:
    standing = [number for number in range(3) if is_open(number)]
    while not all(map(is_open, range(3))):
        os.open(os.devnull, os.O_RDWR)  # so that the socket is none of the three
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    request = {
        "arguments": sys.argv[2:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109 - pathlib would take longer to import than all else
        "open": standing,
        "stub": os.getpid(),
    }
    content = json.dumps(request).encode()
    server.sendall(len(content).to_bytes(8, "big"))
    sent = server.sendmsg([content], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", standing))])
    server.sendall(content[sent:])
    child = int.from_bytes(answer(server), "big")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(child, number))
    for number in range(3):
        os.close(number)  # whoever reads from or writes to it sees when the fork closes them
    code = int.from_bytes(answer(server), "big", signed=True)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


sys.exit(main())
