"""Clients share the engine: none is locked out, and none waits for ever. The clock counts steps, not seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import pytest

from manyheads.extras.serving.engine import Engine, Metrics
from manyheads.extras.serving.jobs import Done, Event, Failed, Job, QueueFull, Row
from manyheads.extras.serving.settings import ServingSettings

LONG = 16_000


class Machine:
    """An engine whose clock goes on by one second with each step of a batch."""

    def __init__(self, **limits: Any) -> None:
        self.steps = 0
        self.order: list[str] = []
        self.most_begun = 0
        self.at: dict[int, Callable[[], None]] = {}
        self.engine = Engine(ServingSettings(**limits), Metrics(), clock=lambda: float(self.steps))

    def run(self, until: int) -> None:
        """Run until this step, or until everything has ended."""
        self.engine.start()
        while self.steps < until and (self.engine.num_running or self.engine.waiting_tokens):
            time.sleep(0.001)
        self.engine.close()

    def step(self, name: str) -> None:
        self.steps += 1
        self.order.append(name)
        self.most_begun = max(self.most_begun, len(self.engine._running))
        act = self.at.pop(self.steps, None)
        if act is not None:
            act()


class Steps:
    """A batch that ends after a number of steps."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self.left = asked, asked.length

    def advance(self) -> list[Event | Done]:
        self.asked.machine.step(self.asked.name)
        self.left -= 1
        return [Done(0, None)] if not self.left else []

    def drop(self, rows: Collection[int]) -> None: ...


class Asked:
    """A request of one row that needs this number of steps."""

    def __init__(
        self, machine: Machine, name: str, length: int, *, client: str, key: str | None = None, cost: int = 100
    ) -> None:
        self.machine, self.name, self.length = machine, name, length
        self.ended: int | None = None
        self.failed = False
        self.job = Job(key or name, self.begin, [Row(self, cost)], self.told, client=client)

    def begin(self, contents: Sequence[Any]) -> Steps:
        assert contents == [self], "these jobs share no batch"
        return Steps(self)

    def told(self, news: list[Event | Done | Failed]) -> None:
        self.failed = any(isinstance(one, Failed) for one in news)
        if not self.failed:
            self.ended = self.machine.steps

    def submit(self) -> Asked:
        self.machine.engine.submit(self.job)
        return self


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.mark.parametrize("client", ["hog", "another"])
def test_long_requests_do_not_lock_out_a_short_one(machine: Machine, client: str) -> None:
    """Neither one of another client nor another one of their own."""
    for number in range(5):
        Asked(machine, f"long {number}", 10_000, client="hog", cost=LONG).submit()
    short = Asked(machine, "short", 5, client=client)
    machine.at[50] = short.submit
    machine.run(500)
    assert short.ended is not None
    assert short.ended - 50 <= 5 * 3 + 3


def test_many_streams_of_one_address_do_not_lock_out_a_short_request(machine: Machine) -> None:
    streams = [Asked(machine, f"stream {number}", 1_000, client="hog", cost=2_000) for number in range(40)]
    for one in streams:
        one.submit()
    shorts = [Asked(machine, f"short {client}", 5, client=client) for client in ("hog", "another")]
    for number, short in enumerate(shorts):
        machine.at[200 + 50 * number] = short.submit
    machine.run(500)
    for number, short in enumerate(shorts):
        assert short.ended is not None, short.name
        assert short.ended - (200 + 50 * number) <= 5 * 3 + 3


def test_a_client_that_always_keeps_requests_waiting_does_not_lock_out_others(machine: Machine) -> None:
    """Each of its requests that ends is followed by another one, until the end."""

    def again(number: int) -> Callable[[list[Any]], None]:
        def told(news: list[Any]) -> None:
            if not any(isinstance(one, Failed) for one in news):
                start(number)

        return told

    def start(number: int) -> None:
        one = Asked(machine, f"hog {number}", 40, client="hog", cost=LONG)
        one.job.on_events = again(number)
        one.submit()

    for number in range(10):
        start(number)
    others = [Asked(machine, f"other {number}", 10, client="another", cost=LONG) for number in range(8)]
    for number, one in enumerate(others):
        machine.at[100 + 100 * number] = one.submit
    machine.run(1_200)
    for number, one in enumerate(others):
        assert one.ended is not None, one.name
        assert one.ended - (100 + 100 * number) <= 10 * 3 + 3


