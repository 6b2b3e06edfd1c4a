"""A group of ranks: sums, messages from the main rank, barriers, and names of lost ranks.

A group of one has the same methods, which do nothing, so the training loop is written once.

Short exchanges are collectives (all-reduce), which time out if a rank is missing. Work that may take one rank minutes,
such as writing a checkpoint or preparing data, is waited for through the launcher's key-value store, without a limit as
long as the rank shows that it is alive (see `liveness`): a slow disk is not a lost rank. Messages are JSON; nothing is
pickled.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from manyheads.distributed.liveness import Liveness
from manyheads.distributed.process import Process
from manyheads.errors import ManyHeadsError, RankLostError

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
