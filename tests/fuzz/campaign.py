"""The campaign of `make fuzz`: readers at a high rate, commands in forks, and real processes.

`python -m fuzz.campaign FOLDER --seed N --minutes M` works in a new folder and prints one JSON object at its end.
Each case is repeated by its name and its seed. A fault is minimised and written to `--found`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from figures import add_figures
from hostile.base import Base

from fuzz.base import make_all
from fuzz.commands import CommandLines, is_training
from fuzz.forks import MOST_GROWTH, MOST_SECONDS, Outcome, ended_within, forked, resident_bytes
from fuzz.minimise import smaller_bytes, smaller_list
from fuzz.mutations import mutate
from fuzz.readers import Reader, fault_of, make_readers

__all__ = ["Campaign", "Found", "load_everything", "readers_in", "write_found"]

BATCH = 200
STUCK_SECONDS = 60.0
"""Wall time after which a case that sleeps is stuck. Others may use the machine, so processor time counts besides."""
PROCESSES_IN_HALF_AN_HOUR = 1000
MINIMISE_SECONDS = 20.0


@dataclass(frozen=True)
class Found:
    """A case that went wrong. reader: empty for a command."""

    fault: str
    seed: int
    reader: str = ""
    content: bytes = b""
    command: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """As plain data for a file of tests/fuzz/found."""
        about: dict[str, Any] = {"fault": self.fault, "seed": self.seed}
        if self.reader:
            return {**about, "reader": self.reader, "content": base64.b64encode(self.content).decode("ascii")}
        return {**about, "command": [os.fsencode(word).decode("latin-1") for word in self.command]}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Found:
        """The inverse of `record`."""
        words = [os.fsdecode(word.encode("latin-1")) for word in record.get("command", [])]
        content = base64.b64decode(record.get("content", ""))
        return cls(record["fault"], record["seed"], record.get("reader", ""), content, tuple(words))


class HangError(BaseException):
    """A case took too long. Not an Exception, so that no handler in the code under test keeps it silent."""


def load_everything() -> None:
    """Import what commands import late, so that forks need not."""
    import importlib
    import pkgutil

    import manyheads

    for module in pkgutil.walk_packages(manyheads.__path__, "manyheads."):
        if not module.name.endswith(("__main__", "legacy_pickle_child", "cut_tatoeba")):
            try:
                importlib.import_module(module.name)
            except ImportError:  # an optional package
                continue


def readers_in(folder: Path) -> dict[str, Reader]:
    """The readers of a campaign's folder, with the honest files in it; each works on a copy."""
    honest, samples, copies = folder / "honest", folder / "samples", folder / "copies"
    copies.mkdir()
    run = honest / "run"
    texts = (honest / "config.yaml", honest / "source.txt", honest / "target.txt")
    base = Base(run, run / "model", honest / "data", *texts, honest / "marian")
    return make_readers(base, samples, copies)


