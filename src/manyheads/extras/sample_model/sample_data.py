"""`manyheads sample-data DIR`: writes the small text files that README and the guides use in their examples."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.command_line.parsing import command, program
from manyheads.cli.process import echo
from manyheads.config.options import CommandPage, argument, option
from manyheads.data.corpora import load_novel, load_tatoeba
from manyheads.errors import ConfigError, SaveError
from manyheads.files.commit import write_file


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


_NUM_SENTENCES = 100

_ATTRIBUTION = """train.en, train.de, valid.en, valid.de, sentences.en, references.de

Sentences from tatoeba.org by way of www.manythings.org/anki, CC BY 2.0 FR
(https://creativecommons.org/licenses/by/2.0/fr/)

A selection was made and the two sides were written to files of their own; the sentences were not changed. The source
warns that the sentences contain errors.

novel.txt

Crime and Punishment by Fyodor Dostoevsky, translated by Constance Garnett, whole and unchanged. The novel (1866) and
this translation (1914) are in the public domain in the United States and, as far as is known, elsewhere.
"""


def sample_files(num_pairs: int) -> dict[str, bytes]:
    """Return name -> content of every file.

    Args: num_pairs: of train.en and train.de; the first ones of the embedded corpus.

    Raises: ConfigError: there are not so many. DataError: the installed corpora are damaged.
    """
    train = load_tatoeba("train")
    if not 1 <= num_pairs <= len(train):
        raise ConfigError(f"--pairs is {num_pairs}; it must be at least 1 and at most {len(train)}, which is all.")
    parts = {
        "train": ("train.en", "train.de", train[:num_pairs]),
        "valid": ("valid.en", "valid.de", load_tatoeba("valid")),
        "test": ("sentences.en", "references.de", load_tatoeba("test")[:_NUM_SENTENCES]),
    }
    files: dict[str, bytes] = {}
    for source_name, target_name, pairs in parts.values():
        files[source_name] = "".join(f"{source}\n" for source, _ in pairs).encode()
        files[target_name] = "".join(f"{target}\n" for _, target in pairs).encode()
    files["novel.txt"] = b"".join(load_novel().values())
    files["ATTRIBUTION.txt"] = _ATTRIBUTION.encode()
    return files


def write_new_files(folder: Path, files: Mapping[str, bytes]) -> list[str]:
    """Write the files that are not there yet.

    Args: files: name -> content.

    Returns: the names of the written files.
    Raises: SaveError: the folder is a file, or a name is taken by something else; then nothing was written. A file
        cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise SaveError(f"{folder} is a file, so no files can be written into it; name another folder.")
    missing = [name for name in files if not (folder / name).is_symlink() and not (folder / name).exists()]
    for name, content in files.items():
        path = folder / name
        # The size is compared first, because the file may be huge.
        is_same = path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content
        if name not in missing and not is_same:
            raise SaveError(
                f"{path} exists already with other content, so nothing was written; move it away, or name another"
                " folder."
            )
    is_new = not folder.exists()
    try:
        for name in missing:
            write_file(folder / name, files[name])
    except SaveError:
        if is_new:
            with suppress(OSError):  # it holds the files that were written
                folder.rmdir()
        raise
    return missing
