"""One loop for commands that read lines and write lines, in one process or in several.

Several ranks divide the blocks of the input among them. A block is what one process would work on at once, so the
output has the same bytes. Finished blocks are files in `OUTPUT.shards/` until the output is complete: the same command
continues from there, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from manyheads.distributed.launch import start
from manyheads.distributed.process import this_process
from manyheads.errors import ConfigError, DataError, ManyHeadsError, RequestError
from manyheads.files.safe_open import open_regular, read_limited

if TYPE_CHECKING:
    from manyheads.data.lines import Source
    from manyheads.distributed.group import Group

T = TypeVar("T")
Work = Callable[[int, list[T]], Iterable[str]]
_ABOUT = "about.json"
_MOST_BYTES = 16 << 20


def is_sharded(output: str | None) -> bool:
    """Return whether this process is one of several, or continues what several have begun."""
    begun = output not in (None, "-") and _folder(str(output)).is_dir()
    return this_process().world > 1 or begun


def run_lines(
    source: Source[T],
    work: Work[T],
    write: Callable[[list[str]], object],
    *,
    output: str | None,
    identity: Mapping[str, Any],
    resumable: bool = False,
    continued: Callable[[int], object] = lambda count: None,
) -> bool:
    """Write the output lines of every block, in order.

    Args:
        source: the input.
        work: number of a block's first item, from 0, and the block -> its lines.
        write: receives the lines of one block after another; of several ranks, only on the main one.
        output: name of the file to which `write` writes; several ranks keep their finished blocks next to it.
        identity: everything besides the input on which the lines depend, as plain data; only equal work is resumed.
        resumable: a single process also keeps its finished blocks, and the lines are written when all are there.
        continued: called with the number of items before the first block that is missing, if an earlier command has
            left some.

    Returns: whether this process has written the lines.
    Raises: ConfigError: several ranks would share standard input or output, or the folder has blocks of another
        command. RankLostError: a rank is lost.
    """
    if resumable or is_sharded(output):
        return _run_in_group(source, work, write, output, identity, continued)
    first = 0
    for block in source.blocks(full=False):
        write(list(work(first, block)))
        first += len(block)
    return True


def _run_in_group(
    source: Source[T],
    work: Work[T],
    write: Callable[[list[str]], object],
    output: str | None,
    identity: Mapping[str, Any],
    continued: Callable[[int], object],
) -> bool:
    process = this_process()
    if output in (None, "-"):
        raise ConfigError(
            f"{process.world} ranks cannot share standard output; give --output FILE, whose blocks are kept beside it."
        )
    if "-" in source.files:
        raise ConfigError(f"{process.world} ranks cannot share standard input; give a file.")
    folder, group = _folder(str(output)), start(process)
    with group.guarding(), _for_this_command(folder, str(output)) if group.is_main else nullcontext():
        count = _work_on_own_blocks(group, folder, source, work, identity, continued)
        if group.is_main:
            from manyheads.files.commit import remove_folder

            for number in range(count):
                with open_regular(_block(folder, number)) as file:
                    write(file.read().decode("utf-8").split("\n")[:-1])
            remove_folder(folder)
        group.close()
    return group.is_main


@contextmanager
def _for_this_command(folder: Path, output: str) -> Iterator[None]:
    """Keep other commands out of the folder of the blocks. Raises: ConfigError: another command works in it."""
    from manyheads.files.commit import make_folder, remove_folder, remove_stale, saving
    from manyheads.files.output_safety import locked

    def in_use(owner: str) -> ConfigError:
        return ConfigError(
            f"process {owner} writes {output} at the moment (its blocks are in {folder}); wait for it, or choose"
            " another output."
        )

    with saving(folder, 0):
        make_folder(folder)
    remove_stale(folder.absolute().parent, folder.name)
    with locked(folder / ".lock", in_use):
        try:
            yield
        except BaseException as error:
            # Nothing to continue from, or an input that must be changed, which makes the blocks those of another one.
            is_useless = not (folder / _ABOUT).exists() and not _has_blocks(folder)
            if is_useless or (this_process().world == 1 and isinstance(error, DataError | RequestError)):
                with suppress(ManyHeadsError):
                    remove_folder(folder)
            raise


def _has_blocks(folder: Path) -> bool:
    return any(path.name.isdecimal() for path in folder.glob("*"))


def _work_on_own_blocks(
    group: Group,
    folder: Path,
    source: Source[T],
    work: Work[T],
    identity: Mapping[str, Any],
    continued: Callable[[int], object],
) -> int:
    """Write this rank's blocks and wait for the other ranks. Returns: the number of all blocks."""
    from manyheads.files.commit import write_text

    def prepare() -> tuple[int, list[int]]:
        _claim(folder, {**identity, "inputs": [_digest(path) for path in source.files]})
        sizes = [len(block) for block in source.blocks(full=True)]
        left = [number for number in range(len(sizes)) if not _block(folder, number).is_file()]
        if done := sum(sizes[: left[0] if left else None]):
            continued(done)
        return len(sizes), left

    count, left = group.from_main(prepare)
    mine, first = set(left[group.rank :: group.world]), 0
    for number, block in enumerate(source.blocks(full=True)):
        if number in mine:
            group.doing(f"at block {number} of {count}")
            write_text(_block(folder, number), "".join(f"{line}\n" for line in work(first, block)))
        first += len(block)
    group.meet()
    return count


def _folder(output: str) -> Path:
    return Path(f"{output}.shards")


def _block(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}"


def _claim(folder: Path, identity: Mapping[str, Any]) -> None:
    """Create the folder of this command, or take over what the same command left."""
    from manyheads.files.commit import make_folder, write_text

    text = json.dumps(identity, sort_keys=True, default=str, indent=1) + "\n"
    about = folder / _ABOUT
    if not about.is_file() and _has_blocks(folder):
        raise ConfigError(
            f"{folder} holds blocks, but not of what command: there is no {about.name} in it. Remove the folder."
        )
    if about.is_file() and read_limited(about, _MOST_BYTES) != text.encode():
        raise ConfigError(
            f"{folder} holds blocks of another command, model or input (see {about}); give that command to finish it,"
            " or remove the folder."
        )
    make_folder(folder)
    write_text(about, text)


def _digest(path: str) -> str:
    if not Path(path).is_file():
        return path  # opening it later reports the error
    with open_regular(Path(path)) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_identity(model: str) -> str:
    """Return the digest of a model folder's manifest; the model's name if it is not a folder."""
    for folder in (Path(model), Path(model) / "model"):
        if (folder / "manifest.json").is_file():
            return _digest(str(folder / "manifest.json"))
    return model
