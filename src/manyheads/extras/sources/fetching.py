"""Fetching of files by https: addresses that are refused, redirects, limits, resume, a cache, and sources.lock.

The cache is `~/.cache/manyheads/sources`, or the folder that MANYHEADS_SOURCES names. A file that is not complete has
the ending `.part` there, and the next command continues it.

Unpacking of archives that were fetched: zip and tar, into a folder beside them, within limits.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import ipaddress
import json
import lzma
import os
import re
import socket
import ssl
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import SplitResult, urljoin, urlsplit

from manyheads.data.lines import Progress, phase_progress
from manyheads.errors import DataError, ModelFileError
from manyheads.files.commit import check_free_space, make_folder, remove_folder, saving, write_folder, write_text
from manyheads.files.output_safety import locked
from manyheads.files.safe_open import check_no_link, open_regular, open_to_append, read_limited
from manyheads.files.verify import MANIFEST, read_object

LOCK, VERSION = "sources.lock", 1
TRUSTED: set[str] = set()
"""Origins, such as http://127.0.0.1:8000, that need neither https nor a public address; for tests."""
MOST_REDIRECTS = 5
BLOCK_BYTES = 2**20
SECONDS = 60.0
_MOST_LABEL = 64
"""RFC 1035: a part of a name, between dots, is shorter."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""RFC 6052: the last four bytes are an address of version 4."""
_REDIRECTS = (301, 302, 303, 307, 308)


def cache_folder() -> Path:
    """Return the folder of fetched files."""
    return Path(os.environ.get("MANYHEADS_SOURCES") or Path.home() / ".cache" / "manyheads" / "sources")


@dataclass
class Record:
    """Size and digests of a file. sums: md5, sha1 and sha256 -> hexadecimal digest."""

    num_bytes: int
    sums: dict[str, str]


@dataclass
class Lock:
    """sources.lock beside the data: address -> bytes and SHA-256 of what was fetched first.

    Args: update: replace records that differ.
    """

    path: Path
    update: bool = False
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_changed: bool = False

    @classmethod
    def beside(cls, output: Path, update: bool = False) -> Lock:
        """Read the file beside a folder of data; there may be none. Raises: DataError: it is damaged."""
        path = output.absolute().with_name(LOCK)
        if not path.is_file():
            return cls(path, update)
        remedy = "restore it, or remove it and fetch again"
        try:
            content = read_object(path)
        except ModelFileError as error:
            raise DataError(f"{str(error).rstrip('.')}; {remedy}.") from None
        files, version = content.get("files"), content.get("version")
        if version != VERSION:
            raise DataError(f"{path} has the version {version!r}, and only {VERSION} is read; {remedy}.")
        if not isinstance(files, dict) or not all(isinstance(one, dict) for one in files.values()):
            raise DataError(f"{path} is damaged: it has no `files`; {remedy}.")
        return cls(path, update, files)

    def check(self, url: str, found: Record) -> None:
        """Compare a file with its record, or record it. Raises: DataError: it differs."""
        digest = found.sums["sha256"]
        own = {"bytes": found.num_bytes, "sha256": digest}
        before = self.files.get(url)
        if before == own:
            return
        if before is not None and not self.update:
            raise DataError(
                f"{url} has changed: {self.path} records {before.get('bytes')} bytes with SHA-256"
                f" {str(before.get('sha256'))[:12]}, fetched were {found.num_bytes} with {digest[:12]}. If that is"
                " right, --update records the new file."
            )
        self.files[url], self.is_changed = own, True

    def save(self) -> None:
        """Write it, if it has changed. Raises: SaveError: it cannot be written."""
        if self.is_changed:
            write_text(
                self.path, json.dumps({"version": VERSION, "files": self.files}, indent=1, sort_keys=True) + "\n"
            )


def check_address(url: str) -> SplitResult:
    """Return the parts of an address that may be fetched.

    Raises: DataError: it is not https, or names no host, or has a password in it.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise DataError(f"{url} is not an address: {error}.") from None
    if _origin(parts) in TRUSTED:
        return parts
    if parts.scheme != "https":
        raise DataError(f"{url} is not fetched: its scheme is {parts.scheme or 'missing'}, and only https is read.")
    if not host or parts.username is not None or not re.fullmatch(r"[!-~]+", url) or port == 0:
        raise DataError(f"{url} is not an address that is fetched: https://HOST/PATH, without a password or spaces.")
    try:
        if not _is_public(host):
            raise DataError(f"{url} is not fetched: {host} is an address of a private network or of this machine.")
    except ValueError:  # a name
        if not all(0 < len(label) < _MOST_LABEL for label in host.removesuffix(".").split(".")):
            raise DataError(f"{url} is not an address: a part of its host is empty or too long.") from None
    return parts


def _is_public(address: str) -> bool:
    """Tell whether an IP address is public, and so is the one of version 4 that is inside one of version 6.

    Raises: ValueError: it is no IP address.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    inside: list[ipaddress.IPv4Address | None] = []
    if isinstance(found, ipaddress.IPv6Address):
        inside = [found.ipv4_mapped, found.sixtofour, *(found.teredo or ())]
        if found in _NAT64:
            inside.append(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF))
    return all(one is None or (one.is_global and not one.is_multicast) for one in (found, *inside))


