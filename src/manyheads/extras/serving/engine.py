"""The engine: one thread that runs the batches of all requests.

A request is a `Job` of one or more rows. Clients are served in turn: a job waits until the other clients' jobs have
had as many tokens as its client's jobs before it. Rows of equal key (model and options) are combined into a batch
within a token budget. A batch begins when the previous batch of the same key has ended or has run for a second.
Requests that arrive until then become one batch.

Several batches take steps in turn, so that a new request does not wait for the end of a long one. If there are more
than `max_batches`, some pause: in each turn the oldest batch takes a step, so that none waits for ever, and those that
have run for the shortest time. They keep their states; `_room` bounds how many there are.

A row that finishes is reported at once. A job can be cancelled at any time: its waiting rows leave at once, its running
rows before the next step of their batch.

Names of counters, gauges and histograms for Prometheus follow vLLM, with the prefix `manyheads_`. No label has values
that clients choose.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from manyheads.extras.serving.jobs import Batch, Done, Event, Failed, Job, QueueFull

if TYPE_CHECKING:
    from manyheads.extras.serving.settings import ServingSettings


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """All metrics of a server.

    REASONS: why requests are refused. ENDINGS: how requests end that the engine accepted.
    """

    REASONS = ("queue", "tokens", "loading", "draining", "body_size", "slow_body", "key", "host", "invalid")
    ENDINGS = ("completed", "cancelled", "deadline", "failed")

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counters("request_success", "Requests by their end.", "finished_reason", self.ENDINGS)
        self.rejected = self._counters("requests_rejected", "Requests refused, by reason.", "reason", self.REASONS)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts and sources that were accepted.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens that were generated.")
        self.steps = self._counter("engine_steps", "Steps of all batches.")
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first result.")
        self.each_token = self._histogram("time_per_output_token_seconds", "Duration of a step of a batch.")
        self.latency = self._histogram("e2e_request_latency_seconds", "From arrival to the end of the answer.")
        self.queue_time = self._histogram("request_queue_time_seconds", "From arrival to the first step.")
        self.batch_rows = self._histogram("batch_rows", "Rows of a batch when it starts.", _ROWS)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, text, labels, namespace="manyheads", registry=self._registry)

    def _counters(self, name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        counter = self._counter(name, text, [label])
        return {value: counter.labels(value) for value in values}

    def _histogram(self, name: str, text: str, bounds: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(name, text, namespace="manyheads", registry=self._registry, buckets=bounds)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a number that is determined when the metrics are read."""
        Gauge(name, text, namespace="manyheads", registry=self._registry).set_function(read)

    def render(self) -> str:
        """Return the text that Prometheus reads."""
        return generate_latest(self._registry).decode()


_log = logging.getLogger(__name__)

_GATHER_SECONDS = 1.0
"""Seconds after which another batch of the same key may begin, times the number of those that have begun.

Large batches cost less per row, and of two batches that take turns neither ends earlier than the second would if they
ran one after the other. Within this time no batch pauses for a new one.
"""
_MOST_KNOWN = 1_000
SHARE_KEPT = 8
"""One in so many places, and of the waiting tokens, is kept for clients that have none."""


@dataclass(eq=False)
class _Running:
    """A batch in progress. owners: (job, number of the row in the job), or None once the row is done or dropped.

    key: of its jobs. began: when, on the engine's clock. cost: of the rows that are done. seconds: of its steps.
    """

    key: Hashable
    batch: Batch
    owners: list[tuple[Job, int] | None]
    began: float
    cost: int = 0
    seconds: float = 0.0

    @property
    def rows(self) -> list[tuple[Job, int]]:
        """The owners of the rows that somebody waits for."""
        return [owner for owner in self.owners if owner is not None and not owner[0].is_over]


