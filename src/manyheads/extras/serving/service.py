"""The common part of all protocols: the models, the engine, and the way from a request to results."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import Request

from manyheads.errors import NonFiniteError, is_out_of_memory
from manyheads.extras.serving.engine import Engine, Metrics
from manyheads.extras.serving.glossaries import Glossaries
from manyheads.extras.serving.guard import ServerState
from manyheads.extras.serving.jobs import CallBatch, Done, Event, Failed, Job, QueueFull, Row
from manyheads.extras.serving.refusals import Refusal, too_long
from manyheads.extras.serving.served import AnyServed, ServedGenerator, ServedTranslator, load_models

if TYPE_CHECKING:
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.extras.serving.settings import ApiKeys, ServingSettings


class Mailbox:
    """Events and results that wait for the event loop.

    The engine wakes the loop once per step. Waking takes a system call, in which the engine loses the interpreter's
    lock; once per row it would cost a tenth of a small model's step.

    Args: loop: that handles the news.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._news: deque[tuple[Callable[[Any], None], Any]] = deque()

    def put(self, take: Callable[[Any], None], news: Any) -> None:
        """Add news, from any thread. take: called with them in the loop after `wake`."""
        self._news.append((take, news))

    def wake(self) -> None:
        """Let the loop handle what is there. Raises: RuntimeError: the loop is closed."""
        self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        while self._news:
            take, news = self._news.popleft()
            take(news)


S = TypeVar("S")
T = TypeVar("T")
_FEW = 500
"""For at most this many characters or tokens, a tokenizer needs less time than two switches between threads."""

_PIECE = 1 << 15
"""Characters or tokens of several items that a piece of work has; between two pieces other clients have their turns."""


_LEAST_COST = 3
"""Of a sentence: a token, the end of the source, and a token of the translation."""


def is_few(size: int | None) -> bool:
    """Return whether work on this number of characters or tokens is short; None means many."""
    return size is not None and size <= _FEW


@dataclass
class _Work:
    """Rows that are being processed. left: number of rows without a result. end: deadline, in the event loop's time.
    ending: for metrics."""

    left: int
    end: float
    ending: str = "cancelled"

    def check(self, one: Event | Done | Failed) -> Event | Done:
        """Return the news, and note a result. Raises: the error of work that failed, as the client is told of it."""
        if isinstance(one, Failed):
            self.ending = "failed"
            raise _failed(one.error)
        self.left -= isinstance(one, Done)
        if not self.left:
            self.ending = "completed"
        return one


