"""A thread that shows how long the work has taken, also while the working thread is in one long computation.

A clean end on signals, also for work that waits in a library or for a pipe.

Progress of work in phases: a bar for each in a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from manyheads.distributed.process import this_process

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Console
    from rich.progress import TaskID

    from manyheads.data.lines import Progress
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


class Phase:
    """The current phase of the work: its name, its progress, and the time since it began.

    Args: clock: seconds, of any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now = ("", 0, 0, clock(), 0)

    def begin(self, what: str, done: int = 0, total: int = 0) -> None:
        """Set all of it; the time starts again where `what` changes. total: 0 while it is unknown."""
        before, _, _, since, first = self._now
        if what != before:
            since, first = self._clock(), done
        # One assignment, so the displaying thread never sees a part of a change.
        self._now = (what, done, total, since, first)

    def seconds(self) -> float:
        """Since `what` changed."""
        return self._clock() - self._now[3]

    def describe(self) -> str:
        """`translating: 512 of 1,000, 12s so far, 11s left`; empty before the first `begin`."""
        from manyheads.training.record.log import format_seconds  # imported only when needed: --help must be fast

        what, done, total, since, first = self._now
        if not what:
            return ""
        count = f"{done:,} of {total:,}, " if total else f"{done:,}, " if done else ""
        seconds = self._clock() - since
        left = f", {format_seconds(seconds * (total - done) / (done - first))} left" if first < done < total else ""
        return f"{what}: {count}{format_seconds(seconds)} so far{left}"


class Heartbeat:
    """Calls a function again and again, from a thread of its own, inside a `with` block.

    The thread ends with the block. If the function cannot write any more (a closed terminal), the thread ends early.

    Args:
        beat: must be safe to call beside the thread that works, and short.
        seconds: between two calls.
    """

    def __init__(self, beat: Callable[[], None], seconds: float) -> None:
        self._beat = beat
        self._seconds = seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._end.wait(self._seconds):
                self._beat()
        except (OSError, ValueError):
            return  # the stream is closed; the working thread will notice it itself


T = TypeVar("T")
GRACE_SECONDS = 3.0


class StoppedBySignalError(Exception):
    """Raised inside the work by its own progress function, where nothing is half done. `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


def interruptible(work: Callable[[Progress], T], show: Progress, abandon: Callable[[], None]) -> T:
    """Do work that SIGINT, SIGTERM and SIGHUP can stop even while it waits in a library or for a pipe.

    The work runs in a thread of its own. After a signal its next call of the progress function raises
    StoppedBySignalError, so that it cleans up by itself; if no call comes within a few seconds, `abandon` cleans up
    and the process ends at once with 128 + the signal's number.

    Args:
        work: called with the progress function.
        show: what the progress function shows.
        abandon: removes whatever is half written. Called from the main thread while the work still stands.

    Raises: StoppedBySignalError; whatever the work raises.
    """
    caught: list[int] = []
    result: list[T] = []
    failure: list[BaseException] = []
    done = threading.Event()

    def progress(what: str, count: int, total: int) -> None:
        if caught:
            raise StoppedBySignalError(caught[0])
        show(what, count, total)

    def target() -> None:
        try:
            result.append(work(progress))
        except BaseException as error:
            failure.append(error)
        finally:
            done.set()

    def handle(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, handle) for number in _signals()}
    try:
        threading.Thread(target=target, daemon=True).start()
        since = None
        while not done.wait(0.05):
            since = since or (time.monotonic() if caught else None)
            if since and (time.monotonic() - since > GRACE_SECONDS or len(caught) > 1):
                abandon()
                os._exit(128 + caught[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if failure:
        raise failure[0]
    return result[0]


def _signals() -> tuple[signal.Signals, ...]:
    """Only the main thread may handle signals. SIGHUP stays ignored where it is ignored, as by nohup."""
    if threading.current_thread() is not threading.main_thread():
        return ()
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # Windows has none
        return signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    return signal.SIGINT, signal.SIGTERM


DELAY_SECONDS = 2.0
PLAIN_SECONDS = 10.0
BEAT_SECONDS = 0.5
_KEPT_LINES = 4
"""Lines in a notebook for each time that the work takes e times as long."""


class Phases(Protocol):
    """Shows the progress of work; it is a `data.lines.Progress`."""

    def __call__(self, what: str, done: int, total: int, /) -> None:
        """The work is now at `done` of `total` of a phase."""

    def rest(self) -> None:
        """Report that no work is done until the next call, for example while waiting for input; nothing is shown in the
        meantime."""

    def hidden(self, when: bool) -> AbstractContextManager[None]:
        """If `when` is true, clear the terminal's last lines for the text that the block writes."""