def _origin(parts: SplitResult) -> str:
    return f"{parts.scheme}://{parts.netloc}"


def public_address(host: str, port: int) -> str:
    """Return an address of a host. Raises: DataError: one of them is private. OSError: the name is unknown."""
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in found:
        if not _is_public(address):
            raise DataError(
                f"{host} is not fetched from: its address {address} is one of a private network or of this machine."
            )
    return found[0]


class _PublicConnection(http.client.HTTPSConnection):
    """Connects to the address that was checked, so that a second look-up cannot give another one."""

    def connect(self) -> None:
        address = public_address(self.host, self.port)
        plain = socket.create_connection((address, self.port), SECONDS)
        self.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=self.host)


def _connect(parts: SplitResult) -> http.client.HTTPConnection:
    host = parts.hostname or ""
    if _origin(parts) in TRUSTED:
        return http.client.HTTPConnection(host, parts.port, timeout=SECONDS)
    proxy = urllib.request.getproxies().get("https")
    if proxy and not urllib.request.proxy_bypass(host):  # the proxy looks the name up
        try:
            through = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
            proxy_host, proxy_port = through.hostname or "", through.port or 8080
        except ValueError as error:
            raise DataError(f"https_proxy is no address ({error}); it is http://HOST:PORT, or leave it out.") from None
        connection = http.client.HTTPSConnection(proxy_host, proxy_port, timeout=SECONDS)
        connection.set_tunnel(host, parts.port or 443)
        return connection
    return _PublicConnection(host, parts.port or 443, timeout=SECONDS)


def _redirected(url: str, at: str, place: str) -> str:
    """Return the address that a redirect leads to. Raises: DataError: it is refused."""
    try:
        to = urljoin(at, place)
        check_address(to)
    except (DataError, ValueError) as error:
        raise DataError(f"{url} redirects to another place: {str(error).rstrip('.')}.") from None
    return to


@contextmanager
def _opened(url: str, begin: int, tag: str) -> Iterator[http.client.HTTPResponse]:
    """Send a request, and follow redirects. begin: number of bytes that are there already, of the version `tag`.

    Raises: DataError: an address is refused, or a server answers with an error.
    """
    at = url
    for _ in range(MOST_REDIRECTS + 1):
        parts = check_address(at)
        connection = _connect(parts)
        headers = {"User-Agent": "manyheads", "Accept-Encoding": "identity"}
        if begin:
            headers |= {"Range": f"bytes={begin}-", "If-Range": tag}
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers=headers)
            answer = connection.getresponse()
            if answer.status in _REDIRECTS and (place := answer.getheader("Location")):
                at = _redirected(url, at, place)
                continue
            if answer.status == 416 and begin:  # nothing is left to send, or the file is another one
                begin = 0
                continue
            if answer.status == 206 and not (answer.getheader("Content-Range") or "").startswith(f"bytes {begin}-"):
                raise DataError(f"{at} sent another part of the file than was asked for; run the command again.")
            if answer.status not in (200, 206):
                raise DataError(f"{at} answered {answer.status} {answer.reason}; is the address right?")
            yield answer
            return
        finally:
            connection.close()
    raise DataError(f"{url} redirects more than {MOST_REDIRECTS} times; give the last address.")


@dataclass
class Fetcher:
    """Fetches the sources of one command. languages: of source and target, or None."""

    lock: Lock
    progress: Progress
    most_bytes: int
    languages: tuple[str | None, str | None] = (None, None)
    said: list[str] = field(default_factory=list)


