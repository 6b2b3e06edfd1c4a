"""`manyheads sample-data DIR`: writes the small text files that README and the guides use in their examples."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.command_line.pages import program
from manyheads.cli.command_line.parsing import command
from manyheads.cli.streams import echo
from manyheads.config.options import CommandPage, argument, option


@dataclass(frozen=True, kw_only=True)
class SampleDataOptions:
    """Options of `manyheads sample-data`."""

    folder: str = argument("Folder for the files; it is created if it does not exist.", metavar="DIR")
    pairs: int = option("Sentence pairs in train.en and train.de, at most 60,000.", default=20_000, metavar="N")


PAGE = CommandPage(
    SampleDataOptions,
    """Write the text files that README and the guides use: English-German sentence pairs (train.en, train.de, valid.en,
valid.de, sentences.en, references.de), a novel (novel.txt), and their sources (ATTRIBUTION.txt).
sentences.en and its translations, references.de, are in no training data: neither in train.* nor in the demo's.
The files come with the package; nothing is downloaded. An existing file with other content is not replaced.""",
    (
        "manyheads sample-data sample",
        "manyheads sample-data sample/all --pairs 60000",
    ),
)


@command(PAGE, "sample-data")
def run(options: SampleDataOptions) -> int:
    """Write the files. Returns: the exit code."""
    folder = Path(options.folder)
    from manyheads.data.corpora.sample import sample_files, write_new_files

    files = sample_files(options.pairs)
    written = write_new_files(folder, files)
    width = max(len(str(folder / name)) for name in files)
    for name, content in files.items():
        state = "" if name in written else "  (was there already)"
        echo(f"{folder / name!s:<{width}}  {content.count(10):>6,} lines{state}")
    sides = (("source", "train.en"), ("target", "train.de"), ("valid-source", "valid.en"), ("valid-target", "valid.de"))
    given = " ".join(f"--{option} {shlex.quote(str(folder / name))}" for option, name in sides)
    echo(f"\nnext: {program()} prepare {given} --vocab-size 4000 --output data/mine")
    return 0