@contextmanager
def showing_phases(*, delay: float = 0.0, quiet: bool = False) -> Iterator[Phases]:
    """Show phases on standard error: a bar each in a terminal, else lines, at least one every ten seconds.

    Args:
        delay: seconds before anything is shown; with a delay, bars vanish at the end.
        quiet: show nothing, for all ranks but the main one.
    """
    if quiet:
        yield PhaseLines(math.inf)
        return
    shown: PhaseLines | PhaseBars = PhaseLines(delay)
    if sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        if not console.is_dumb_terminal:
            shown = PhaseBars(console, delay)
    try:
        with Heartbeat(shown.beat, BEAT_SECONDS):
            shown.beat()
            yield shown
    finally:
        shown.close()


@contextmanager
def showing_if_long() -> Iterator[Phases]:
    """Show phases of a command that is usually quick: nothing for two seconds; of several ranks the main one shows."""
    with showing_phases(delay=DELAY_SECONDS, quiet=not this_process().is_main) as show:
        yield show


class PhaseLines:
    """Plain lines: every ten seconds, and without a delay also when a phase begins or ends.

    Args:
        delay: seconds before the first line.
        clock: seconds, of any origin.
    """

    def __init__(self, delay: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._delay = delay
        self._clock = clock
        self._lock = threading.Lock()
        self._began: float | None = clock()
        self._shown: float | None = None
        self._name = ""
        self._phase = Phase(clock)

    def __call__(self, what: str, done: int, total: int, /) -> None:
        with self._lock:
            if self._began is None:
                self._began = self._clock()
            self._phase.begin(what, done, total)
            changed, self._name = what != self._name, what
            if not self._delay and (changed or done == total or self._is_due()):
                self._write(f"{what}: {done:,}" + (f" of {total:,}" if total else ""))

    def beat(self) -> None:
        """Write a line if one is due; called several times a second."""
        with self._lock:
            if self._name and self._began is not None and self._is_due():
                self._write(self._phase.describe())

    def rest(self) -> None:
        with self._lock:
            self._began, self._name, self._phase = None, "", Phase(self._clock)

    @contextmanager
    def hidden(self, when: bool) -> Iterator[None]:
        """See `Phases.hidden`: lines need not be cleared."""
        yield

    def close(self) -> None:
        """Nothing is left to do."""

    def _is_due(self) -> bool:
        now = self._clock()
        if self._began is None or now - self._began < self._delay:
            return False
        wait = max(PLAIN_SECONDS, (now - self._began) / _KEPT_LINES) if is_in_notebook() else PLAIN_SECONDS
        return self._shown is None or now - self._shown >= wait - BEAT_SECONDS

    def _write(self, line: str) -> None:
        self._shown = self._clock()
        sys.stderr.write(line + "\n")  # one call: other threads' lines stay whole
        sys.stderr.flush()


class PhaseBars:
    """A bar for each phase at the bottom of a terminal.

    Args:
        console: of the terminal.
        delay: seconds before the bars appear; they then vanish at the end.
        clock: seconds, of any origin.
    """

    def __init__(self, console: Console, delay: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as TimeRemaining

        columns = (
            TextColumn("{task.description:<20}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        # Standard output is never redirected: results go there as they are.
        self._bars = Progress(*columns, TimeRemaining(), console=console, transient=bool(delay), redirect_stdout=False)
        self._delay = delay
        self._clock = clock
        self._lock = threading.Lock()
        self._began: float | None = clock()
        self._started = False
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int, /) -> None:
        with self._lock:
            if self._began is None:
                self._began = self._clock()
            if what not in self._tasks:
                self._tasks[what] = self._bars.add_task(what, total=None)
            self._bars.update(self._tasks[what], completed=done, total=total or None)

    def beat(self) -> None:
        """Let the bars appear if it is time; called several times a second. They redraw themselves."""
        with self._lock:
            if not self._started and self._began is not None and self._clock() - self._began >= self._delay:
                self._bars.start()
                self._started = True

    def rest(self) -> None:
        with self._lock:
            self._stop()
            for task in self._tasks.values():
                self._bars.remove_task(task)
            self._began, self._tasks = None, {}

    @contextmanager
    def hidden(self, when: bool) -> Iterator[None]:
        with self._lock:
            if when:
                self._stop()  # the next beat lets them appear again
            yield

    def close(self) -> None:
        """Leave the terminal as the bars are at last, or without them if there was a delay."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._started:
            self._bars.stop()
            self._started = False
