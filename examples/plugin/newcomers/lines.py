"""A logger that writes one line of text for each record: `manyheads train ... --loggers lines`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyheads import Logger


class LinesLogger(Logger):
    """Appends to lines.txt of the run folder; a resumed run goes on in the same file."""

    def on_start(self, start: Any) -> None:
        """See `Callback`."""
        self.file = (Path(start.run_dir) / "lines.txt").open("a", encoding="utf-8")

    def on_log(self, record: Mapping[str, Any]) -> None:
        """See `Logger`."""
        self.file.write(" ".join(f"{name}={value}" for name, value in record.items()) + "\n")

    def close(self) -> None:
        """Also called where the run did not begin."""
        if hasattr(self, "file"):
            self.file.close()
