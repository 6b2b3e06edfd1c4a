"""Learning curves and TensorBoard files during training; both optional, with one notice if they are missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.errors import DataError, MissingExtraError, SaveError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from manyheads.extras.inspect.drawings.curves import Metrics

__all__ = ["Board", "CurvePainter"]


class CurvePainter:
    """Redraws plots/learning-curve.png and .svg from metrics.jsonl.

    Args:
        metrics: the file of records.
        plots: folder of the plots.
        warn: called once if no plot can be drawn.
    """

    def __init__(self, metrics: Path, plots: Path, warn: Callable[[str], None]) -> None:
        self._metrics = metrics
        self._records: Metrics | None = None
        self._plots = plots
        self._warn = warn
        self._off = False
        self._drawn: tuple[int, tuple[Path, ...]] = (-1, ())

    def draw(self) -> tuple[Path, ...]:
        """Return the paths of the plots; none if they could not be drawn, which never ends a run."""
        if self._off:
            return ()
        from manyheads.extras.inspect.drawings.curves import Metrics, learning_curve_figure
        from manyheads.extras.inspect.drawings.figure import save_figure

        try:
            size = self._metrics.stat().st_size
            if size != self._drawn[0]:  # at the end of a run the last validation has already drawn it
                self._records = self._records or Metrics(self._metrics)
                figure = learning_curve_figure(self._records.read())
                self._drawn = (size, save_figure(figure, self._plots / "learning-curve"))
            return self._drawn[1]
        except (MissingExtraError, SaveError, DataError, OSError) as error:
            self._off = True
            self._warn(f"No learning curve: {error}")
            return ()


class Board:
    """Writes metrics to TensorBoard files if the package is installed. A failure never ends a run.

    Args:
        folder: folder of the files.
        first_step: later steps in older files are hidden, because a resumed run writes them again.
        warn: called once if writing fails.
    """

    def __init__(self, folder: Path, first_step: int, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._first_step = first_step
        self._warn = warn
        self._writer: SummaryWriter | None = None
        self._off = False

    def add(self, record: Mapping[str, Any]) -> None:
        """Write one record."""
        try:
            if self._writer is None and not self._off:
                self._open()
            if self._writer is not None and not self._off:
                for key, value in record.items():
                    if isinstance(value, int | float) and key not in ("step", "of_the_first"):
                        self._writer.add_scalar(key, value, record["step"])
        except OSError as error:
            self._off = True
            self._warn(f"No more TensorBoard files: {error.strerror or error} ({self._folder}).")

    def close(self) -> None:
        """Write buffered records."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()

    def _open(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._off = True
            return
        _silence_writers()
        # Also at the beginning: the run may have been killed before its first checkpoint.
        self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step + 1)


def _silence_writers() -> None:
    """Suppress the traceback that TensorBoard's writer thread prints in addition to raising the error in our thread."""
    before = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        if not (isinstance(failure.exc_value, OSError) and type(failure.thread).__module__.startswith("tensorboard.")):
            before(failure)

    threading.excepthook = hook