def test_a_long_request_goes_on_while_short_ones_keep_coming(machine: Machine) -> None:
    """The oldest batch takes a step in every turn, so it needs at most as many turns as steps."""
    long = Asked(machine, "long", 100, client="patient", cost=LONG).submit()
    for step in range(5, 600):
        machine.at[step] = Asked(machine, f"short {step}", 3, client=f"client {step % 7}").submit
    machine.run(700)
    assert long.ended is not None
    assert long.ended <= 100 * 3
    turns = [place for place, name in enumerate(machine.order) if name == "long"]
    assert max(after - before for before, after in pairwise(turns)) <= 3


def test_paused_requests_end_too(machine: Machine) -> None:
    asked = [
        Asked(machine, f"asked {number}", 30, client=f"client {number}", cost=LONG).submit() for number in range(16)
    ]
    machine.run(30 * 16)
    assert all(one.ended is not None for one in asked)
    assert sum(name.startswith("asked") for name in machine.order) == 30 * 16, "no step was taken twice"


def test_paused_batches_are_bounded(machine: Machine) -> None:
    for number in range(12):
        Asked(machine, f"long {number}", 1_000, client=f"client {number}", cost=LONG).submit()
    machine.run(300)
    limits = ServingSettings()
    assert limits.max_batches < machine.most_begun <= 2 * limits.max_batches


def test_many_requests_of_one_client_leave_another_its_share(machine: Machine) -> None:
    """A batch takes at most one step in a turn of three."""
    for number in range(10):
        Asked(machine, f"hog {number}", 10_000, client="hog").submit()
    Asked(machine, "single", 10_000, client="another").submit()
    machine.run(1_000)
    counted = machine.order[500:1_000].count("single")
    assert counted >= 150, f"{counted} of 500 steps"


def test_nobody_pauses_for_a_new_batch_in_the_first_second(machine: Machine) -> None:
    """Short requests end sooner one after the other."""
    machine.engine._clock = lambda: 0.0
    for number in range(9):
        Asked(machine, f"short {number}", 4, client=f"client {number}").submit()
    machine.run(36)
    assert machine.most_begun == 3


def test_clients_are_served_in_turn() -> None:
    """By tokens: who sends long requests waits longer than who sends short ones."""
    machine = Machine(max_batches=1)
    Asked(machine, "running", 100, client="first", cost=32_000).submit()
    waiting = [Asked(machine, f"many {number}", 1, client="many", cost=LONG) for number in range(4)]
    waiting += [Asked(machine, f"short {number}", 1, client="short", cost=LONG // 4) for number in range(3)]
    machine.at[1] = lambda: [one.submit() for one in waiting] and None
    machine.run(120)
    order = [name for name in machine.order if name.startswith(("many", "short"))]
    assert order == ["many 0", "short 0", "short 1", "short 2", "many 1", "many 2", "many 3"]


def test_a_request_that_was_withdrawn_costs_its_client_no_turn() -> None:
    machine = Machine(max_batches=1)
    Asked(machine, "running", 3, client="first", cost=32_000).submit()
    typed = [Asked(machine, f"typed {number}", 1, client="typist", cost=LONG) for number in range(4)]
    other = [Asked(machine, f"other {number}", 1, client="other", cost=LONG) for number in range(2)]

    def arrive() -> None:
        for one in (*typed[:3], *other):
            one.submit()
        for one in typed[:3]:
            machine.engine.cancel(one.job)
        typed[3].submit()

    machine.at[1] = arrive
    machine.run(40)
    assert [name for name in machine.order if name != "running"] == ["other 0", "typed 3", "other 1"]


def test_a_part_of_the_queue_is_kept_for_clients_that_have_none() -> None:
    machine = Machine(max_waiting_tokens=8_000)
    for number in range(70):
        Asked(machine, f"hog {number}", 1, client="hog").submit()
    with pytest.raises(QueueFull):
        Asked(machine, "hog 70", 1, client="hog").submit()
    Asked(machine, "other", 1, client="another").submit()


def test_turns_of_clients_that_left_are_forgotten(machine: Machine) -> None:
    for number in range(3_000):
        one = Asked(machine, f"one {number}", 1, client=f"client {number}").submit()
        machine.engine.cancel(one.job)
        assert len(machine.engine._turns) <= 1_001


def test_a_paused_batch_that_nobody_waits_for_ends_at_once(machine: Machine) -> None:
    longs = [
        Asked(machine, f"long {number}", 10_000, client=f"client {number}", cost=LONG).submit() for number in range(6)
    ]
    left: list[int] = []

    def leave() -> None:
        for one in longs[1:]:
            machine.engine.cancel(one.job)

    machine.at[200] = leave
    machine.at[206] = lambda: left.append(len(machine.engine._running))
    machine.run(220)
    assert left == [1]
