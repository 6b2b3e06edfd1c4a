"""A group of ranks: sums, messages from the main rank, barriers, and names of lost ranks.

A group of one has the same methods, which do nothing, so the training loop is written once.

Short exchanges are collectives (all-reduce), which time out if a rank is missing. Work that may take one rank minutes,
such as writing a checkpoint or preparing data, is waited for through the launcher's key-value store, without a limit as
long as the rank shows that it is alive: a slow disk is not a lost rank. Messages are JSON; nothing is pickled.

A collective that waits for a lost rank cannot tell which rank that is, and in some backends it never returns. So
silence is detected separately (`Liveness`): each rank increments a number in the key-value store about once a second.
If the number of a rank does not change for longer than the timeout, the other ranks report it as lost. If the network
to the store is lost, a call of the store does not return either, for many minutes: no packet says that the other side
is gone. A second thread watches the first one.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from manyheads.distributed.process import Process
from manyheads.errors import ManyHeadsError, RankLostError

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


T = TypeVar("T")
_MORE_FOR_COLLECTIVES = 4.0
"""A collective waits this many seconds longer than the liveness timeout, so that the heartbeat thread, which knows the
lost rank, reports first."""

_NAMING_SECONDS = 3.0
_MEETING_SECONDS = 60.0
_LEAVING_SECONDS = 10.0
_WORRIED_SECONDS = 10.0
"""Timeout in seconds after this rank was told to end.