def fetch(url: str, progress: Progress, most_bytes: int) -> tuple[Path, Record]:
    """Return a file in the cache, fetched if it is not there, and what it is.

    Args: progress: called with the number of bytes. most_bytes: a larger file is refused.

    Raises: DataError: the address is refused or cannot be reached, or the file is too large. SaveError: there is too
        little space, or the cache cannot be written.
    """
    check_address(url)
    path, about = _place(url)
    make_folder(path.parent)
    check_no_link(path.parent)
    busy = f"{url} is being fetched by the process {{}}; wait for it, and run the command again."
    with locked(path.with_name(f"{path.name}.lock"), lambda owner: DataError(busy.format(owner))):
        if not path.is_file():
            _download(url, path, about, progress, most_bytes)
        found = digest_of(path, progress, f"checking {_shown(url)}")
    known = read_object(about) if about.is_file() else {}
    if known.get("sha256", found.sums["sha256"]) != found.sums["sha256"]:
        raise DataError(
            f"{path} is damaged: it is not what was fetched from {url}. Remove it, and run the command again."
        )
    if not known:
        write_text(about, json.dumps({"url": url, "bytes": found.num_bytes, **found.sums}, indent=1) + "\n")
    return path, found


def is_cached(url: str) -> bool:
    """Tell whether a file is in the cache."""
    return _place(url)[0].is_file()


def forget(url: str) -> None:
    """Remove a file from the cache, so that it is fetched again."""
    path, about = _place(url)
    if (unpacked := path.with_name(f"{path.name}.files")).is_dir():
        remove_folder(unpacked)
    for each in (path, about, path.with_name(f"{path.name}.part")):
        each.unlink(missing_ok=True)


def _place(url: str) -> tuple[Path, Path]:
    """Return the place of a file in the cache, and of what is known of it."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", urlsplit(url).path.rpartition("/")[2])[-100:].lstrip(".") or "file"
    path = cache_folder() / hashlib.sha256(url.encode()).hexdigest()[:16] / name
    return path, path.with_name(f"{path.name}.json")


def _shown(url: str) -> str:
    return urlsplit(url).path.rpartition("/")[2] or url


def _download(url: str, path: Path, about: Path, progress: Progress, most_bytes: int) -> None:
    part, tags = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.tag")
    about.unlink(missing_ok=True)
    tag = read_limited(tags, 1000).decode("latin-1") if part.is_file() and tags.is_file() else ""
    begin = part.stat().st_size if tag else 0
    again = "what was fetched stays, and the same command continues"
    try:
        with _opened(url, begin, tag) as answer:
            begin = begin if answer.status == 206 else 0
            length = answer.getheader("Content-Length")
            total = begin + int(length) if length and length.isdigit() else 0
            if total > most_bytes:
                raise _too_large(url, f"{total:,}", most_bytes)
            check_free_space(path, total - begin)
            if not begin:
                part.unlink(missing_ok=True)
            write_text(tags, _validator(answer))
            on_progress = phase_progress(progress, f"bytes of {_shown(url)}", total, begin)
            with saving(part, total), open_to_append(part) as file:
                done = 0
                while block := answer.read(BLOCK_BYTES):
                    done += len(block)
                    if begin + done > most_bytes:
                        raise _too_large(url, f"more than {most_bytes:,}", most_bytes)
                    file.write(block)
                    on_progress(done)
                os.fsync(file.fileno())
            if total and begin + done != total:
                raise DataError(f"{url} ended after {begin + done:,} of {total:,} bytes; {again}.")
    except DataError as error:
        if "bytes are fetched" in str(error):
            part.unlink(missing_ok=True)
        raise
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DataError(f"{url} cannot be fetched: {reason}. Check the network; {again}.") from error
    with saving(path, 0):
        part.replace(path)
        tags.unlink(missing_ok=True)


def _validator(answer: http.client.HTTPResponse) -> str:
    """Return what tells this version of a file from another; empty: it cannot be continued."""
    tag = answer.getheader("ETag") or ""
    return tag if tag and not tag.startswith("W/") else answer.getheader("Last-Modified") or ""


def _too_large(url: str, size: str, most_bytes: int) -> DataError:
    return DataError(
        f"{url} has {size} bytes, and at most {most_bytes:,} bytes are fetched; --most-bytes raises the limit."
    )


def digest_of(path: Path, progress: Progress, phase: str) -> Record:
    """Return size and digests of a file. Raises: DataError: it cannot be read."""
    sums = {name: hashlib.new(name, usedforsecurity=False) for name in ("md5", "sha1", "sha256")}
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            on_progress, done = phase_progress(progress, phase, size), 0
            while block := file.read(BLOCK_BYTES):
                for one in sums.values():
                    one.update(block)
                done += len(block)
                on_progress(done)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    return Record(done, {name: one.hexdigest() for name, one in sums.items()})


ZIP, TARS = ".zip", (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
EXPANSION, SPARE_BYTES = 40, 64 * 2**20
"""Text becomes ten times smaller at most; an archive that expands to more than this is made to fill a disk."""
MOST_FILES = 10_000
UNPACKED = ".files"
_RECORD = ".archive.json"
"""In the folder: size and time of the archive, so that another archive of the same name is unpacked again."""
_DAMAGES = (
    *(zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError),
    *(NotImplementedError, RuntimeError, ValueError, TypeError, OSError),
)
"""The errors that zipfile and tarfile raise: of bzip2 an OSError, of a name that is not UTF-8 a ValueError."""


def is_archive(path: Path) -> bool:
    """Tell whether a file's name is that of an archive."""
    return path.name.lower().endswith((ZIP, *TARS))


