"""Where plain lines go: whether they may have colours, and whether a notebook keeps them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyheads.training.record.log import Stream

_STYLES = {"warning: ": "33", "validation at ": "1;36", "  ": "2"}
"""How a line begins -> its style, the numbers of the escape sequence ESC [ ... m: yellow, bold cyan, faint."""


def wants_colours() -> bool:
    """Return whether the environment asks for colours also where nothing is a terminal, as notebooks do."""
    return bool(os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR")


def is_in_notebook() -> bool:
    """Return whether a notebook's kernel is this process, or has started it."""
    return "JPY_PARENT_PID" in os.environ or "matplotlib_inline" in os.environ.get("MPLBACKEND", "")


def is_kernel() -> bool:
    """Return whether this process is a notebook's kernel, which can change what a cell shows."""
    module = sys.modules.get("IPython")
    return module is not None and getattr(module.get_ipython(), "kernel", None) is not None


class ColouredLines:
    """A stream whose lines get colours by how they begin. Only colours: nothing is moved, removed or written again.

    Args: stream: where they go.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write one line, with its end."""
        style = next((style for begin, style in _STYLES.items() if text.startswith(begin)), "")
        line = text.removesuffix("\n")
        self._stream.write(f"\x1b[{style}m{line}\x1b[0m\n" if style else text)

    def flush(self) -> None:
        """Write what is buffered."""
        self._stream.flush()