@dataclass
class Campaign:
    """Runs cases. folder: new, for everything that they write. honest, samples: what they are made from."""

    folder: Path
    readers: dict[str, Reader]
    lines: CommandLines
    found: list[Found] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def start(cls, folder: Path) -> Campaign:
        """Make the honest files, in a child, and the readers of their copies."""
        from hostile.child import call

        folder.mkdir(parents=True, exist_ok=True)
        made = forked(
            lambda: make_all(folder, lambda arguments: call(arguments)[0]) is None, seconds=300, work_seconds=300
        )
        if made.code != 0:
            raise RuntimeError(f"the honest files were not made: {made.stderr[-2000:]}")
        return cls(folder, readers_in(folder), CommandLines(folder / "honest", folder / "samples"))

    # Readers

    def case(self, name: str, seed: int) -> bytes:
        """The content of a case of a reader."""
        reader = self.readers[name]
        return mutate(reader.kind, reader.seed, Random(f"{name} {seed}"))

    def read_cases(self, cases: Sequence[tuple[str, int]]) -> None:
        """Offer cases (reader's name, seed) in one child. What hangs or dies ends it; the rest goes on in another."""
        record = self.folder / "batch"
        done = 0
        while done < len(cases):
            record.write_bytes(b"")
            work = MOST_SECONDS * len(cases)  # each case has its own limit besides
            outcome = forked(partial(self._work, cases, done, record), seconds=STUCK_SECONDS, work_seconds=work)
            for line in record.read_text(encoding="utf-8").split("\n")[:-1]:
                place, fault = json.loads(line)
                done = place
                if fault:
                    self._note_case(fault, *cases[place])
            if outcome.code != 0:
                fault = "hung" if outcome.hung else f"exit code {outcome.code}"
                self._note_case(fault, *cases[done])
                done += 1
            else:
                done = len(cases)
        self.counts["readers"] += len(cases)

    def _work(self, cases: Sequence[tuple[str, int]], first: int, record: Path) -> int:
        """In the child: each case, with its place in `record` before it and its fault after it."""
        before = resident_bytes()
        with record.open("a", encoding="utf-8") as file:
            for place in range(first, len(cases)):
                name, seed = cases[place]
                file.write(json.dumps([place, ""]) + "\n")
                file.flush()
                fault = self._guarded_fault(self.readers[name], self.case(name, seed))
                if not fault and resident_bytes() - before > MOST_GROWTH:
                    fault, before = "memory grew", resident_bytes()
                if fault:
                    file.write(json.dumps([place, fault]) + "\n")
                    file.flush()
        return 0

    def _note_case(self, fault: str, name: str, seed: int) -> None:
        self._note(Found(fault, seed, name, self.case(name, seed)))

    def _guarded_fault(self, reader: Reader, content: bytes) -> str:
        def ring(*_: Any) -> None:
            raise HangError

        signal.signal(signal.SIGPROF, ring)
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        try:
            return fault_of(reader, content, self.folder / "copies")
        except HangError:
            return f"more than {MOST_SECONDS:.0f} s of processor time"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def reader_fault(self, name: str, content: bytes) -> str:
        """What one content does to a reader, in a child of its own; empty: nothing."""
        record = self.folder / "single"

        def work() -> int:
            record.write_text(self._guarded_fault(self.readers[name], content), encoding="utf-8")
            return 0

        outcome = forked(work, seconds=STUCK_SECONDS)
        if outcome.code != 0:
            return "hung" if outcome.hung else f"exit code {outcome.code}"
        grown = outcome.grown_bytes > MOST_GROWTH
        return record.read_text(encoding="utf-8") or ("memory grew" if grown else "")

    # Commands

    def run_command(self, seed: int) -> None:
        """One command line in a child."""
        arguments = self.lines.draw(Random(f"command {seed}"))
        fault = self.command_fault(arguments)
        self.counts["commands"] += 1
        if fault:
            self._note(Found(fault, seed, command=tuple(arguments)))

    def command_fault(self, arguments: list[str]) -> str:
        """What is wrong with a command, run in a child in an empty folder; empty: nothing."""
        from manyheads.cli.main import main

        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            work = 60.0 if is_training(arguments) else MOST_SECONDS
            outcome = forked(lambda: main(arguments), seconds=STUCK_SECONDS, work_seconds=work, folder=Path(place))
        return outcome.fault(trains=is_training(arguments))

    def run_process(self, seed: int) -> None:
        """One command line in a process of its own, as a user starts it."""
        arguments = self.lines.draw(Random(f"process {seed}"))
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            outcome = _in_process(arguments, Path(place))
        self.counts["processes"] += 1
        if fault := outcome.fault(trains=True):
            self._note(Found(fault, seed, command=tuple(arguments)))

    def _note(self, found: Found) -> None:
        known = {(one.fault, one.reader, one.command[:1]) for one in self.found}
        if (found.fault, found.reader, found.command[:1]) not in known:
            print(
                f"found: {found.fault}: {found.reader or ' '.join(map(ascii, found.command))}",
                file=sys.stderr,
                flush=True,
            )
            self.found.append(found)

    # All

    def run(self, seed: int, seconds: float, processes: int) -> None:
        """Run cases until the time is over: readers for two thirds of it, commands and processes for the rest.

        Args: processes: that many of them over the whole time.
        """
        started = time.monotonic()
        names = sorted(self.readers)
        spent: Counter[str] = Counter()
        turn = 0
        while (passed := time.monotonic() - started) < seconds:
            begun = time.monotonic()
            due = self.counts["processes"] < processes * passed / seconds
            kind = "processes" if due else "readers" if spent["readers"] <= 2 * spent["commands"] else "commands"
            if kind == "processes":
                self.run_process(seed * 1_000_000 + self.counts["processes"])
            elif kind == "commands":
                self.run_command(seed * 1_000_000 + self.counts["commands"])
            else:
                first = seed * 100_000_000 + turn // len(names) * BATCH
                self.read_cases([(names[turn % len(names)], first + number) for number in range(BATCH)])
                turn += 1
            spent[kind] += time.monotonic() - begun
        self.counts["seconds"] = round(time.monotonic() - started)

    def minimised(self, found: Found) -> Found:
        """The same fault by a smaller case, as far as a short time allows."""
        until = time.monotonic() + MINIMISE_SECONDS
        if found.reader:
            same: Callable[[bytes], bool] = lambda content: self.reader_fault(found.reader, content) == found.fault  # noqa: E731
            content = smaller_bytes(found.content, same, until) if same(found.content) else found.content
            return Found(found.fault, found.seed, found.reader, content)
        fails: Callable[[list[str]], bool] = lambda words: self.command_fault(words) == found.fault  # noqa: E731
        words = list(found.command)
        words = (
            [words[0], *smaller_list(words[1:], lambda rest: fails([words[0], *rest]), until)]
            if fails(words)
            else words
        )
        return Found(found.fault, found.seed, command=tuple(words))


