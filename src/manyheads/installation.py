"""How this copy of manyheads was installed, and the addresses of the project, both from the metadata of the package.

A copy without metadata (a folder on PYTHONPATH) has no addresses. Nothing here reads a file of the repository.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from manyheads.errors import MissingExtraError

if TYPE_CHECKING:
    from importlib import metadata

NAME = "manyheads"

Address = Literal["Index", "Repository", "Documentation"]


def address(label: Address) -> str | None:
    """Return the project's address of a kind, None where it has none (yet)."""
    distribution = _distribution()
    lines = [] if distribution is None else distribution.metadata.get_all("Project-URL") or []
    links = dict(line.split(", ", 1) for line in lines)
    return links.get(label)


def install_command(extra: str = "") -> str:
    """Return the command of a shell that installs this package, with an extra, for the way this copy was installed.

    From an index that is not known to be ours, it installs the packages of the extra instead of naming this one.
    """
    distribution = _distribution()
    suffix = f"[{extra}]" if extra else ""
    origin = _origin(distribution)
    if origin is None and distribution is not None:
        if address("Index") is None and (packages := _packages(distribution, extra)):
            return shlex.join(["pip", "install", *packages])
        if address("Index") is not None:
            return f"pip install {shlex.quote(NAME + suffix)}"
    if origin is None:
        return _from_clone(suffix)
    url = urlsplit(origin["url"])
    if url.scheme == "file":
        from urllib.request import url2pathname

        place = Path(url2pathname(url.path))
        options = ["-e"] if origin.get("dir_info", {}).get("editable") else []
        if place.exists():
            return shlex.join(["pip", "install", *options, f"{place}{suffix}"])
        packages = _packages(distribution, extra)  # the folder or the wheel is gone
        return shlex.join(["pip", "install", *packages]) if packages else _from_clone(suffix)
    link = origin["url"]
    if (source := origin.get("vcs_info")) is not None:
        link = f"{source['vcs']}+{link}@{source['commit_id']}"
    if folder := origin.get("subdirectory"):
        link += f"#subdirectory={folder}"
    return f"pip install {shlex.quote(f'{NAME}{suffix} @ {link}')}"


@contextmanager
def needing_extra(why: str, extra: str) -> Iterator[None]:
    """Import an optional package within the block.

    Args:
        why: the first half of the message, such as "Markdown needs the package markdown-it-py".
        extra: of pyproject.toml; the message gives the command for the way this copy was installed.

    Raises: MissingExtraError: it is not installed.
    """
    try:
        yield
    except ImportError as error:
        missing = MissingExtraError(f"{why}: {install_command(extra)}.")
        missing.why = why
        raise missing from error


def _from_clone(suffix: str) -> str:
    """Return the command for a copy without metadata: its folder, where this is a whole clone or source archive."""
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file() and (root / "src" / NAME).is_dir():
        return shlex.join(["pip", "install", f"{root}{suffix}"])
    return f"pip install {shlex.quote('.' + suffix)}, in a clone of {NAME}"


def _distribution() -> metadata.Distribution | None:
    """Return the metadata of this copy; None if there is none, or if what is installed is another copy."""
    from importlib import metadata  # these take two hundredths of a second, which --help has not
    from urllib.request import url2pathname

    try:
        distribution = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        return None
    here = Path(__file__).resolve()
    origin = _origin(distribution)
    if origin is not None and origin.get("dir_info", {}).get("editable"):
        root = Path(url2pathname(urlsplit(origin["url"]).path)).resolve()
        return distribution if root in here.parents else None
    installed = Path(str(distribution.locate_file(f"{NAME}/{here.name}"))).resolve()
    return distribution if installed == here else None


def _origin(distribution: metadata.Distribution | None) -> dict[str, Any] | None:
    """Return direct_url.json (PEP 610), which installers write unless the package came from an index."""
    text = None if distribution is None else distribution.read_text("direct_url.json")
    try:
        record = json.loads(text or "null")
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("url"), str) else None


def _packages(distribution: metadata.Distribution | None, extra: str) -> list[str]:
    """Return the requirements of an extra, such as ["matplotlib>=3.9"]."""
    rows = [] if distribution is None else distribution.requires or []
    marked = (row.partition(";")[::2] for row in rows)
    return [
        requirement.replace(" ", "")
        for requirement, marker in marked
        if re.search(rf"\bextra\s*==\s*['\"]{re.escape(extra)}['\"]", marker) and extra
    ]
