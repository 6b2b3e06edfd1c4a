"""The engine: order, groups, turns, and rows that leave."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

from manyheads.decoding.generator import Generator
from manyheads.decoding.translator import Translator
from manyheads.extras.serving import engine as engine_module
from manyheads.extras.serving.engine import Engine, Metrics
from manyheads.extras.serving.jobs import (
    Batch,
    Done,
    Event,
    Failed,
    GenerationBatch,
    Job,
    Prompt,
    QueueFull,
    Row,
    TranslationBatch,
)
from manyheads.extras.serving.settings import ServingSettings


class Counting:
    """A batch whose rows end after as many steps as their content says; notes what happens."""

    def __init__(self, contents: Sequence[int], notes: list[Any]) -> None:
        self.left = dict(enumerate(contents))
        self.notes = notes
        notes.append(("begin", list(contents)))

    def advance(self) -> list[Event | Done]:
        self.notes.append(("step", sorted(self.left)))
        news: list[Event | Done] = []
        for row in list(self.left):
            self.left[row] -= 1
            if self.left[row] <= 0:
                del self.left[row]
                news.append(Done(row, f"row {row}", 1))
            else:
                news.append(Event(row, self.left[row]))
        return news

    def drop(self, rows: Collection[int]) -> None:
        self.notes.append(("drop", sorted(rows)))
        for row in rows:
            del self.left[row]


class Client:
    """A job and what it was told."""

    def __init__(self, notes: list[Any], contents: Sequence[int], key: str = "a", cost: int = 10) -> None:
        self.news: list[Event | Done | Failed] = []
        self.over = threading.Event()
        self.on_event: Callable[[], None] = lambda: None
        rows = [Row(content, cost) for content in contents]
        self.job = Job(key, lambda given: Counting(given, notes), rows, self.told)

    def told(self, news: list[Event | Done | Failed]) -> None:
        self.news += news
        self.on_event()
        if any(isinstance(one, Failed) for one in news) or self.job.is_over:
            self.over.set()

    @property
    def done(self) -> list[int]:
        return [one.row for one in self.news if isinstance(one, Done)]


@pytest.fixture
def notes() -> list[Any]:
    return []


def running(**limits: Any) -> Engine:
    return Engine(ServingSettings(**limits), Metrics())


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = running()
    yield made
    made.close()


def finish(engine: Engine, *clients: Client) -> None:
    engine.start()
    for client in clients:
        assert client.over.wait(10)


def begun(notes: list[Any]) -> list[list[int]]:
    return [note[1] for note in notes if note[0] == "begin"]


def during(first: Client, act: Callable[[], None]) -> None:
    """Act once, when the first news of a client come."""
    acts = [act]
    first.on_event = lambda: acts.pop()() if acts else None


def test_jobs_of_one_key_share_a_batch_in_order_of_arrival(engine: Engine, notes: list[Any]) -> None:
    clients = [Client(notes, [1, 3]), Client(notes, [2], key="b"), Client(notes, [2])]
    for client in clients:
        engine.submit(client.job)
    finish(engine, *clients)
    assert begun(notes) == [[1, 3, 2], [2]]
    assert [client.done for client in clients] == [[0, 1], [0], [0]]


def test_batches_keep_the_token_budget_and_count_padding(notes: list[Any]) -> None:
    engine = running(max_batch_tokens=100, max_batches=1)
    first = Client(notes, [1] * 8, cost=30)
    second = Client(notes, [1] * 3, cost=100)
    engine.submit(first.job)
    engine.submit(second.job)
    finish(engine, first, second)
    engine.close()
    assert [len(rows) for rows in begun(notes)] == [3, 3, 2, 1, 1, 1]
    assert sorted(first.done) == list(range(8))


def test_rows_of_beams_are_bounded(notes: list[Any]) -> None:
    engine = running(max_batch_rows=10)
    client = Client(notes, [1] * 3)
    client.job.rows = [Row(1, 10, width=4) for _ in range(3)]
    engine.submit(client.job)
    finish(engine, client)
    engine.close()
    assert [len(rows) for rows in begun(notes)] == [2, 1]


def test_a_new_request_does_not_wait_for_a_long_one(engine: Engine, notes: list[Any]) -> None:
    long, short = Client(notes, [50]), Client(notes, [2], key="b")
    during(long, lambda: engine.submit(short.job))
    engine.submit(long.job)
    finish(engine, long, short)
    order = [note for note in notes if note[0] == "begin"]
    assert len(order) == 2
    place = notes.index(("begin", [2]))
    assert sum(note[0] == "step" for note in notes[place:]) > 40, "the long one had not ended"


def test_equal_requests_gather_while_a_batch_runs(engine: Engine, notes: list[Any]) -> None:
    first = Client(notes, [5, 2])
    later = [Client(notes, [length]) for length in (3, 1, 2)]

    def arrive() -> None:
        for client in later:
            engine.submit(client.job)

    during(first, arrive)
    engine.submit(first.job)
    finish(engine, first, *later)
    assert begun(notes) == [[5, 2], [3, 1, 2]]
    assert notes.index(("begin", [3, 1, 2])) == 6, "the second batch began before the first had ended"


def test_a_long_batch_does_not_keep_equal_requests_waiting(engine, notes, monkeypatch):
    monkeypatch.setattr(engine_module, "_GATHER_SECONDS", 1e-6)
    long, short = Client(notes, [50]), Client(notes, [2])
    during(long, lambda: engine.submit(short.job))
    engine.submit(long.job)
    finish(engine, long, short)
    place = notes.index(("begin", [2]))
    assert sum(note[0] == "step" for note in notes[place:]) > 40, "the long one had not ended"


def test_a_full_queue_of_equal_requests_is_served_in_order_of_arrival(notes: list[Any]) -> None:
    engine = running(max_batch_tokens=30)
    clients = [Client(notes, [4]) for _ in range(9)]
    for client in clients:
        engine.submit(client.job)
    finish(engine, *clients)
    engine.close()
    assert notes == 3 * [("begin", [4, 4, 4]), *4 * [("step", [0, 1, 2])]]


def test_a_request_does_not_wait_for_the_rest_of_a_large_one(notes: list[Any]) -> None:
    engine = running(max_batch_tokens=30)
    large, short = Client(notes, [4] * 9), Client(notes, [1], key="b")
    during(large, lambda: engine.submit(short.job))
    engine.submit(large.job)
    finish(engine, large, short)
    engine.close()
    assert begun(notes) == [[4, 4, 4], [1], [4, 4, 4], [4, 4, 4]]


def test_events_are_told_only_to_those_who_want_them(notes: list[Any]) -> None:
    metrics = Metrics()
    engine = Engine(ServingSettings(), metrics)
    streaming, waiting = Client(notes, [3]), Client(notes, [3])
    waiting.job.wants_events = False
    engine.submit(streaming.job)
    engine.submit(waiting.job)
    finish(engine, streaming, waiting)
    engine.close()
    assert [type(one) for one in streaming.news] == [Event, Event, Done]
    assert [type(one) for one in waiting.news] == [Done]
    assert "manyheads_time_to_first_token_seconds_count 2.0\n" in metrics.render()


def test_a_cancelled_row_is_free_within_one_step(engine: Engine, notes: list[Any]) -> None:
    staying, leaving = Client(notes, [20]), Client(notes, [20])
    engine.submit(staying.job)
    engine.submit(leaving.job)
    leaving.on_event = lambda: engine.cancel(leaving.job)
    finish(engine, staying)
    place = notes.index(("drop", [1]))
    assert notes[:place].count(("step", [0, 1])) == 1, "more than one step after the cancellation"
    assert notes[place + 1] == ("step", [0])
    assert len(leaving.news) == 1
    assert staying.done == [0]


def test_a_row_that_is_cancelled_before_the_first_step_leaves_after_it(translator_folder, novel_folder):
    """Steps of other batches come between the beginning of a batch and its first step."""
    translator = Translator.from_pretrained(translator_folder, "cpu")
    settings = translator.options(max_tokens=1_000)
    translations = TranslationBatch(translator, settings, [([5, 6, translator.tokenizer.source.eos_id], 0)] * 2)
    generator = Generator.from_pretrained(novel_folder, "cpu")
    prompt = Prompt([65], 0, generator.settings)
    both: list[Batch] = [translations, GenerationBatch(generator, generator.settings, [prompt, prompt])]
    for batch in both:
        batch.drop([0])
        batch.advance()
        news: list[Event | Done] = []
        while not any(isinstance(one, Done) and one.row == 1 for one in news):
            news += batch.advance()
        assert {one.row for one in news} == {1}


def test_a_cancelled_job_leaves_the_queue(notes: list[Any]) -> None:
    engine = running(max_waiting_tokens=34)
    clients = [Client(notes, [1]) for _ in range(3)]
    for client in clients:
        engine.submit(client.job)
    late = Client(notes, [1])
    with pytest.raises(QueueFull) as caught:
        engine.submit(late.job)
    assert caught.value.retry_after >= 1
    engine.cancel(clients[1].job)
    engine.submit(late.job)
    finish(engine, clients[0], clients[2], late)
    engine.close()
    assert clients[1].news == []


def test_an_empty_queue_takes_any_job(notes: list[Any]) -> None:
    engine = running(max_waiting_tokens=5)
    client = Client(notes, [1])
    engine.submit(client.job)
    finish(engine, client)
    engine.close()


def test_an_error_ends_the_jobs_of_its_batch_only(engine: Engine, notes: list[Any]) -> None:
    def fail(contents: Sequence[Any]) -> Any:
        raise ValueError("broken")

    bad, good = Client(notes, [1]), Client(notes, [3], key="b")
    bad.job.begin = fail
    engine.submit(bad.job)
    engine.submit(good.job)
    finish(engine, bad, good)
    assert isinstance(bad.news[0], Failed)
    assert good.done == [0]
    assert engine.is_alive


def test_a_client_whose_loop_is_closed_harms_nobody(engine: Engine, notes: list[Any]) -> None:
    gone, staying = Client(notes, [5, 5]), Client(notes, [5])

    def raise_error() -> None:
        raise RuntimeError("Event loop is closed")

    gone.on_event = raise_error
    engine.submit(gone.job)
    engine.submit(staying.job)
    finish(engine, staying)
    assert ("drop", [0, 1]) in notes


def test_all_news_of_a_step_wake_once(engine: Engine, notes: list[Any]) -> None:
    clients = [Client(notes, [1, 2]), Client(notes, [1]), Client(notes, [2])]
    told: list[list[int]] = []
    wake = lambda: told.append([len(client.news) for client in clients])  # noqa: E731
    for client in clients:
        client.job.wants_events, client.job.wake = False, wake
        engine.submit(client.job)
    finish(engine, *clients)
    engine.close()
    assert told == [[1, 1, 0], [2, 1, 1]], "not after each step, with all news of it"


def test_jobs_that_cannot_be_woken_leave(engine: Engine, notes: list[Any]) -> None:
    gone, staying = Client(notes, [5, 5]), Client(notes, [5])

    def wake() -> None:
        raise RuntimeError("Event loop is closed")

    gone.job.wake = wake
    engine.submit(gone.job)
    engine.submit(staying.job)
    finish(engine, staying)
    assert ("drop", [0, 1]) in notes


def test_the_tokens_that_wait_are_counted(notes: list[Any]) -> None:
    """Rows that begin, jobs that are cancelled, and jobs that fail wait no longer."""
    engine = running(max_batch_tokens=20, max_batches=1)
    clients = [Client(notes, [2, 2, 2]), Client(notes, [1]), Client(notes, [1])]
    for client in clients:
        engine.submit(client.job)
    engine.cancel(clients[1].job)
    engine.cancel(clients[1].job)
    assert engine.waiting_tokens == 40
    seen: list[int] = []
    clients[0].on_event = lambda: seen.append(engine.waiting_tokens)
    finish(engine, clients[0], clients[2])
    assert seen == [20, 20, 0, 0]
    broken = Client(notes, [1] * 5)
    broken.job.begin = lambda _: 1 / 0
    engine.submit(broken.job)
    assert broken.over.wait(10)
    engine.close()
    assert engine.waiting_tokens == 0


def test_closing_fails_what_waits(notes: list[Any]) -> None:
    engine = running(debug_delay_seconds=0.05, max_batches=1)
    clients = [Client(notes, [1000], key=str(number)) for number in range(3)]
    for client in clients:
        engine.submit(client.job)
    engine.start()
    while not clients[0].news:
        time.sleep(0.01)
    engine.close()
    assert all(isinstance(client.news[-1], Failed) for client in clients)
    assert not engine.is_alive


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
     RuntimeError("std::bad_alloc")],
    ids=["Python", "torch", "C++"],
)  # fmt: skip
def test_no_memory_is_said_as_503(client: TestClient, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The engine goes on with the next batch."""

    def fails(*_: Any) -> Any:
        raise error

    body = {"text": "I am hungry.", "max_new_tokens": 4}
    with monkeypatch.context() as patch:
        patch.setattr(TranslationBatch, "advance", fails)
        found = client.post("/v1/translate", json=body)
    assert found.status_code == 503
    assert found.headers["retry-after"] == "1"
    assert found.json()["error"]["code"] == "out_of_memory"
    assert client.post("/v1/translate", json=body).status_code == 200
