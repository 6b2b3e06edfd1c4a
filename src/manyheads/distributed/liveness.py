"""Heartbeats: a thread per rank that sends them, watches all other ranks, and ends the process when one is silent.

A collective that waits for a lost rank cannot tell which rank that is, and in some backends it never returns. So
silence is detected separately: each rank increments a number in the launcher's key-value store about once a second. If
the number of a rank does not change for longer than the timeout, the other ranks report it as lost.

If the network to the store is lost, a call of the store does not return either, for many minutes: no packet says that
the other side is gone. A second thread watches the first one.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_SLOWEST_BEAT = 1.0
_BEATS_A_TIMEOUT = 8


@dataclass
class Sign:
    """The last known state of a rank: machine, activity, and time of the last heartbeat."""

    text: str = ""
    doing: str = "starting"
    host: str = "an unknown machine"
    pid: int = 0
    seen: float = 0.0
    ended: bool = False


class Liveness:
    """The heartbeats of a group.

    Args:
        store: a separate connection to the key-value store (a wait on it blocks it for other threads).
        rank: rank of this process.
        world: number of ranks.
        timeout: seconds of silence after which a rank is lost.
        on_loss: called in the thread with a sentence that names the lost rank; expected not to return.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout: float, on_loss: Callable[[str], None]) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timeout
        self._on_loss = on_loss
        self._beat = min(_SLOWEST_BEAT, timeout / _BEATS_A_TIMEOUT)
        self._signs = {other: Sign(seen=time.monotonic()) for other in range(world) if other != rank}
        self._number = 0
        self._store_seen = time.monotonic()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.doing = "starting"
        self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)
        self._watch = threading.Thread(target=self._watch_store, name="signs of the store", daemon=True)
        self._say()
        self._thread.start()
        self._watch.start()

    def close(self) -> None:
        """Report that this rank ends normally, and stop watching."""
        self._over.set()
        self._thread.join(timeout=2 * self._beat + 1)
        if self._thread.is_alive():  # it waits for a store that does not answer, and so would this thread
            return
        try:
            self._say(ended=True)
        except RuntimeError:  # the store is gone, so no rank can be told
            return

    def lost(self, patience: float) -> str | None:
        """Wait up to `patience` seconds and return a description of the first silent rank; None: all are alive.

        Args: patience: in seconds, at least two heartbeats.
        """
        began = time.monotonic()
        while True:
            with self._lock:
                seen = {rank: max(sign.seen, began - self._beat) for rank, sign in self._signs.items()}
                silent = [rank for rank, when in seen.items() if time.monotonic() - when > patience]
                heard = all(when > began + patience / 2 for when in seen.values())
                if silent:
                    return self._describe(silent[0])
                if heard:
                    return None
            if time.monotonic() - self._store_seen > patience:
                return self._no_store()
            time.sleep(self._beat / 4)

    def behind(self) -> str:
        """Describe the last known activity of every other rank, for the case that all are alive but one does not
        arrive.
        """
        with self._lock:
            return ", ".join(f"rank {rank} is {sign.doing}" for rank, sign in sorted(self._signs.items()))

    def _describe(self, rank: int) -> str:
        sign = self._signs[rank]
        silence = time.monotonic() - sign.seen
        where = f"process {sign.pid} on {sign.host}" if sign.pid else "which never answered"
        return f"rank {rank} ({where}) is lost: no sign of life for {silence:.0f} s; it was {sign.doing}"

    def _no_store(self) -> str:
        silence = time.monotonic() - self._store_seen
        return (
            "the launcher's store is lost, and with it torchrun, rank 0's machine or the network to it: no answer for"
            f" {silence:.0f} s"
        )

    def _run(self) -> None:
        while not self._over.wait(self._beat):
            try:
                self._say()
                self._listen()
                self._store_seen = time.monotonic()
            except RuntimeError:  # the store does not answer
                if time.monotonic() - self._store_seen > self._timeout:
                    self._on_loss(self._no_store())
                continue
            with self._lock:
                now = time.monotonic()
                silent = [r for r, s in self._signs.items() if not s.ended and now - s.seen > self._timeout]
                text = self._describe(silent[0]) if silent else None
            if text is not None:
                self._on_loss(self._failure() or text)

    def _watch_store(self) -> None:
        """End this process if the store has been silent for the timeout while a call waits for it.

        The process counts its own beats, because the clock continues while a process is stopped.
        """
        seen, silent = self._store_seen, 0.0
        while not self._over.wait(self._beat):
            silent = silent + self._beat if seen == self._store_seen else 0.0
            seen = self._store_seen
            if silent > self._timeout:
                self._on_loss(self._no_store())

    def _failure(self) -> str | None:
        """Return the error that a failed rank reported before it fell silent."""
        try:
            if not self._store.check(["failed"]):
                return None
            rank, text, _ = json.loads(self._store.get("failed"))
        except RuntimeError:
            return None
        return f"rank {rank} has failed: {text}"

    def _say(self, *, ended: bool = False) -> None:
        self._number += 1
        record = [self._number, self.doing, socket.gethostname(), os.getpid(), ended]
        self._store.set(f"alive/{self._rank}", json.dumps(record))

    def _listen(self) -> None:
        keys = {rank: f"alive/{rank}" for rank in self._signs}
        known = [rank for rank, key in keys.items() if self._store.check([key])]
        texts = self._store.multi_get([keys[rank] for rank in known]) if known else []
        now = time.monotonic()
        with self._lock:
            for rank, raw in zip(known, texts, strict=True):
                text, sign = raw.decode(), self._signs[rank]
                if text != sign.text:
                    _, doing, host, pid, ended = json.loads(text)
                    self._signs[rank] = Sign(text, str(doing), str(host), int(pid), now, bool(ended))