class Service:
    """The state of one server.

    Args: settings: limits and models; keys: that clients present.

    Attributes: models: name -> model, filled by `load`. engine, metrics, state: see their classes. glossaries: of the
        clients; None: the server keeps none. at_end: called when the server stops.

    Raises: ConfigError: the folder of glossaries cannot be used.
    """

    def __init__(self, settings: ServingSettings, keys: ApiKeys) -> None:
        self.settings = settings
        self.keys = keys
        self.metrics = Metrics()
        self.state = ServerState()
        self.models: dict[str, AnyServed] = {}
        self.at_end: list[Callable[[], Awaitable[None]]] = []
        self.engine = Engine(settings, self.metrics)
        self.glossaries = Glossaries(Path(settings.glossaries)) if settings.glossaries else None
        self._mailbox: Mailbox | None = None
        # Tokenizers take long for long texts, during which the event loop must answer others. Each client has at most
        # one call in the pool, so that they take turns.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="manyheads-tokenizer")
        self._turns = WeakValueDictionary[Any, asyncio.Lock]()
        # OpenMP keeps workers for each thread that has computed. If there are more workers than cores, they sleep
        # between two operations. So the thread that loads the models ends, and only the engine's thread has workers.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="manyheads-loader")

    def start(self) -> None:
        """Start the engine, so that health checks succeed; the server is ready after `load`."""
        self.engine.start()

    async def load(self) -> None:
        """Load the models; then requests are accepted.

        Raises: ManyHeadsError: a model cannot be loaded.
        """
        self.models = await asyncio.get_running_loop().run_in_executor(
            self._loader, load_models, self.settings, lambda: self.state.is_closed
        )
        self._loader.shutdown()
        caches = [model.cache for model in self.models.values() if isinstance(model, ServedGenerator)]
        self.metrics.gauge(
            "prefix_cache_bytes", "Size of the states after prompts.", lambda: sum(one.num_bytes for one in caches)
        )
        self.state.is_ready = not self.state.is_closed

    async def stop(self) -> None:
        """Stop the engine after its current step."""
        self.state.is_closed = True
        for end in self.at_end:
            await end()
        await asyncio.to_thread(self.engine.close)
        self._loader.shutdown()
        self._pool.shutdown()

    async def off_loop(self, request: Request, function: Callable[[], T], size: int | None = None) -> T:
        """Call a function that may take long, such as a tokenizer, outside the event loop.

        It must keep the interpreter's lock for a short time only; if it takes long, it calls `check_deadline`.

        Args: size: number of characters or tokens that it works on; for few of them it is called directly. None: many.

        Raises: Refusal: the deadline has passed.
        """
        turn = self._turns.setdefault(request.scope.get("manyheads.client"), asyncio.Lock())
        try:
            if is_few(size):
                return function()
            async with asyncio.timeout(self.end(request) - time.monotonic()), turn:
                return await asyncio.get_running_loop().run_in_executor(self._pool, function)
        except TimeoutError:
            request.scope["manyheads.is_over"] = True
            raise self.too_late() from None
        except asyncio.CancelledError:
            request.scope["manyheads.is_over"] = True
            raise

    async def settings_of(self, request: Request, model: AnyServed, overrides: dict[str, Any]) -> Any:
        """Return the options of a request. A pattern is compiled outside the event loop: that can take seconds.

        Raises: ConfigError, RequestError: an option is invalid. Refusal: the deadline has passed.
        """
        has_pattern = bool(overrides.get("regex") or overrides.get("json_schema"))
        return await self.off_loop(request, partial(model.settings, overrides), None if has_pattern else 0)

    def check_deadline(self, request: Request) -> None:
        """Called in the functions of `off_loop`. Raises: TimeoutError: nobody waits for the result any more."""
        if request.scope.get("manyheads.is_over") or time.monotonic() >= self.end(request):
            raise TimeoutError

    def end(self, request: Request) -> float:
        """Return the deadline of a request, on the clock of `time.monotonic`."""
        arrived: float = request.scope["manyheads.arrived"]
        return arrived + self.settings.deadline_seconds

    def too_late(self) -> Refusal:
        """Return the refusal of work that has not ended at its deadline."""
        seconds = self.settings.deadline_seconds
        return Refusal(504, f"The answer took longer than {seconds:g} s; send less at once.", code="deadline")

    async def each(
        self,
        request: Request,
        function: Callable[[list[S]], list[T]],
        items: Sequence[S],
        size: Callable[[S], int],
    ) -> list[T]:
        """Call a function with some items after the other outside the event loop, and return its results for all.

        Args: function: some items -> a result for each. size: number of characters or tokens of an item.

        Raises: as `off_loop`.
        """
        found: list[T] = []
        begin = total = 0
        for number, item in enumerate(items):
            if total and total + size(item) > _PIECE:
                found += await self.off_loop(request, partial(function, list(items[begin:number])), total)
                begin, total = number, 0
            total += 1 + size(item)
        if begin < len(items):
            found += await self.off_loop(request, partial(function, list(items[begin:])), total)
        return found

    async def rows(
        self,
        request: Request,
        model: ServedTranslator,
        texts: Sequence[str],
        settings: DecodingSettings,
        what: str = "text",
        owners: Sequence[int] | None = None,
    ) -> list[Row | None]:
        """Return what `ServedTranslator.rows` returns for all texts. Raises: as it and `off_loop`."""

        def rows(numbers: list[int]) -> list[Row | None]:
            return model.rows([texts[one] for one in numbers], settings, what, owners=owners, numbers=numbers)

        return await self.each(request, rows, range(len(texts)), lambda one: len(texts[one]))

    def check_sentences(self, request: Request, field: str, count: int) -> None:
        """Called while texts are split. Raises: Refusal: they are too many. TimeoutError: see `check_deadline`."""
        self.check_deadline(request)
        most = self.settings.max_waiting_tokens // _LEAST_COST
        if count > most:
            raise too_long(field, "the number of sentences", count, most, "Send less at once.")

    def check_count(self, field: str, count: int) -> None:
        """Raises: Refusal: a request has more texts than permitted."""
        if count > self.settings.max_texts:
            raise too_long(field, "the number of texts", count, self.settings.max_texts, "Send several requests.")

    def check_alternatives(self, field: str, num_tokens: int, num_top: int) -> None:
        """Raises: Refusal: the alternatives of all tokens of an answer are too many for its memory."""
        count, most = num_tokens * num_top, 2 * self.settings.max_waiting_tokens
        if count > most:
            raise too_long(
                field, "the number of alternatives of all tokens", count, most,
                "Ask for fewer alternatives or tokens, or send fewer texts at once.",
            )  # fmt: skip

    async def stream(
        self,
        request: Request,
        begun: tuple[Hashable, Callable[[Sequence[Any]], Any]],
        rows: Sequence[Row],
        num_prompt_tokens: int = 0,
    ) -> AsyncIterator[Event | Done]:
        """Run rows, and yield news as they come, in any order, until all rows are done.

        Close the generator early to cancel them; this also happens when the client leaves.

        Args: begun: key and function of the batches (see `jobs.Job`); rows: not empty.

        Raises: Refusal: the queue is full (429), the deadline has passed (504), or the model failed (500).
        """
        news: asyncio.Queue[Event | Done | Failed] = asyncio.Queue()

        def take(found: list[Event | Done | Failed]) -> None:
            for one in found:
                news.put_nowait(one)

        with self._work(request, begun, rows, take, num_prompt_tokens) as work:
            while work.left:
                if asyncio.get_running_loop().time() >= work.end:  # also if the client is slower than the news
                    raise TimeoutError
                async with asyncio.timeout_at(work.end):
                    one = await news.get()
                yield work.check(one)

    async def run(
        self,
        request: Request,
        begun: tuple[Hashable, Callable[[Sequence[Any]], Any]],
        rows: Sequence[Row | None],
        num_prompt_tokens: int = 0,
    ) -> list[Any]:
        """Run rows to the end. Returns: the result of each, in order; None where the row is None.

        Raises: as `stream`.
        """
        places = [place for place, row in enumerate(rows) if row is not None]
        results: list[Any] = [None] * len(rows)
        if not places:
            return results
        given = [row for row in rows if row is not None]
        news: list[Event | Done | Failed] = []
        loop = asyncio.get_running_loop()
        is_over: asyncio.Future[None] = loop.create_future()

        def take(found: list[Event | Done | Failed]) -> None:
            news.extend(found)
            if not is_over.done() and (len(news) == len(given) or isinstance(found[-1], Failed)):
                is_over.set_result(None)

        with self._work(request, begun, given, take, num_prompt_tokens, with_events=False) as work:
            # asyncio.timeout does the same in twice the time.
            deadline = loop.call_at(work.end, _expire, is_over)
            try:
                await is_over
            finally:
                deadline.cancel()
            for one in news:
                result = work.check(one)
                results[places[result.row]] = result.content
        return results

    @contextmanager
    def _work(
        self,
        request: Request,
        begun: tuple[Hashable, Callable[[Sequence[Any]], Any]],
        rows: Sequence[Row],
        take: Callable[[list[Event | Done | Failed]], None],
        num_prompt_tokens: int,
        *,
        with_events: bool = True,
    ) -> Iterator[_Work]:
        """Pass rows to the engine. At the end of the block, remove the unfinished ones, and count the request.

        Args: take: called in the event loop with the news of each step. with_events: not only results.

        Raises: as `stream`.
        """
        arrived: float = request.scope["manyheads.arrived"]
        total = sum(row.cost for row in rows)
        if total > self.settings.max_waiting_tokens:
            raise Refusal(
                422,
                f"The work of the request is {total:,} tokens; the limit is {self.settings.max_waiting_tokens:,}. Send"
                " fewer texts at once.", code="over_limit",
            )  # fmt: skip
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        on_events = partial(self._mailbox.put, take)
        client = request.scope.get("manyheads.client")
        job = Job(begun[0], begun[1], rows, on_events, arrived, with_events, self._mailbox.wake, client)
        try:
            self.engine.submit(job)
        except QueueFull as full:
            self.metrics.rejected["tokens"].inc()
            raise Refusal(
                429, f"The queue is full; try again in {full.retry_after} s.", code="queue_full",
                retry_after=full.retry_after,
            ) from None  # fmt: skip
        self.metrics.prompt_tokens.inc(num_prompt_tokens)
        work = _Work(len(rows), loop.time() + self.end(request) - time.monotonic())
        try:
            yield work
        except TimeoutError:
            work.ending = "deadline"
            raise self.too_late() from None
        finally:
            if work.ending != "completed":
                self.engine.cancel(job)
            self.metrics.requests[work.ending].inc()
            self.metrics.latency.observe(time.monotonic() - arrived)

    async def call(self, request: Request, function: Callable[[], T], cost: int) -> T:
        """Call a function on the engine's thread, as one step.

        Args: cost: of the call in tokens. Raises: as `stream`.
        """
        begun = (object(), CallBatch)
        [result] = await self.run(request, begun, [Row(function, cost)])
        found: T = result
        return found


def _expire(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_exception(TimeoutError())


def _failed(error: Exception) -> Exception:
    if isinstance(error, NonFiniteError):
        return Refusal(500, str(error), code="not_finite")
    if is_out_of_memory(error):
        return Refusal(
            503,
            "The machine has too little free memory for this batch. Send the request again later, or ask for less:"
            " shorter texts, fewer beams or samples.",
            code="out_of_memory", retry_after=1,
        )  # fmt: skip
    return error
