"""Heartbeats over a store that does not answer."""

import threading
import time

from manyheads.distributed.group import Liveness

TIMEOUT_SECONDS = 2.0
PATIENCE_SECONDS = 30


class Unplugged:
    """A store whose calls never return once the cable is out, as those of a TCP connection."""

    def __init__(self) -> None:
        self.cable, self.calls = threading.Event(), 0
        self.cable.set()

    def set(self, key: str, value: str) -> None:
        self.calls += 1
        self.cable.wait()

    def check(self, keys: list[str]) -> bool:
        self.cable.wait()
        return False


def test_a_call_that_does_not_return_is_noticed() -> None:
    store, told, texts = Unplugged(), threading.Event(), []

    def on_loss(text: str) -> None:
        texts.append(text)
        told.set()

    liveness = Liveness(store, 0, 1, TIMEOUT_SECONDS, on_loss)
    assert not told.wait(TIMEOUT_SECONDS)
    assert store.calls > 3
    store.cable.clear()
    assert told.wait(PATIENCE_SECONDS)
    assert "torchrun, rank 0's machine or the network to it: no answer for" in texts[0]
    began = time.monotonic()
    liveness.close()  # which would wait for the same call
    assert time.monotonic() - began < PATIENCE_SECONDS
    store.cable.set()


def test_a_store_that_answers_late_is_not_lost() -> None:
    store, texts = Unplugged(), []
    liveness = Liveness(store, 0, 1, TIMEOUT_SECONDS, texts.append)
    for _ in range(3):
        store.cable.clear()
        time.sleep(TIMEOUT_SECONDS / 4)
        store.cable.set()
        time.sleep(TIMEOUT_SECONDS / 4)
    liveness.close()
    assert texts == []
