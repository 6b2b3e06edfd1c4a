"""Pages that are one HTML file each and work without a server, a network or other files.

A page contains its script, its style and its data. A content security policy allows exactly this script and style by
their digests and blocks all other code and network access.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from manyheads.files.commit import write_text

__all__ = ["offline_page", "save_page"]


def offline_page(kind: str, record: Any, *, title: str) -> str:
    """Return a page.

    Args:
        kind: name of its template, script and style in the folder `page`; they follow `head.html` and `theme.css`.
        record: the data, as JSON has it; the script finds it in the element `data`.
        title: of the window; its characters must be printable.
    """
    # In a script element only "<" can end the element or open a comment.
    data = json.dumps(record, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    script, style = _file(f"{kind}.js"), _file("theme.css") + _file(f"{kind}.css")
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; img-src data:;"
        " base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    # Insert the title and the data last, so that placeholders in them are not replaced.
    before, after = (_file("head.html") + _file(f"{kind}.html")).split("{{data}}")
    for name, value in (("policy", policy), ("style", style), ("title", html.escape(title))):
        before = before.replace(f"{{{{{name}}}}}", value)
    return before + data + after.replace("{{script}}", script)


def save_page(page: str, path: Path | str) -> Path:
    """Write a page in one step. Raises: SaveError: it cannot be written."""
    final = Path(path)
    write_text(final, page)
    return final


def _file(name: str) -> str:
    return files("manyheads.extras.inspect.drawings").joinpath("page", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"
