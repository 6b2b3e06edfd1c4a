"""In which order a durable save must do things: checked on recorded operations, whoever recorded them."""

import re
from pathlib import Path

from file_operations import Operation

from manyheads.files.verify import MANIFEST


def commits(operations: list[Operation]) -> list[int]:
    """Where something that was written aside gets its final name."""
    aside = re.compile(r"\.tmp-\d+-[0-9a-f]{16}$")
    return [
        number
        for number, operation in enumerate(operations)
        if operation.kind in ("rename", "swap")
        and operation.target is not None
        and aside.search(operation.path.name)
        and not aside.search(operation.target.name)
    ]


def check_order(operations: list[Operation], number: int) -> None:
    """Everything below the renamed path was synced before, its manifest last, and the parent is synced next."""
    rename = operations[number]
    begin = max(
        i for i in range(number) if operations[i].path == rename.path and operations[i].kind in ("mkdir", "create")
    )
    below = [
        (i, operation)
        for i, operation in enumerate(operations[begin:number], start=begin)
        if operation.path.is_relative_to(rename.path)
    ]
    changed: dict[Path, int] = {}
    synced: dict[Path, int] = {}
    for i, operation in below:
        if operation.kind in ("create", "write", "truncate"):
            changed[operation.path] = i
        if operation.kind in ("create", "mkdir", "unlink", "rmdir", "rename") and operation.path != rename.path:
            changed[operation.path.parent] = i
        if operation.kind == "rename" and operation.target is not None:  # of a part, made elsewhere in the same way
            changed[operation.target.parent] = i
        if operation.kind == "fsync":
            synced[operation.path] = i
        if operation.kind == "mkdir":
            changed.setdefault(operation.path, i)
        if operation.kind in ("unlink", "rmdir"):
            changed.pop(operation.path, None)
    for path, i in changed.items():
        if ".tmp-" in str(path.relative_to(rename.path)):
            continue  # its own commit is checked by itself
        assert synced.get(path, -1) > i, f"{path} was not synced after its last change, before {rename}"
    files = {operation.path for _, operation in below if operation.kind == "create"}
    if rename.path / MANIFEST in files:
        others = [i for path, i in synced.items() if path in files and path.name != MANIFEST]
        assert others
        assert max(others) < synced[rename.path / MANIFEST], "the manifest was not the last"
    after = next(operation for operation in operations[number + 1 :] if operation.kind != "open")
    assert (after.kind, after.path) == ("fsync", rename.target.parent), f"after {rename} came {after}"


def check_metrics(operations: list[Operation], number: int) -> None:
    """A checkpoint says how long metrics.jsonl is, so all of it must be on the disk before."""
    target = operations[number].target
    if target is None or not target.name.startswith("step-0"):
        return
    of_metrics = [operation.kind for operation in operations[:number] if operation.path.name == "metrics.jsonl"]
    kinds = [kind for kind in of_metrics if kind in ("write", "fsync")]
    assert kinds[-1] == "fsync", f"{target.name} was committed before metrics.jsonl was synced"
