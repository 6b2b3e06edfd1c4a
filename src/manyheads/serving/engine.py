"""The engine: one thread that runs the batches of all requests.

A request is a `Job` of one or more rows. Waiting rows are admitted in order of arrival. Rows of equal key (model and
options) are combined into a batch within a token budget. Several batches run at the same time and take steps in turn,
so that a new request does not wait for the end of a long one. A batch begins when the previous batch of the same key
has ended or has run for a second. Requests that arrive until then become one batch. A row that finishes is reported at
once. A job can be cancelled at any time: its waiting rows leave at once, its running rows before the next step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from manyheads.serving.jobs import Batch, Done, Event, Failed, Job, QueueFull
from manyheads.serving.metrics import Metrics
from manyheads.serving.settings import ServingSettings

__all__ = ["Engine"]

_log = logging.getLogger(__name__)

_GATHER_SECONDS = 1.0
"""Seconds of a batch's own steps before another batch of the same key may begin.

Large batches cost less per row, and of two batches that take turns neither ends earlier than the second would if they
ran one after the other.
"""


@dataclass(eq=False)
class _Running:
    """A batch in progress. owners: (job, number of the row in the job), or None once the row is done or dropped.

    key: of its jobs. seconds: of its steps.
    """

    key: Hashable
    batch: Batch
    owners: list[tuple[Job, int] | None]
    cost: int
    seconds: float = 0.0


class Engine:
    """Runs jobs until it is closed.

    Args:
        limits: `max_waiting_tokens`, `max_batch_tokens`, `max_batch_rows`, `max_batches` and `debug_delay_seconds`.
        metrics: receives counts.
    """

    def __init__(self, limits: ServingSettings, metrics: Metrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._waiting: deque[Job] = deque()
        # Tokens of their rows that have not started. Updated, not recomputed, because short requests are frequent.
        self._waiting_tokens = 0
        self._running: list[_Running] = []
        self._changed = threading.Condition()
        self._closing = False
        self._tokens_per_second = 1_000.0
        self._thread = threading.Thread(target=self._run, name="manyheads-engine", daemon=True)
        metrics.gauge("num_requests_running", "Rows in running batches.", lambda: self.num_running)
        metrics.gauge("num_requests_waiting", "Requests with rows that have not started.", lambda: len(self._waiting))
        metrics.gauge("queue_tokens", "Tokens of the rows that wait.", lambda: self.waiting_tokens)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the current step; jobs that have not ended fail."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        """Number of rows in running batches."""
        return sum(owner is not None for running in list(self._running) for owner in running.owners)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the rows that wait."""
        with self._changed:
            return self._waiting_tokens

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue.

        Raises: QueueFull: more than `max_waiting_tokens` would wait. A job that finds the queue empty is always taken.
        """
        with self._changed:
            waiting = self._waiting_tokens
            if waiting and waiting + job.waiting_cost > self._limits.max_waiting_tokens:
                raise QueueFull(max(1, min(60, round(waiting / self._tokens_per_second))))
            self._waiting.append(job)
            self._waiting_tokens += job.waiting_cost
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Take a job out; it reports nothing more. Its running rows leave their batches before the next step."""
        with self._changed:
            job.is_over = True
            self._withdraw(job)
            self._changed.notify()

    def _withdraw(self, job: Job) -> None:
        """Take out the rows that wait. The lock is held."""
        if job in self._waiting:
            self._waiting.remove(job)
            self._waiting_tokens -= job.waiting_cost

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._running or self._closing):
                    self._changed.wait()
                if self._closing:
                    break
                admitted = self._admit()
            if admitted:
                self._begin(admitted)
            for running in list(self._running):
                self._step(running)
        for job in {*self._waiting, *(owner[0] for one in self._running for owner in one.owners if owner)}:
            self._fail(job, RuntimeError("the engine was closed"))

    def _admit(self) -> list[tuple[Job, int]]:
        """Take rows out of the queue for one new batch, if it may begin now."""
        owners: list[tuple[Job, int]] = []
        gathering = {one.key for one in self._running if one.seconds < _GATHER_SECONDS}
        first = next((job for job in self._waiting if job.key not in gathering), None)
        if first is None or len(self._running) >= self._limits.max_batches:
            return owners
        longest, width = 0, 0
        for job in [job for job in self._waiting if job.key == first.key]:
            while job.next_row < len(job.rows):
                row = job.rows[job.next_row]
                longest, width = max(longest, row.cost), width + row.width
                is_full = (len(owners) + 1) * longest > self._limits.max_batch_tokens
                if owners and (is_full or width > self._limits.max_batch_rows):
                    return owners
                owners.append((job, job.next_row))
                job.next_row += 1
                self._waiting_tokens -= row.cost
            self._waiting.remove(job)
        return owners

    def _begin(self, owners: list[tuple[Job, int]]) -> None:
        now = time.monotonic()
        rows = [job.rows[number] for job, number in owners]
        for job, number in owners:
            if number == 0:
                self._metrics.queue_time.observe(now - job.arrived)
        try:
            batch = owners[0][0].begin([row.content for row in rows])
        except Exception as error:
            self._fail_all(owners, error)
            return
        self._metrics.batch_rows.observe(sum(row.width for row in rows))
        with self._changed:
            self._running.append(_Running(owners[0][0].key, batch, list(owners), sum(row.cost for row in rows)))

    def _step(self, running: _Running) -> None:
        began = time.monotonic()
        try:
            self._drop_cancelled(running)
            if any(running.owners):
                if self._limits.debug_delay_seconds:
                    time.sleep(self._limits.debug_delay_seconds)
                self._report(running, running.batch.advance())
                seconds = time.monotonic() - began
                running.seconds += seconds
                self._metrics.steps.add()
                self._metrics.each_token.observe(seconds)
        except Exception as error:
            self._fail_all([owner for owner in running.owners if owner is not None], error)
            running.owners = []
        if not any(running.owners):
            rate = running.cost / max(running.seconds, 1e-3)
            with self._changed:  # a moving average
                self._tokens_per_second += 0.2 * (rate - self._tokens_per_second)
                self._running.remove(running)

    @staticmethod
    def _drop_cancelled(running: _Running) -> None:
        dropped = [place for place, owner in enumerate(running.owners) if owner is not None and owner[0].is_over]
        for place in dropped:
            running.owners[place] = None
        if dropped and any(running.owners):
            running.batch.drop(dropped)

    def _report(self, running: _Running, news: Iterable[Event | Done]) -> None:
        by_job: dict[Job, list[Event | Done | Failed]] = {}
        for one in news:
            owner = running.owners[one.row]
            if owner is None:
                continue
            job, number = owner
            if not job.has_news:
                job.has_news = True
                self._metrics.first_token.observe(time.monotonic() - job.arrived)
            if isinstance(one, Done):
                running.owners[one.row] = None
                job.num_done += 1
                self._metrics.generation_tokens.add(one.num_tokens)
                by_job.setdefault(job, []).append(Done(number, one.content, one.num_tokens))
            elif job.wants_events:
                by_job.setdefault(job, []).append(Event(number, one.content))
        for job in by_job:
            if job.num_done == len(job.rows):
                job.is_over = True
        _tell(by_job)

    def _fail_all(self, owners: Sequence[tuple[Job, int]], error: Exception) -> None:
        _log.error("a batch of %d rows failed: %s", len(owners), type(error).__name__, exc_info=error)
        for job in {id(job): job for job, _ in owners}.values():
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        with self._changed:
            if job.is_over:
                return
            job.is_over = True
            self._withdraw(job)
        _tell({job: [Failed(error)]})


def _tell(news: Mapping[Job, list[Event | Done | Failed]]) -> None:
    """Pass the results to the jobs, and then wake their handlers."""
    sleeping: dict[Callable[[], None], list[Job]] = {}
    for job, found in news.items():
        _call(partial(job.told, found), [job])
        if job.wake is not None:
            sleeping.setdefault(job.wake, []).append(job)
    for wake, jobs in sleeping.items():
        _call(wake, jobs)


def _call(function: Callable[[], None], jobs: Sequence[Job]) -> None:
    try:
        function()
    except Exception:  # the clients' event loop has ended; nobody waits for the results
        _log.debug("results could not be delivered", exc_info=True)
        for job in jobs:
            job.is_over = True