class Engine:
    """Runs jobs until it is closed.

    Args:
        limits: `max_waiting_tokens`, `max_batch_tokens`, `max_batch_rows`, `max_batches` and `debug_delay_seconds`.
        metrics: receives counts.
        clock: returns seconds.
    """

    def __init__(self, limits: ServingSettings, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._waiting: list[Job] = []  # in the order of their turns
        self._turn = 0  # of the job that began last
        self._turns: dict[Hashable, int] = {}  # of the next job of each client
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
        """Put a job into the queue, behind other jobs of its client.

        Raises: QueueFull: more than `max_waiting_tokens` would wait; a part of them is for clients that have none. A
            job that finds the queue empty is always taken.
        """
        with self._changed:
            waiting, cost, most = self._waiting_tokens, job.waiting_cost, self._limits.max_waiting_tokens
            before = [one.turn for one in self._waiting if one.client == job.client]
            if before:
                most -= most // SHARE_KEPT
            if waiting and waiting + cost > most:
                raise QueueFull(max(1, min(60, round(waiting / self._tokens_per_second))))
            if not self._waiting or len(self._turns) > _MOST_KNOWN:
                alive = {one.client for one in self._waiting}
                self._turns = {client: turn for client, turn in self._turns.items() if client in alive}
            job.turn = max(self._turn, self._turns.get(job.client, 0), *before)
            self._turns[job.client] = job.turn + cost
            insort(self._waiting, job, key=lambda one: one.turn)
            self._waiting_tokens += cost
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
            self._turns[job.client] -= job.waiting_cost

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
            for running in self._next():
                self._step(running)
        for job in {*self._waiting, *(owner[0] for one in self._running for owner in one.owners if owner)}:
            self._fail(job, RuntimeError("the engine was closed"))

    def _admit(self) -> list[tuple[Job, int]]:
        """Take rows out of the queue for one new batch, if it may begin now."""
        owners: list[tuple[Job, int]] = []
        begun, now = self._running, self._clock()
        count = collections.Counter(one.key for one in begun)
        gathering = {one.key for one in begun if now - one.began < _GATHER_SECONDS * count[one.key]}
        room, held = float("inf"), collections.Counter[Hashable]()
        if len(begun) >= self._limits.max_batches:
            if all(now - one.began < _GATHER_SECONDS for one in begun):
                return owners
            room, held = self._room()

        def fits(job: Job) -> bool:
            return held[job.client] + 2 * job.rows[job.next_row].cost <= room

        first = next((job for job in self._waiting if job.key not in gathering and fits(job)), None)
        if first is None:
            return owners
        longest, width = 0, 0
        for job in [job for job in self._waiting if job.key == first.key]:
            while job.next_row < len(job.rows) and fits(job):
                row = job.rows[job.next_row]
                longest, width = max(longest, row.cost), width + row.width
                is_full = (len(owners) + 1) * longest > self._limits.max_batch_tokens
                if owners and (is_full or width > self._limits.max_batch_rows):
                    return owners
                owners.append((job, job.next_row))
                job.next_row += 1
                self._waiting_tokens -= row.cost
                self._turn = max(self._turn, job.turn)
                held[job.client] += row.cost
                room -= row.cost
            if job.next_row == len(job.rows):
                self._waiting.remove(job)
        return owners

    def _room(self) -> tuple[float, collections.Counter[Hashable]]:
        """Return the tokens that batches may still hold if some of them pause, and those that each client's rows hold.

        Running and paused batches hold twice the tokens of `max_batches` full ones. A row may begin if twice its tokens
        and those that its client holds have room: so room remains for clients that hold none, and for short rows.
        """
        held = collections.Counter[Hashable]()
        for one in self._running:
            for job, number in one.rows:
                held[job.client] += job.rows[number].cost
        return 2 * self._limits.max_batches * self._limits.max_batch_tokens - held.total(), held

    def _next(self) -> list[_Running]:
        """Return the batches that take a step in this turn, and those that nobody waits for, which end.

        The time of a batch counts as often as its client has batches, so that many have no larger share than one.
        """
        most = max(2, self._limits.max_batches)
        if len(self._running) <= most:
            return list(self._running)
        clients = {one: {job.client for job, _ in one.rows} for one in self._running}
        count = collections.Counter(client for found in clients.values() for client in found)
        left = [one for one, found in clients.items() if found]
        shortest = nsmallest(most - 1, left[1:], lambda one: one.seconds * min(count[each] for each in clients[one]))
        return [one for one in self._running if one not in left] + left[:1] + shortest

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
            self._running.append(_Running(owners[0][0].key, batch, list(owners), self._clock()))

    def _step(self, running: _Running) -> None:
        began = self._clock()
        try:
            self._drop_cancelled(running)
            if any(running.owners):
                if self._limits.debug_delay_seconds:
                    time.sleep(self._limits.debug_delay_seconds)
                self._report(running, running.batch.advance())
                seconds = self._clock() - began
                running.seconds += seconds
                self._metrics.steps.inc()
                self._metrics.each_token.observe(seconds)
        except Exception as error:
            self._fail_all([owner for owner in running.owners if owner is not None], error)
            running.owners = []
        if not any(running.owners):
            with self._changed:
                if running.cost:  # a moving average
                    rate = running.cost / max(running.seconds, 1e-3)
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
                running.cost += job.rows[number].cost
                self._metrics.generation_tokens.inc(one.num_tokens)
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
        _call(partial(job.on_events, found), [job])
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