def _in_process(arguments: list[str], folder: Path) -> Outcome:
    started = time.monotonic()
    command = [sys.executable, "-m", "manyheads", *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        hung = not ended_within(process.pid, STUCK_SECONDS, STUCK_SECONDS)
        if hung:
            process.kill()
        code = process.wait()
        told, wrong = (os.pread(file.fileno(), 2**20, 0).decode("utf-8", "replace") for file in (out, err))
    return Outcome(code, told, wrong, time.monotonic() - started, 0, hung)


def write_found(campaign: Campaign, folder: Path) -> list[str]:
    """Minimise every fault and write it. Paths of this campaign's folder are written as `{folder}`."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for one in campaign.found:
        found = campaign.minimised(one)
        command = tuple(word.replace(str(campaign.folder), "{folder}") for word in found.command)
        record = Found(found.fault, found.seed, found.reader, found.content, command).record()
        text = json.dumps(record, indent=1, ensure_ascii=True) + "\n"
        kind = (found.reader or found.command[0] or "none").replace("/", "-").replace(" ", "-")
        kind = "".join(char for char in kind if char.isascii() and (char.isalnum() or char in "-.")) or "none"
        path = folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
        path.write_text(text, encoding="utf-8")
        names.append(path.name)
    return names


def main() -> int:
    """See the module. Returns: 1 if a fault was found."""
    parser = argparse.ArgumentParser(description="Fuzz readers and commands.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--processes", type=int, default=None, help="default: 1,000 in 30 minutes")
    parser.add_argument("--found", type=Path, default=None, help="a folder for minimised cases")
    parser.add_argument("--figures", type=Path, default=None, help="a file to which the counts are added")
    given = parser.parse_args()
    shutil.rmtree(given.folder, ignore_errors=True)
    load_everything()
    campaign = Campaign.start(given.folder.resolve())
    processes = given.processes
    if processes is None:
        processes = round(PROCESSES_IN_HALF_AN_HOUR * given.minutes / 30)
    campaign.run(given.seed, given.minutes * 60, processes)
    names = [] if given.found is None else write_found(campaign, given.found)
    faults = [{"fault": one.fault, "case": one.reader or list(one.command), "seed": one.seed} for one in campaign.found]
    if given.figures is not None:
        told = {"goal": "R6", "name": f"a campaign of random cases, seed {given.seed}", "test": "fuzz.campaign"}
        outcome = "failed" if faults else "passed"
        add_figures(given.figures, [{**told, **campaign.counts, "faults": len(faults), "outcome": outcome}])
    print(json.dumps({"seed": given.seed, **campaign.counts, "faults": faults, "written": names}, indent=1))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
