"""The attention of a whole model as one HTML file that works offline; see `offline_page`.

Weights are stored as 8 bits of their square root, which is most precise for small weights: the error is at most 0.004.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads.errors import ShapeError
from manyheads.extras.inspect.drawings.attention import AttentionView, shown_token, thinned
from manyheads.files.commit import write_text

if TYPE_CHECKING:
    from manyheads.extras.inspect.drawings.figure import Array


def offline_page(kind: str, record: Any, *, title: str) -> str:
    """Return a page.

    Args:
        kind: name of its template, script and style in the folder `page`; they follow `head.html` and `theme.css`.
        record: the data, as JSON has it; the script finds it in the element `data`.
        title: of the window; its characters must be printable.
    """
    # In a script element only "<" can end the element or open a comment.
    data = json.dumps(record, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    script = _file(f"{kind}.js")
    policy = f"script-src {_digest(script)}; require-trusted-types-for 'script'; trusted-types 'none'"
    before, after = _file(f"{kind}.html").split("{{data}}")
    return _head(kind, policy, title) + before + data + after.replace("{{script}}", script)


def still_page(body: str, *, title: str) -> str:
    """Return a page without scripts. Args: body: HTML; title: of the window, as text."""
    return f"{_head('still', '', title)}{body}</body>\n</html>\n"


def _head(kind: str, policy: str, title: str) -> str:
    """Return a page up to its body. Args: policy: what it allows besides its style and pictures in itself."""
    style = _file("theme.css") + _file(f"{kind}.css")
    parts = ["default-src 'none'", policy, f"style-src {_digest(style)}", "img-src data:", "base-uri 'none'"]
    head = _file("head.html")
    # Insert the title last, so that placeholders in it are not replaced.
    for name, value in (
        ("policy", "; ".join(filter(None, [*parts, "form-action 'none'"]))),
        ("style", style),
        ("title", html.escape(title)),
    ):
        head = head.replace(f"{{{{{name}}}}}", value)
    return head


def save_page(page: str, path: Path | str) -> Path:
    """Write a page in one step. Raises: SaveError: it cannot be written."""
    final = Path(path)
    write_text(final, page)
    return final


def _file(name: str) -> str:
    return files("manyheads.extras.inspect.drawings").joinpath("page", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


MOST_CELLS = 512
"""Rows and columns of a picture; longer sequences are thinned."""


def attention_page(views: Sequence[AttentionView], *, title: str, note: str = "", most: int = MOST_CELLS) -> str:
    """Return the page.

    Args:
        views: of one model: `encoder`, `decoder`, `cross` ...
        title: the text that was read.
        note: a line below the title: the model and its size.
        most: maximum number of rows and columns; longer sequences are thinned.

    Raises: ShapeError: there is no view, two have the same name, or most is below 1.
    """
    title, note = shown_token(title), shown_token(note)
    names = [view.name for view in views]
    if not views or len(set(names)) < len(names):
        raise ShapeError(f"views named {names}; give at least one view, and use different names.")
    record = {"title": title, "note": note, "views": [_view(thinned(view, most)) for view in views]}
    return offline_page("attention", record, title=title)


def write_page(views: Sequence[AttentionView], path: Path, *, text: str, model: str, most: int = MOST_CELLS) -> Path:
    """Write the page of a text that a model has read. For `views`, `most` and errors see `attention_page`.

    Args: text: what it read. model: the folder or file of the model; the page names its last part alone.

    Returns: the path.
    """
    sizes = ", ".join(f"{view.name} {len(view.layers)} layers x {len(view.layers[0])} heads" for view in views)
    return save_page(attention_page(views, title=text, note=f"{_name(model)}: {sizes}", most=most), path)


def _name(model: str) -> str:
    """Return the name of a model's folder, of its run where the folder is `model`: nothing of where it lies."""
    path = Path(model).absolute()
    return (path.parent.name if path.name == "model" else path.name) or model


def _view(view: AttentionView) -> dict[str, object]:
    return {
        "name": view.name,
        "queries": [_short(token) for token in view.query_tokens],
        "keys": [_short(token) for token in view.key_tokens],
        "memory": view.num_memory,
        "block": view.block,
        "figures": [[[_rounded(value) for value in head] for head in layer] for layer in view.figures],
        "buckets": [None if one is None else one.tolist() for one in view.buckets],
        "heads": [len(layer) for layer in view.layers],
        "layers": [_packed(layer) for layer in view.layers],
    }


def _packed(layer: Array) -> str:
    """Return the weights as compressed bytes in base64."""
    rounded = np.rint(np.sqrt(np.clip(np.nan_to_num(layer), 0.0, 1.0)) * 255).astype(np.uint8)
    return base64.b64encode(zlib.compress(rounded.tobytes(), 6)).decode("ascii")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _short(token: str) -> str:
    return token if len(token) <= 200 else f"{token[:199]}…"
