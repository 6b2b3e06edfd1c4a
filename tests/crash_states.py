"""What a disk may hold after a power cut, given the operations that were done: all prefixes, several degrees of loss.

The model is harder than file systems are. What counts as safe: bytes of a file once the file was synced; a name in a
folder once the folder was synced. Everything since may be there, not there, or (bytes) there in part.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from file_operations import Operation

LOSSES = ("none", "bytes", "names", "both", "torn")
"""none: a kill, the system lives on. bytes, names, both: all that was not synced is lost. torn: a random part of it."""


@dataclass
class File:
    """now: as the living system sees it; safe: as it was synced last."""

    now: bytearray = field(default_factory=bytearray)
    safe: bytes = b""


@dataclass
class Folder:
    """now, safe: name -> file or folder. since: the changes of names since the last sync, in order."""

    now: dict[str, File | Folder] = field(default_factory=dict)
    safe: dict[str, File | Folder] = field(default_factory=dict)
    since: list[tuple[tuple[str, File | Folder | None], ...]] = field(default_factory=list)

    def change(self, *entries: tuple[str, File | Folder | None]) -> None:
        """Names that change in one step, as a rename within a folder does."""
        _apply(self.now, entries)
        self.since.append(entries)


def _apply(names: dict[str, File | Folder], entries: Sequence[tuple[str, File | Folder | None]]) -> None:
    for name, entry in entries:
        if entry is None:
            names.pop(name, None)
        else:
            names[name] = entry


class Disk:
    """A disk with one folder, `root`, that was empty and safe."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.top = Folder()

    def apply(self, operation: Operation) -> None:
        """Do what the operation did."""
        folder, name = self._place(operation.path)
        match operation.kind:
            case "create":
                entry = folder.now.get(name)
                if isinstance(entry, File):
                    entry.now = bytearray()
                else:
                    folder.change((name, File()))
            case "write":
                data = self._file(operation.path).now
                data.extend(bytes(max(0, operation.offset - len(data))))
                data[operation.offset : operation.offset + len(operation.data)] = operation.data
            case "truncate":
                data = self._file(operation.path).now
                del data[operation.offset :]
            case "fsync":
                self._sync(self._entry(operation.path))
            case "mkdir":
                folder.change((name, Folder()))
            case "unlink" | "rmdir":
                folder.change((name, None))
            case "rename" | "swap":
                assert operation.target is not None
                self._rename(operation, folder, name, *self._place(operation.target))

    def _rename(self, operation: Operation, folder: Folder, name: str, target: Folder, new_name: str) -> None:
        entry = folder.now[name]
        back = target.now[new_name] if operation.kind == "swap" else None
        if folder is target:
            folder.change((name, back), (new_name, entry))
        else:
            target.change((new_name, entry))
            folder.change((name, back))

    def _sync(self, entry: File | Folder) -> None:
        if isinstance(entry, File):
            entry.safe = bytes(entry.now)
        else:
            entry.safe, entry.since = dict(entry.now), []

    def _entry(self, path: Path) -> File | Folder:
        entry: File | Folder = self.top
        for part in path.relative_to(self.root).parts:
            assert isinstance(entry, Folder)
            entry = entry.now[part]
        return entry

    def _file(self, path: Path) -> File:
        entry = self._entry(path)
        assert isinstance(entry, File)
        return entry

    def _place(self, path: Path) -> tuple[Folder, str]:
        if path == self.root:
            return self.top, "."
        folder = self._entry(path.parent)
        assert isinstance(folder, Folder)
        return folder, path.name

    def after_crash(self, loss: str, rng: random.Random) -> dict[str, bytes | None]:
        """Relative path -> content, None for folders: what is found when the machine is on again."""
        found: dict[str, bytes | None] = {}
        self._collect(self.top, "", loss, rng, found)
        return found

    def _collect(
        self, folder: Folder, prefix: str, loss: str, rng: random.Random, found: dict[str, bytes | None]
    ) -> None:
        for name, entry in _names(folder, loss, rng).items():
            if isinstance(entry, Folder):
                found[prefix + name] = None
                self._collect(entry, f"{prefix}{name}/", loss, rng, found)
            else:
                found[prefix + name] = _content(entry, loss, rng)


def _names(folder: Folder, loss: str, rng: random.Random) -> dict[str, File | Folder]:
    if loss in ("none", "bytes"):
        return folder.now
    names = dict(folder.safe)
    if loss == "torn":
        for entries in folder.since:
            if rng.random() < 0.5:
                _apply(names, entries)
    return names


def _content(file: File, loss: str, rng: random.Random) -> bytes:
    if loss in ("none", "names"):
        return bytes(file.now)
    if loss == "torn" and file.now != file.safe:
        both = zip(file.now, file.safe, strict=False)  # what nobody wrote to is not torn
        same = next((i for i, (a, b) in enumerate(both) if a != b), min(len(file.now), len(file.safe)))
        cut = rng.randrange(same, len(file.now) + 1)
        tail = bytes(max(0, len(file.safe) - cut)) if rng.random() < 0.5 else file.safe[cut:]
        return bytes(file.now[:cut]) + tail
    return file.safe


def write_out(found: dict[str, bytes | None], folder: Path) -> None:
    """Make real files of it, in a new folder."""
    folder.mkdir(parents=True)
    for name, content in found.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
