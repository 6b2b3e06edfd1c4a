"""`manyheads prepare`: files of text, trees, ids or pictures -> a folder of tokens for training."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from manyheads.catalogue import TASKS
from manyheads.cli.command_line.task_pages import pages_of, parse_for_named_task
from manyheads.cli.process import echo
from manyheads.cli.watching.phases import StoppedBySignalError, interruptible, showing_phases
from manyheads.tasks.preparation import check_output
from manyheads.tasks.table import task_of_folder

PAGES = pages_of("prepare")


def run(arguments: Sequence[str]) -> int:
    """Prepare data. Returns: the exit code."""
    task, options = parse_for_named_task("prepare", arguments)
    output = Path(options.output)
    if not output.name:
        output = output.resolve()
    check_output(output, options.replace)
    from manyheads.files.commit import remove_stale

    prepare = partial(task.module("prepare").preparation(options), output, replace=options.replace)
    before = _identity(output)

    def tell_stopped() -> None:
        from manyheads.data.preparing import parts_folder

        found = _identity(output)
        left = f"nothing is left in {output}" if found is None else f"{output} is unchanged"
        if found not in (None, before):  # stopped while the system wrote it to the disk
            left = f"{output} was complete already"
        if (parts := parts_folder(output)).is_dir():
            left += f"; the same command continues from the finished parts in {parts}"
        echo(f"manyheads: stopped; {left}.", file=sys.stderr, flush=True)

    def abandon() -> None:
        from rich.console import Console

        Console(stderr=True).show_cursor()  # the bars have hidden it
        tell_stopped()
        remove_stale(output.absolute().parent, output.name)

    try:
        with showing_phases() as progress:
            manifest = interruptible(lambda progress: prepare(progress=progress), progress, abandon)
    except StoppedBySignalError as stopped:
        tell_stopped()
        return 128 + stopped.number
    for name in remove_stale(output.absolute().parent, output.name):
        left = output.with_name(name)
        echo(f"{left} stays: it does not bear the mark of a temporary file of this machine.", file=sys.stderr)
    echo(task.module("prepare").summary(output, manifest))
    tokenizer = getattr(getattr(options, "vocabulary", None), "tokenizer", None)
    if tokenizer is not None and TASKS.get(str(task_of_folder(tokenizer))) is task and _is_model(Path(tokenizer)):
        echo(f"or begin from that model (5 minutes): manyheads train --init {tokenizer} --data.path {output}")
    return 0


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return device and inode of a folder, which change if it is replaced; None if the folder does not exist."""
    with suppress(OSError):
        status = folder.stat()
        return status.st_dev, status.st_ino
    return None


def _is_model(folder: Path) -> bool:
    return any((place / "model.safetensors").is_file() for place in (folder, folder / "model"))
