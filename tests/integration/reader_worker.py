"""Verifies whatever bears a final name in the folder given, again and again until its standard input ends.

Out, as JSON: how many verifications passed, and what went wrong with folders that were there all the while.
"""

import json
import re
import select
import sys
from pathlib import Path

from manyheads.checkpoint.format import list_checkpoints, verify_checkpoint
from manyheads.errors import CheckpointError
from manyheads.files.verify import verify_folder


def identity(path: Path) -> tuple[int, int]:
    """Which folder bears the name now; zeros if none does. (A deleted folder's number is soon used again.)"""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_ino, status.st_ctime_ns


def main(place: Path) -> None:
    passed = {"checkpoints": 0, "model": 0, "pointers": 0}
    failures = []
    while not select.select([sys.stdin], [], [], 0)[0]:
        folders = [(path, "checkpoints") for path in list_checkpoints(place / "checkpoints")]
        for path, kind in [*folders, (place / "model", "model")]:
            before = identity(path)
            try:
                verify_checkpoint(path) if kind == "checkpoints" else verify_folder(path)
                passed[kind] += 1
            except CheckpointError as error:
                if before != (0, 0) and identity(path) == before:  # neither deleted nor replaced meanwhile
                    failures.append(str(error))
        for name in ("latest", "best"):
            path = place / "checkpoints" / name
            before = identity(path)
            text = path.read_bytes() if before != (0, 0) else b""
            if before == identity(path) != (0, 0):
                passed["pointers"] += 1
                if not re.fullmatch(rb"step-\d{8}\n", text):
                    failures.append(f"{path} holds {text!r}")
    print(json.dumps({"passed": passed, "failures": failures}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
