"""A request ends when its client leaves."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from manyheads.extras.serving.guard import run_until_gone
from manyheads.extras.serving.refusals import Refusal


async def _send(message: Any) -> None: ...


def receiver(leaves: asyncio.Event) -> Callable[[], Awaitable[Any]]:
    async def receive() -> Any:
        await leaves.wait()
        return {"type": "http.disconnect"}

    return receive


def test_the_application_is_cancelled() -> None:
    ends: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"text"
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def leave() -> None:
        leaves = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, leaves.set)
        with pytest.raises(Refusal) as caught:
            await run_until_gone(application, {}, b"text", receiver(leaves), _send)
        assert caught.value.status == 499
        await asyncio.sleep(0)  # the task goes on: it was not cancelled itself

    asyncio.run(leave())
    assert ends == ["cancelled"]


def test_the_end_of_the_server_is_no_departure() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def end() -> None:
        running = asyncio.ensure_future(run_until_gone(application, {}, b"", receiver(asyncio.Event()), _send))
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(end())


def test_a_departure_after_the_answer_changes_nothing() -> None:
    async def answer() -> None:
        leaves = asyncio.Event()

        async def application(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(0)  # the watcher waits by now
            leaves.set()

        await run_until_gone(application, {}, b"", receiver(leaves), _send)
        await asyncio.sleep(0.01)

    asyncio.run(answer())