def unpack(path: Path, progress: Progress) -> Path:
    """Return the folder of an archive's files, which is made if it is not there, or is that of another archive.

    Raises: DataError: the archive is damaged, has a link, a place outside or a name twice, or expands beyond its limit;
        or a folder that is not ours has the name. SaveError: there is too little space.
    """
    folder = path.with_name(f"{path.name}{UNPACKED}")
    status = path.stat()
    record = {"size": status.st_size, "time": status.st_mtime_ns}
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MANIFEST).is_file():
            raise DataError(f"{path} is unpacked into {folder}, which holds something else; move one of them away.")
        if (folder / _RECORD).is_file() and read_object(folder / _RECORD) == record:
            return folder
    most = status.st_size * EXPANSION + SPARE_BYTES
    on_progress = phase_progress(progress, f"unpacking {path.name}", 0)

    def write(aside: Path) -> None:
        done = 0
        for count, (name, size, content) in enumerate(_members(path), 1):
            if done + size > most or count > MOST_FILES:
                raise DataError(
                    f"{path.name} expands to more than {most:,} bytes or {MOST_FILES:,} files, {EXPANSION} times its"
                    " size; it is left as it is. If it is right, unpack it yourself and give the folder to --from."
                )
            check_free_space(aside, size)
            place = aside / name
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                file = place.open("xb")
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                raise DataError(f"{path.name} has {name} twice, or as a file and a folder.") from None
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                raise DataError(f"{path.name} has a file whose name is too long for this disk.") from None
            with file:
                while block := _read(content, path):
                    done += len(block)
                    if done > most:
                        raise DataError(f"{path.name} expands to more than {most:,} bytes, {EXPANSION} times its size.")
                    file.write(block)
                    on_progress(done)
        (aside / _RECORD).write_text(json.dumps(record), encoding="utf-8")

    write_folder(folder, write, replace=True)
    return folder


def _read(content: IO[bytes], path: Path) -> bytes:
    """Return the next bytes of a member. Raises: DataError: they are damaged."""
    try:
        return content.read(2**20)
    except _DAMAGES as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: BaseException) -> DataError:
    return DataError(f"{path.name} is not an intact archive: {error}. Copy it again; if it was fetched, remove {path}.")


def _members(path: Path) -> Iterator[tuple[PurePosixPath, int, IO[bytes]]]:
    """Yield name, size and content of each file. Raises: DataError: one is no file, or lies outside; or a damage."""
    try:
        with open_regular(path) as file:
            yield from _zip_members(path, file) if path.name.lower().endswith(ZIP) else _tar_members(path, file)
    except _DAMAGES as error:
        raise _damaged(path, error) from error


def _zip_members(path: Path, file: IO[bytes]) -> Iterator[tuple[PurePosixPath, int, IO[bytes]]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.filename.endswith("/"):
                continue
            if (member.external_attr >> 16) & 0o170000 not in (0, 0o100000):
                raise DataError(f"{path.name} has {member.filename}, which is a link or a device, not a file.")
            with archive.open(member) as content:
                yield _safe(member.filename, path), member.file_size, content


def _tar_members(path: Path, file: IO[bytes]) -> Iterator[tuple[PurePosixPath, int, IO[bytes]]]:
    with tarfile.open(fileobj=file, mode="r|*") as archive:
        for entry in archive:
            if entry.isdir():
                continue
            unpacked = archive.extractfile(entry) if entry.isreg() else None
            if unpacked is None:
                raise DataError(f"{path.name} has {entry.name}, which is a link or a device, not a file.")
            yield _safe(entry.name, path), entry.size, unpacked


def _safe(name: str, archive: Path) -> PurePosixPath:
    """Raises: DataError: a name leads out of the folder."""
    place = PurePosixPath(name)
    parts = [part for part in place.parts if part != "."]
    if place.is_absolute() or ".." in parts or not parts or any(mark in name for mark in ("\\", "\0", ":")):
        raise DataError(f"{archive.name} has the file {name!r}, whose place is outside of the folder of the archive.")
    return PurePosixPath(*parts)
