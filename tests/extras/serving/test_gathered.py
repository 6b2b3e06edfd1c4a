"""What one turn of the event loop writes to a connection is sent together."""

import asyncio
from typing import Any

from manyheads.extras.serving import server
from manyheads.extras.serving.server import GatheredTransport


class Recorder:
    """A transport that notes what is done with it."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.done.append("close")

    def abort(self) -> None:
        self.done.append("abort")

    def is_closing(self) -> bool:
        return "close" in self.done or "abort" in self.done


def after(act: Any) -> list[Any]:
    """What a transport was told by the end of the next turn of a loop in which this acts."""

    async def turn() -> list[Any]:
        recorder = Recorder()
        act(GatheredTransport(recorder, asyncio.get_running_loop()))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return recorder.done

    return asyncio.run(turn())


def test_one_turn_sends_once() -> None:
    assert after(lambda one: [one.write(b"head "), one.write(b""), one.write(b"body")]) == [b"head body"]
    assert after(lambda one: one.write(b"")) == []


def test_the_next_turn_sends_again() -> None:
    async def turns() -> list[Any]:
        recorder = Recorder()
        gathered = GatheredTransport(recorder, asyncio.get_running_loop())  # type: ignore[arg-type]
        for part in (b"one", b"two"):
            gathered.write(part)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return recorder.done

    assert asyncio.run(turns()) == [b"one", b"two"]


def test_nothing_is_lost_at_the_end() -> None:
    assert after(lambda one: [one.write(b"answer"), one.close()]) == [b"answer", "close"]
    assert after(lambda one: [one.write(b"answer"), one.abort()]) == [b"answer", "abort"]
    assert after(lambda one: [one.close(), one.write(b"late")]) == ["close"]


def test_much_is_sent_at_once() -> None:
    """So that the transport can tell a stream to wait for its client."""
    part = b"x" * (server._MOST_GATHERED // 2 + 1)
    seen: list[int] = []

    def act(one: Any) -> None:
        for _ in range(4):
            one.write(part)
            seen.append(len(one._held))

    assert b"".join(after(act)) == part * 4
    assert max(seen) <= server._MOST_GATHERED
