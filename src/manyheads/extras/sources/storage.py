"""Shards at addresses of fsspec, such as s3://bucket/folder: what is there, and fetching of each into the cache.

`file:` and `memory:` need nothing more; other schemes need the package that fsspec names. Its own rules hold for them:
which server is asked, how a user is known, and whether it is encrypted. So http and ftp are refused here.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from manyheads.config.checks import did_you_mean
from manyheads.data.lines import phase_progress
from manyheads.errors import ConfigError, DataError, ManyHeadsError
from manyheads.extras.sources import fetching
from manyheads.files.commit import check_free_space, make_folder, saving
from manyheads.files.output_safety import locked

ADDRESS = "://"
_PATTERN = set("*?[")
_INSTEAD = {
    "http": "only https is read, as url:https://...",
    "https": "give it as url:https://...",
    "hf": "give it as hf:owner/name[config]",
    "ftp": "it is not encrypted; only https is read, as url:https://...",
}


def is_address(text: str) -> bool:
    """Tell whether a SOURCE is an address of fsspec by its form."""
    return re.match(r"[A-Za-z][\w+.-]*(::|://)", text) is not None


def check_storage(text: str, option: str) -> None:
    """Raises: ConfigError: an address of fsspec is not read, or its scheme is unknown."""
    from fsspec import available_protocols

    scheme = text.partition(ADDRESS)[0]
    if "::" in text:
        raise ConfigError(f"{option} {text}: addresses inside addresses (::) are not read; unpack the files first.")
    if scheme in _INSTEAD:
        raise ConfigError(f"{option} {text} is not read in this form: {_INSTEAD[scheme]}.")
    if scheme not in available_protocols():
        raise ConfigError(
            f"{option} {text}: fsspec knows no scheme {scheme!r}.{did_you_mean(scheme, available_protocols())}"
        )


@dataclass(frozen=True)
class Shards:
    """Files at an address, in order. files: the file system. is_here: they are files of this disk."""

    files: Any
    scheme: str
    names: Sequence[str]
    is_here: bool


def listed_at(text: str, option: str, most: int) -> Shards:
    """Return the files at an address: one, those of a pattern such as s3://bucket/part-*.jsonl.zst, or of a folder.

    Raises: ConfigError: a package is missing. DataError: nothing is there, or it cannot be listed.
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    try:
        files, path = fsspec.url_to_fs(text)
        if _PATTERN & set(path):
            names = [name for name in files.glob(path) if files.isfile(name)]
        else:
            names = files.find(path) if files.isdir(path) else [path] if files.exists(path) else []
    except ImportError as error:
        raise ConfigError(f"{option} {text}: {_first_line(error)}.") from None
    except Exception as error:  # of many kinds: each package has its own
        raise DataError(
            f"{text} cannot be listed: {_first_line(error)}. Check the address, the network, and who may read it."
        ) from error
    names = sorted(name for name in names if not PurePosixPath(name).name.startswith("."))
    if not names:
        raise DataError(f"{option} {text}: there is no file.")
    if len(names) > most:
        raise DataError(f"{text} has more than {most:,} files; name a folder inside it, or a pattern.")
    return Shards(files, text.partition(ADDRESS)[0], names, isinstance(files, LocalFileSystem))


def fetch_shard(shards: Shards, name: str, fetcher: fetching.Fetcher) -> tuple[Path, fetching.Record]:
    """Return a file on this disk: itself, or in the cache, fetched if it is not there, and what it is.

    Raises: DataError: it has vanished, cannot be fetched, or is too large. SaveError: there is too little space.
    """
    if shards.is_here:
        if not Path(name).is_file():
            raise DataError(f"{name} has vanished since the folder was listed.")
        return Path(name), fetching.Record(Path(name).stat().st_size, {})
    url = f"{shards.scheme}://{name}"
    shown = re.sub(r"[^A-Za-z0-9._-]", "_", PurePosixPath(name).name)[-100:]
    path = fetching.cache_folder() / hashlib.sha256(url.encode()).hexdigest()[:16] / shown
    make_folder(path.parent)
    busy = f"{url} is being fetched by the process {{}}; wait for it, and run the command again."
    with locked(path.with_name(f"{shown}.lock"), lambda owner: DataError(busy.format(owner))):
        try:
            size = int(shards.files.info(name).get("size") or 0)
            if size > fetcher.most_bytes:
                raise DataError(
                    f"{url} has {size:,} bytes, and at most {fetcher.most_bytes:,} bytes are fetched; --most-bytes"
                    " raises the limit."
                )
            if fetcher.lock.update or not path.is_file() or path.stat().st_size != size:
                _copy(shards, name, path, size, fetcher)
        except ManyHeadsError:
            raise
        except FileNotFoundError:
            raise DataError(
                f"{url} has vanished since the folder was listed; the others that were fetched stay."
            ) from None
        except Exception as error:  # of many kinds: each package has its own
            raise DataError(
                f"{url} cannot be fetched: {_first_line(error)}. What was fetched stays, and the same command"
                " continues."
            ) from error
        return path, fetching.digest_of(path, fetcher.progress, f"checking {shown}")


def _copy(shards: Shards, name: str, path: Path, size: int, fetcher: fetching.Fetcher) -> None:
    """Write a file into the cache; it has its name when it is complete."""
    part = path.with_name(f"{path.name}.part")
    check_free_space(path, size)
    on_progress, done = phase_progress(fetcher.progress, f"bytes of {path.name}", size), 0
    try:
        with shards.files.open(name, "rb") as source, saving(part, size), part.open("wb") as file:
            while block := source.read(fetching.BLOCK_BYTES):
                done += len(block)
                if done > fetcher.most_bytes:
                    raise DataError(
                        f"{name} has more than {fetcher.most_bytes:,} bytes; --most-bytes raises the limit."
                    )
                file.write(block)
                on_progress(done)
            os.fsync(file.fileno())
        if done != size:
            raise DataError(f"{shards.scheme}://{name} ended after {done:,} of {size:,} bytes; run the command again.")
        with saving(path, 0):
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
