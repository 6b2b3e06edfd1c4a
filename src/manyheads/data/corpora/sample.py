"""The small text files that README and the guides use in their examples."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from manyheads.data.corpora.novel import load_novel
from manyheads.data.corpora.tatoeba import load_tatoeba
from manyheads.errors import ConfigError, SaveError
from manyheads.files.commit import write_file

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
