"""Delivery of events and results from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Mailbox"]


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