A launcher does this when another rank has died, and waits 30 s.
"""
_SIGNS_OF_NETWORK = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "store", "broken pipe", "recv")


class Group:
    """Ranks that train one model.

    Args:
        process: rank and world size of this process; None: a single process.
        device: device of the tensors that are exchanged.
        store: the launcher's store; None: a single process.
        liveness: the heartbeat monitor; None: a single process.
    """

    def __init__(
        self,
        process: Process | None = None,
        device: torch.device | None = None,
        store: Any = None,
        liveness: Liveness | None = None,
    ) -> None:
        self.process = process or Process()
        self.device = device or torch.device("cpu")
        self._store = store
        self._liveness = liveness
        self._number = 0
        self.is_told_to_end: Callable[[], bool] = lambda: False

    @property
    def rank(self) -> int:
        return self.process.rank

    @property
    def world(self) -> int:
        return self.process.world

    @property
    def is_main(self) -> bool:
        return self.process.is_main

    @property
    def is_alone(self) -> bool:
        return self.world == 1

    def device_like(self, device: torch.device) -> torch.device:
        """Return the device of this rank, where `device` names a type."""
        return self.device if device.type == "cuda" and not self.is_alone else device

    def doing(self, what: str) -> None:
        """Set the description of this rank's work for messages of other ranks, such as `at step 12`."""
        if self._liveness is not None:
            self._liveness.doing = what

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of every rank's values, in place; bit-identical on all ranks."""
        if not self.is_alone:
            dist.all_reduce(values)
        return values

    def highest(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise maximum of every rank's values."""
        if self.is_alone:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def joined(self, part: Tensor | None, *, rows: int) -> Tensor:
        """Return the concatenated rows of all ranks, in the order of ranks, on every rank.

        Args:
            part: this rank's rows, (rows, ...), of the same type and inner shape on all; None: this rank has none.
            rows: total number of rows.
        """
        if self.is_alone:
            assert part is not None
            return part
        found = self.exchange(None if part is None else [str(part.dtype), list(part.shape)])
        kind, shape = next(one for one in found if one is not None)
        dtype = getattr(torch, kind.removeprefix("torch."))
        whole = torch.zeros([rows, *shape[1:]], dtype=dtype, device=self.device)
        first = sum(one[1][0] for one in found[: self.rank] if one is not None)
        if part is not None:
            whole[first : first + part.shape[0]] = part.to(self.device)
        # Each row is non-zero on one rank only, so adding the bits does not round.
        bits = whole.view(torch.uint8) if whole.dtype.is_floating_point else whole
        dist.all_reduce(bits)
        return whole

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank. value: a JSON value."""
        if self.is_alone:
            return [value]
        self._number += 1  # all ranks do the same exchanges in order, so the names agree
        name = f"exchange/{self._number}"
        self._store.set(f"{name}/{self.rank}", json.dumps(value))
        if self._store.add(f"{name}/count", 1) == self.world:
            self._store.set(f"{name}/all", "1")
        self._wait_for(f"{name}/all")
        raw = self._store.multi_get([f"{name}/{rank}" for rank in range(self.world)])
        self._clean()
        return [json.loads(text) for text in raw]

    def meet(self) -> None:
        """Wait until every rank has called this, as long as all are alive.

        Raises: RankLostError: another rank has failed.
        """
        self.exchange(None)

    def from_main(self, make: Callable[[], T]) -> T:
        """Return the result of the main rank's `make()` on every rank. T: a JSON value.

        Raises: on the main rank, the exception of `make()`; RankLostError on the others.
        """
        value = make() if self.is_main else None
        found: T = self.exchange(value)[0]
        return found

    def ask_to_stop(self, number: int) -> None:
        """Tell all ranks that this one received a signal to stop."""
        if not self.is_alone:
            self._store.set("stop", str(number))

    def asked_to_stop(self) -> int | None:
        """Return the signal with which any rank was told to stop."""
        if self.is_alone or not self._store.check(["stop"]):
            return None
        return int(self._store.get("stop"))

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on the main rank first, so that the other ranks find the files that it writes."""
        if not self.is_main:
            self.meet()
        yield
        if self.is_main:
            self.meet()

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Report failures within the block to all ranks, and name a lost rank.

        Raises: RankLostError: instead of a collective's error when another rank is lost.
        """
        if self.is_alone:
            yield
            return
        try:
            yield
        except RankLostError:
            raise
        except ManyHeadsError as error:
            self._tell(str(error), error.exit_code)
            raise
        except Exception as error:
            if not isinstance(error, RuntimeError | OSError) or not _is_of_network(error):
                self._tell(f"{type(error).__name__}: {error}", 1)
                raise
            raise self._named(error) from error

    def close(self) -> None:
        """Leave the group; called after a successful run."""
        if self.is_alone:
            return
        self.meet()
        if self._liveness is not None:
            self._liveness.close()
        dist.destroy_process_group()
        # Without torchrun's agent the store is in the main rank's process, so the main rank must end last.
        left, began = self._store.add("left", 1), time.monotonic()
        while self.is_main and left < self.world and time.monotonic() - began < _LEAVING_SECONDS:
            time.sleep(0.01)
            left = self._store.add("left", 0)

    def _clean(self) -> None:
        """Delete an old exchange that no rank needs any more, because the store is in memory."""
        if self.is_main and self._number > 8:
            for key in ("count", "all", *range(self.world)):
                self._store.delete_key(f"exchange/{self._number - 8}/{key}")

    def _wait_for(self, key: str) -> None:
        pause, began = 0.0005, time.monotonic()
        while not self._store.check([key]):
            if self._store.check(["failed"]):
                raise self._failure()
            if self.is_told_to_end() and time.monotonic() - began > 1 and self._liveness is not None:
                lost = self._liveness.lost(_WORRIED_SECONDS)
                if lost is not None:
                    raise RankLostError(f"{lost}.")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _tell(self, text: str, code: int) -> None:
        try:
            self._store.set("failed", json.dumps([self.rank, text, code]))
        except RuntimeError:  # no other rank is left
            return

    def _failure(self) -> RankLostError:
        rank, text, code = json.loads(self._store.get("failed"))
        error = RankLostError(f"rank {rank} has failed: {text}")
        error.exit_code = int(code)
        return error

    def _named(self, error: BaseException) -> RankLostError:
        """Return the reason why a collective failed: a rank that failed, fell silent, or did not arrive."""
        assert self._liveness is not None
        try:
            if self._store.check(["failed"]):
                return self._failure()
        except RuntimeError:
            return RankLostError(f"{self._liveness.lost(_NAMING_SECONDS)}.")
        lost = self._liveness.lost(_NAMING_SECONDS)
        try:
            if lost is None and self._store.check(["failed"]):
                return self._failure()
        except RuntimeError:
            lost = None
        first = str(error).split("\n")[0][:200]
        if lost is None:
            return RankLostError(
                f"a rank does not come to what rank {self.rank} waits for; all are alive: {self._liveness.behind()}"
                f" ({first}). A longer --timeout helps if it is only slow."
            )
        return RankLostError(f"{lost}.")


def connect(process: Process, device: str, timeout: float) -> Group:
    """Connect to the other ranks through the launcher's store.

    Args: see `launch.start`.

    Raises: RankLostError: not all ranks connect within the timeout (at least a minute).
    """
    on_gpu = device == "cuda"
    patience = timedelta(seconds=timeout + _MORE_FOR_COLLECTIVES)
    meeting = timedelta(seconds=max(_MEETING_SECONDS, timeout))
    if on_gpu:
        torch.cuda.set_device(process.local_rank)
    try:
        # A separate connection for heartbeats, because a wait on a connection blocks it for other threads.
        first, second = (next(rendezvous("env://", timeout=meeting))[0] for _ in range(2))
        attempt = agree_on_attempt(PrefixStore("manyheads", first), process, meeting.total_seconds())
        store, beside = (PrefixStore(f"manyheads/{attempt}", one) for one in (first, second))
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=PrefixStore("group", store),
            rank=process.rank,
            world_size=process.world,
            timeout=patience,
        )
    except (RuntimeError, ValueError, OSError) as error:
        first = str(error).split("\n")[0][:300]
        raise RankLostError(
            f"rank {process.rank} of {process.world} cannot reach the others ({first}). Are all of them started, with"
            " the same --rdzv-endpoint, and may they reach that port?"
        ) from error
    liveness = Liveness(beside, process.rank, process.world, timeout, lambda text: _end(process, text))
    return Group(process, torch.device("cuda", process.local_rank) if on_gpu else None, store, liveness)


def agree_on_attempt(store: Any, process: Process, seconds: float) -> str:
    """Return a name that is unique to this start of all ranks. Launchers keep their store across restarts, with the
    entries of dead ranks, and count restarts separately on each machine.

    Every rank writes its own random number. The main rank publishes the numbers that it has read, until every rank
    finds its own among them. Only then is the name valid.

    Raises: TimeoutError: not all ranks arrived.
    """
    hello, began, published, acknowledged = uuid4().hex, time.monotonic(), "", ""
    store.set(f"hello/{process.rank}", hello)
    keys = [f"hello/{rank}" for rank in range(process.world)]
    while time.monotonic() - began < seconds:
        if process.is_main and store.check(keys):
            seen = json.dumps([text.decode() for text in store.multi_get(keys)])
            if seen != published:
                published = seen
                store.set("attempt", json.dumps([uuid4().hex, json.loads(seen)]))
        if store.check(["attempt"]):
            name, hellos = json.loads(store.get("attempt"))
            mine = hellos[process.rank : process.rank + 1] == [hello] and len(hellos) == process.world
            if mine and acknowledged != name:
                acknowledged = name
                if store.add(f"{name}/here", 1) == process.world:
                    store.set(f"{name}/go", "1")
            if mine and store.check([f"{name}/go"]):
                return str(name)
        time.sleep(0.01)
    raise TimeoutError(f"not all of {process.world} ranks came within {seconds:.0f} s")


def _end(process: Process, text: str) -> None:
    """End this process at once, because its main thread may never return from a collective."""
    sys.stderr.write(f"manyheads (rank {process.rank}): {text}. What was saved is intact.\n")
    sys.stderr.flush()
    os._exit(RankLostError.exit_code)


def _is_of_network(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(sign in text for sign in _SIGNS_OF_NETWORK)
