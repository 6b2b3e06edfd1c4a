"""`manyheads sample-model DIR`: writes the translator that is part of the package."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.command_line.parsing import command, program
from manyheads.cli.process import echo
from manyheads.config.options import CommandPage, argument


@dataclass(frozen=True, kw_only=True)
class SampleModelOptions:
    """Options of `manyheads sample-model`."""

    folder: str = argument("Folder for the model; it is created if it does not exist.", metavar="DIR")


PAGE = CommandPage(
    SampleModelOptions,
    """Write a trained English-German translator, which comes with the package; nothing is downloaded. It is small, and
good for everyday sentences of 4 to 20 words only. README.md in the folder states its data, licence and scores. A
folder with something else in it is not replaced.""",
    (
        "manyheads sample-model models/en-de",
        "manyheads sample-model /tmp/translator",
    ),
)


@command(PAGE, "sample-model")
def run(options: SampleModelOptions) -> int:
    """Write the model. Returns: the exit code."""
    from manyheads.extras.sample_model.packaged import copy_model

    folder = Path(options.folder)
    is_new = copy_model(folder)
    echo(f"{folder}: English to German{'' if is_new else '  (was there already)'}")
    echo(f"\nnext: echo 'I am hungry.' | {program()} translate {shlex.quote(str(folder))}")
    return 0
