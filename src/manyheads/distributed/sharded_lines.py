"""Commands that read lines and write lines, on several ranks: blocks of the input, each a file, merged in order.

A block is what the command would work on at once by itself, so a merged file has the bytes that one process would have
written. Blocks that are done stay beside the output, `OUTPUT.shards/`, until it is whole: the same command goes on from
there, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from manyheads.distributed.launch import start
from manyheads.distributed.place import find_place
from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from manyheads.distributed.group import Group

__all__ = ["is_sharded", "model_identity", "run_sharded"]

T = TypeVar("T")
ABOUT = "about.json"


def is_sharded(output: str | None) -> bool:
    """Whether this process is one of several, or goes on with what several have begun."""
    begun = output not in (None, "-") and _folder(str(output)).is_dir()
    return find_place().world > 1 or begun


def run_sharded(
    output: str | None,
    inputs: Sequence[str],
    identity: Mapping[str, Any],
    blocks: Callable[[], Iterator[list[T]]],
    work: Callable[[int, list[T]], Iterable[str]],
    *,
    merge: bool = True,
) -> list[str] | None:
    """Let every rank work on some of the blocks.

    Args:
        output: the file that the lines go to, or whose name the blocks are kept under.
        inputs: files that are read, on every rank.
        identity: whatever else the lines depend on, as plain data.
        blocks: the input, a block at a time.
        work: number of a block's first line or pair, from 0, and the block -> lines, on standard terms.
        merge: write the lines to `output`.

    Returns: all lines, on the main rank; None on the others.
    Raises: ConfigError: standard input or output is to be shared, or the blocks at hand belong to another command.
        RankLostError: a rank is lost.
    """
    place = find_place()
    if output in (None, "-"):
        raise ConfigError(
            f"{place.world} ranks cannot share standard output; give --output FILE, whose blocks are kept beside it."
        )
    if "-" in inputs:
        raise ConfigError(f"{place.world} ranks cannot share standard input; give a file.")
    group = start(place)
    with group.guarding():
        lines = _run(group, str(output), inputs, identity, blocks, work, merge)
        group.close()
    return lines


def _run(
    group: Group,
    output: str,
    inputs: Sequence[str],
    identity: Mapping[str, Any],
    blocks: Callable[[], Iterator[list[T]]],
    work: Callable[[int, list[T]], Iterable[str]],
    merge: bool,
) -> list[str] | None:
    from manyheads.files.commit import write_file
    from manyheads.files.faults import saving

    folder = _folder(output)

    def prepare() -> tuple[int, list[int]]:
        _claim(folder, {**identity, "inputs": [_digest(path) for path in inputs]})
        count = sum(1 for _ in blocks())
        return count, [number for number in range(count) if not _block(folder, number).is_file()]

    count, left = group.from_main(prepare)
    mine, first = set(left[group.rank :: group.world]), 0
    for number, block in enumerate(blocks()):
        if number in mine:
            group.doing(f"at block {number} of {count}")
            text = "".join(f"{line}\n" for line in work(first, block))
            write_file(_block(folder, number), text.encode())
        first += len(block)
    group.meet()
    if not group.is_main:
        return None
    found = [_block(folder, number).read_bytes() for number in range(count)]
    if merge:
        write_file(Path(output), b"".join(found))
    with saving(folder, 0):
        shutil.rmtree(folder)
    return [line for text in found for line in text.decode().split("\n")[:-1]]


def _folder(output: str) -> Path:
    return Path(f"{output}.shards")


def _block(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}"


def _claim(folder: Path, identity: Mapping[str, Any]) -> None:
    """Make the folder of this command, or take up what the same command left."""
    from manyheads.files.commit import make_folder, write_text

    text = json.dumps(identity, sort_keys=True, default=str, indent=1) + "\n"
    about = folder / ABOUT
    if about.is_file() and about.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"{folder} holds blocks of another command, model or input (see {about}); give that command to end it, or"
            " remove the folder."
        )
    make_folder(folder)
    write_text(about, text)


def _digest(path: str) -> str:
    if not Path(path).is_file():
        return path  # reading it says what is wrong
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_identity(model: str) -> str:
    """The identity of a model: the digest of its folder's manifest; its name if it is no folder."""
    for folder in (Path(model), Path(model) / "model"):
        if (folder / "manifest.json").is_file():
            return _digest(str(folder / "manifest.json"))
    return model
