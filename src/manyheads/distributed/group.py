"""A group of ranks: sums over them, words from the main one, meetings, and the names of those that are lost.

A group of one has the same methods and does nothing in them, so the loop is written once.

Short exchanges are collectives (all-reduce), which end by themselves when nobody comes. What may take a rank minutes
by itself, as writing a checkpoint or preparing data, is waited for through the launcher's key-value store, with no
limit but signs of life (see `liveness`): a slow disk is no lost rank. Words travel as JSON; nothing is pickled.
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

from manyheads.distributed.launch import Place
from manyheads.distributed.liveness import Liveness
from manyheads.errors import ManyHeadsError, RankLostError

__all__ = ["Group", "connect"]

T = TypeVar("T")
_MORE_FOR_COLLECTIVES = 4.0
"""Seconds by which a collective waits longer than silence lasts, so that the thread that knows names speaks first."""

_NAMING_SECONDS = 3.0
_MEETING_SECONDS = 60.0
_LEAVING_SECONDS = 10.0
_WORRIED_SECONDS = 10.0
"""Silence that is enough once this rank was told to end: launchers do that when another one died, and wait 30 s."""
_SIGNS_OF_NETWORK = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "store", "broken pipe", "recv")


class Group:
    """Ranks that train one model.

    Args:
        place: of this process; None: alone.
        device: where tensors that travel are.
        store: the launcher's; None: alone.
        liveness: signs of life; None: alone.
    """

    def __init__(
        self,
        place: Place | None = None,
        device: torch.device | None = None,
        store: Any = None,
        liveness: Liveness | None = None,
    ) -> None:
        self.place = place or Place()
        self.device = device or torch.device("cpu")
        self._store = store
        self._liveness = liveness
        self._number = 0
        self.is_told_to_end: Callable[[], bool] = lambda: False

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world(self) -> int:
        return self.place.world

    @property
    def is_main(self) -> bool:
        return self.place.is_main

    @property
    def is_alone(self) -> bool:
        return self.world == 1

    def device_like(self, device: torch.device) -> torch.device:
        """The device of this rank, where `device` names a kind of them."""
        return self.device if device.type == "cuda" and not self.is_alone else device

    def doing(self, what: str) -> None:
        """What the others say of this rank should it be lost: `at step 12`."""
        if self._liveness is not None:
            self._liveness.doing = what

    def sum(self, values: Tensor) -> Tensor:
        """The sum of every rank's values, in place; the same bits on all of them."""
        if not self.is_alone:
            dist.all_reduce(values)
        return values

    def highest(self, values: Sequence[float]) -> list[float]:
        """The highest of every rank's values, place by place."""
        if self.is_alone:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def joined(self, part: Tensor | None, *, rows: int) -> Tensor:
        """Every rank's rows, one rank's after another's, on every rank.

        Args:
            part: this rank's, (rows, ...), of the same type and inner shape on all; None: it has none.
            rows: of the whole.
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
        # Every row comes from one rank alone; bits are added to zeros, so nothing is rounded.
        bits = whole.view(torch.uint8) if whole.dtype.is_floating_point else whole
        dist.all_reduce(bits)
        return whole

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. value: JSON can hold it."""
        if self.is_alone:
            return [value]
        name = self._next("exchange")
        self._store.set(f"{name}/{self.rank}", json.dumps(value))
        self._arrive(name)
        raw = self._store.multi_get([f"{name}/{rank}" for rank in range(self.world)])
        self._clean(name)
        return [json.loads(text) for text in raw]

    def meet(self) -> None:
        """Wait for every rank to come here, as long as all live.

        Raises: RankLostError: another rank has failed.
        """
        if not self.is_alone:
            name = self._next("meet")
            self._arrive(name)
            self._clean(name)

    def from_main(self, make: Callable[[], T]) -> T:
        """What the main rank's `make()` gives, on every rank. T: JSON can hold it.

        Raises: whatever it raises, on the main rank; RankLostError on the others.
        """
        if self.is_alone:
            return make()
        name = self._next("word")
        if self.is_main:
            value = make()
            self._store.set(f"{name}/value", json.dumps(value))
            self._arrive(name)
            self._clean(name)
            return value
        self._wait_for(f"{name}/value")
        found: T = json.loads(self._store.get(f"{name}/value"))
        self._arrive(name)
        return found

    def ask_to_stop(self, number: int) -> None:
        """Let all ranks know that a signal asked this one to end."""
        if not self.is_alone:
            self._store.set("stop", str(number))

    def asked_to_stop(self) -> int | None:
        """The signal that asked any rank to end."""
        if self.is_alone or not self._store.check(["stop"]):
            return None
        return int(self._store.get("stop"))

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The block, on the main rank before all others: what it leaves on disk they find."""
        if not self.is_main:
            self.meet()
        yield
        if self.is_main:
            self.meet()

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Failures within the block are told to all ranks, and a lost rank gets its name.

        Raises: RankLostError: in place of what a collective says when another rank is gone.
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
        """Let go of the others; to be called where all went well."""
        if self.is_alone:
            return
        self.meet()
        if self._liveness is not None:
            self._liveness.close()
        dist.destroy_process_group()
        # Without torchrun's agent the main rank's own process holds the store, so it is the last to go.
        left, began = self._store.add("left", 1), time.monotonic()
        while self.is_main and left < self.world and time.monotonic() - began < _LEAVING_SECONDS:
            time.sleep(0.01)
            left = self._store.add("left", 0)

    def _next(self, kind: str) -> str:
        """A name that all ranks give to the same exchange, as all do the same exchanges in the same order."""
        self._number += 1
        return f"{kind}/{self._number}"

    def _arrive(self, name: str) -> None:
        """Count this rank, and wait until all are counted."""
        if self._store.add(f"{name}/count", 1) == self.world:
            self._store.set(f"{name}/all", "1")
        self._wait_for(f"{name}/all")

    def _clean(self, name: str) -> None:
        """Names of long ago, which nobody asks for any more, are forgotten; the store lives in memory."""
        if self.is_main and self._number > 8:
            for kind in ("exchange", "meet", "word"):
                old = f"{kind}/{self._number - 8}"
                for key in ("count", "all", "value", *map(str, range(self.world))):
                    self._store.delete_key(f"{old}/{key}")

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
        except RuntimeError:  # nobody is there to be told
            return

    def _failure(self) -> RankLostError:
        rank, text, code = json.loads(self._store.get("failed"))
        error = RankLostError(f"rank {rank} has failed: {text}")
        error.exit_code = int(code)
        return error

    def _named(self, error: BaseException) -> RankLostError:
        """Why a collective broke: a rank that failed and said so, or fell silent, or does not come."""
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


def connect(place: Place, device: str, timeout: float) -> Group:
    """Meet the other ranks at the launcher's store.

    Args: see `launch.start`.

    Raises: RankLostError: they do not all come within the timeout, or at least a minute.
    """
    on_gpu = device == "cuda"
    patience = timedelta(seconds=timeout + _MORE_FOR_COLLECTIVES)
    meeting = timedelta(seconds=max(_MEETING_SECONDS, timeout))
    if on_gpu:
        torch.cuda.set_device(place.local_rank)
    try:
        # A connection for signs of life alone: a wait on one blocks it for other threads.
        first, second = (next(rendezvous("env://", timeout=meeting))[0] for _ in range(2))
        attempt = agree_on_attempt(PrefixStore("manyheads", first), place, meeting.total_seconds())
        store, beside = (PrefixStore(f"manyheads/{attempt}", one) for one in (first, second))
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=PrefixStore("group", store),
            rank=place.rank,
            world_size=place.world,
            timeout=patience,
        )
    except (RuntimeError, ValueError, OSError) as error:
        first = str(error).split("\n")[0][:300]
        raise RankLostError(
            f"rank {place.rank} of {place.world} cannot reach the others ({first}). Are all of them started, with the"
            " same --rdzv-endpoint, and may they reach that port?"
        ) from error
    liveness = Liveness(beside, place.rank, place.world, timeout, lambda text: _end(place, text))
    return Group(place, torch.device("cuda", place.local_rank) if on_gpu else None, store, liveness)


def agree_on_attempt(store: Any, place: Place, seconds: float) -> str:
    """A name that this start of all ranks alone has: launchers keep their store when they begin again, and in it
    whatever dead ranks left there, and they count restarts a machine at a time.

    Every rank says hello with a number of its own. The main one publishes the numbers that it sees, until every rank
    has found its own among them; only then is the name good.

    Raises: TimeoutError: not all ranks came.
    """
    hello, began, published, acknowledged = uuid4().hex, time.monotonic(), "", ""
    store.set(f"hello/{place.rank}", hello)
    keys = [f"hello/{rank}" for rank in range(place.world)]
    while time.monotonic() - began < seconds:
        if place.is_main and store.check(keys):
            seen = json.dumps([text.decode() for text in store.multi_get(keys)])
            if seen != published:
                published = seen
                store.set("attempt", json.dumps([uuid4().hex, json.loads(seen)]))
        if store.check(["attempt"]):
            name, hellos = json.loads(store.get("attempt"))
            mine = hellos[place.rank : place.rank + 1] == [hello] and len(hellos) == place.world
            if mine and acknowledged != name:
                acknowledged = name
                if store.add(f"{name}/here", 1) == place.world:
                    store.set(f"{name}/go", "1")
            if mine and store.check([f"{name}/go"]):
                return str(name)
        time.sleep(0.01)
    raise TimeoutError(f"not all of {place.world} ranks came within {seconds:.0f} s")


def _end(place: Place, text: str) -> None:
    """End this process at once: its main thread may never come back from a collective."""
    sys.stderr.write(f"manyheads (rank {place.rank}): {text}. What was saved is intact.\n")
    sys.stderr.flush()
    os._exit(RankLostError.exit_code)


def _is_of_network(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(sign in text for sign in _SIGNS_OF_NETWORK)
