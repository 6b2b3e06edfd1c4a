"""Quality against minutes of training: ours beside what a user would pick, on the same data and machine.

    python benchmarks/curves.py translation --minutes 5 --work /tmp/curves [--sides ours torch joeynmt] [--data FOLDER]
    python benchmarks/curves.py language --minutes 10 --work /tmp/curves --picture language.png
    python benchmarks/curves.py long --minutes 10 --work /tmp/curves --json benchmarks/DATE-curves-long.json

translation: the preset `demo`; a loop around torch.nn.Transformer after PyTorch's tutorial; JoeyNMT 2.3, which is
installed below --work from PyPI. language: the preset `xl-demo`; GPT-2 of transformers. long: the preset
`reformer-demo`; the same in pieces of an eighth of the length, eight at once; a decoder with exact attention. Data: the
embedded sentence pairs or novel, or --data, a folder of `manyheads prepare` with validation and test sets. Each side
has its own recommended settings (first lines and constants of curve_sides/) and the same tokens as ours.

Each side is a process of its own, and nothing else should run. Round 1 begins with ours, round 2 ends with ours. Only
updates count as time (`curve_sides/looks.py`): at each of --looks even distances the clock stands still, and the side
reads the validation set, or translates it by greedy search. Schedules that fall to the end do so by the same clock, so
a look before the end is of a run that was not planned to end there. Test sets are read at the end, also by the search
that a side recommends. Where `precision auto` chooses bf16 all sides train in it, and the speed of each peer in both
precisions is measured before.

Results are in WORK/NAME/results.json after each run. The same command goes on after the last finished run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curves_data import export, score
from curves_report import LABELS, draw, report
from report import commit, describe_machine
from run import look_at_machine

from manyheads.errors import ManyHeadsError

FOLDER = Path(__file__).resolve().parent / "curve_sides"
SIDES = {"translation": ("ours", "torch", "joeynmt"), "language": ("ours", "gpt2"), "long": ("ours", "short", "exact")}
SCRIPTS = {
    "ours": "our_side.py",
    "short": "our_side.py",
    "torch": "plain_transformer.py",
    "joeynmt": "joeynmt_side.py",
    "gpt2": "gpt2_side.py",
    "exact": "our_side.py",
}
JOEYNMT = ("joeynmt==2.3.0", "importlib_metadata", "sentencepiece==0.1.99")
SMALL_LENGTH = 256
SHORTER = 8
INSTALL_MINUTES = 30.0
SAY_SECONDS = 10.0
LOOK_MINUTES = 60.0
"""A side is given up after four times its minutes and this long."""


class SideError(RuntimeError):
    """A side cannot run here, or has failed; the message says why."""


@dataclass(frozen=True)
class Plan:
    """Of the command line. folder: for results and runs, named by what changes them."""

    what: str
    minutes: float
    sides: tuple[str, ...]
    rounds: int
    looks: int
    max_updates: int
    small: bool
    speed_seconds: float
    work: Path

    @property
    def folder(self) -> Path:
        limit = f"-{self.max_updates}-updates" if self.max_updates else ""
        return self.work / f"{self.what}-{self.minutes:g}-minutes{limit}{'-small' if self.small else ''}"

    def order(self, number: int) -> list[str]:
        """Sides in the order of a round, counted from 1."""
        return list(self.sides if number % 2 else reversed(self.sides))

    def shape(self, side: str, chosen: str) -> dict[str, int]:
        """Tokens of a sequence and sequences of an update, of `long`. chosen: the precision."""
        if self.what != "long":
            return {}
        from manyheads.tasks.language_modelling.settings import reformer_demo

        length = SMALL_LENGTH if self.small else reformer_demo(chosen).data.segment_len
        if side == "short":
            return {"length": length // SHORTER, "lanes": SHORTER}
        return {"length": length, "lanes": 1, **({"exact": True} if side == "exact" else {})}


def joeynmt_python(work: Path) -> str:
    """The interpreter of JoeyNMT's environment, which is made once.

    Raises: SideError: it cannot be made.
    """
    from importlib.metadata import version

    folder = work / "joeynmt"
    python = str(folder / "bin" / "python")
    if (folder / "ready").is_file():
        return python
    torch = os.environ.get("TORCH_SPEC") or f"torch=={version('torch').partition('+')[0]}"
    index = os.environ.get("TORCH_INDEX")
    pip = [python, "-m", "pip", "install", "--quiet"]
    for name, command in {
        "python -m venv": [sys.executable, "-m", "venv", "--clear", str(folder)],
        f"pip install {torch}": [*pip, *(["--index-url", index] if index else []), torch],
        f"pip install {' '.join(JOEYNMT)}": [*pip, torch, *JOEYNMT],
        "import joeynmt": [python, "-c", "import joeynmt.training"],
    }.items():
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment(ours=False),
                timeout=60 * INSTALL_MINUTES,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SideError(f"{name} failed: {error}") from None
        if done.returncode:
            raise SideError(f"{name} failed: {last_line(done.stderr)}")
    (folder / "ready").touch()
    return python


def environment(ours: bool) -> dict[str, str]:
    """Peers run as they come, ours from this checkout, whatever is installed."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return found | ({"PYTHONPATH": str(FOLDER.parents[1] / "src")} if ours else {})


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "it said nothing")[:400]


def run_side(plan: Plan, side: str, chosen: str, out: Path, **changes: Any) -> dict[str, Any]:
    """Run a side in a process of its own.

    Args:
        chosen: the precision that is chosen on this machine.
        out: the folder of the run.
        changes: of `looks.Task`.

    Returns: its side.json. Raises: SideError: it failed.
    """
    python = joeynmt_python(plan.work) if side == "joeynmt" else sys.executable
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    task: dict[str, Any] = {"data": str(plan.folder / "data"), "out": str(out), "minutes": plan.minutes}
    task |= {"precision": chosen, "sized_for": chosen}
    task |= {"max_updates": plan.max_updates, "num_looks": plan.looks, "small": plan.small}
    task |= plan.shape(side, chosen) | changes
    command = [python, str(FOLDER / SCRIPTS[side]), json.dumps(task)]
    deadline = time.monotonic() + 60 * (4 * task["minutes"] + LOOK_MINUTES)
    variables = environment(ours=side in ("ours", "short", "exact"))
    with (
        (out / "output.txt").open("w", encoding="utf-8") as stream,
        subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=variables) as process,
    ):
        try:
            code = wait(process, out, deadline)
        finally:
            process.kill()
    if code is None:
        raise SideError(f"it did not end within {4 * task['minutes'] + LOOK_MINUTES:.0f} minutes.")
    if code:
        raise SideError(f"it ended with {code}: {last_line((out / 'output.txt').read_text('utf-8'))}")
    found: dict[str, Any] = json.loads((out / "side.json").read_text("utf-8"))
    return found


def wait(process: subprocess.Popen[bytes], out: Path, deadline: float) -> int | None:
    """Wait for a side, and say how far it is. Returns: its exit status; None: it still runs at the deadline."""
    before = ""
    while time.monotonic() < deadline:
        try:
            return process.wait(timeout=SAY_SECONDS)
        except subprocess.TimeoutExpired:
            path = out / "progress.txt"
            now = path.read_text("utf-8").strip() if path.is_file() else ""
            said = "no update has ended (start, held-out text, or a long update)" if now == before else now
            print(f"  {said}", file=sys.stderr, flush=True)
            before = now
    return None


def judged(facts: Mapping[str, Any], found: dict[str, Any], out: Path) -> dict[str, Any]:
    """The result of a side with the quality of each look and of the test set."""
    for look in found["looks"]:
        look["quality"] = score(facts, "valid", look, out)
    for one in found["test"].values():
        one["quality"] = score(facts, "test", one, out)
    return found


def speeds(plan: Plan, side: str) -> dict[str, float]:
    """Tokens a second of a side in both precisions, in a short run of each, on a machine that is faster in bf16."""
    found = {}
    for precision in ("fp32", "bf16"):
        out = plan.folder / f"{side}-speed-{precision}"
        changes = {"precision": precision, "minutes": plan.speed_seconds / 60, "num_looks": 0}
        found[precision] = run_side(plan, side, "bf16", out, **changes)["tokens_per_second"]
    return found


def measure(plan: Plan, results: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """All runs that are not there yet; results.json is written after each."""
    precision = results["precision"]
    results["left_out"] = {}
    for number in range(1, plan.rounds + 1):
        for side in plan.order(number):
            done = {(run["side"], run["round"]) for run in results["runs"]}
            if side in results["left_out"] or (side, number) in done:
                continue
            print(f"round {number} of {plan.rounds}: {LABELS[side]}, {plan.minutes:g} minutes", file=sys.stderr)
            out = plan.folder / f"{side}-{number}"
            began = time.strftime("%Y-%m-%d %H:%M:%S")
            try:
                if precision == "bf16" and side not in results["speeds"] and plan.speed_seconds:
                    results["speeds"][side] = speeds(plan, side)
                found = judged(facts, run_side(plan, side, precision, out, seed=number), out)
            except (SideError, ManyHeadsError) as error:
                results["left_out"][side] = str(error)
                print(f"{LABELS[side]} is left out: {error}", file=sys.stderr)
            else:
                results["runs"].append({"side": side, "round": number, "began": began, "commit": commit(), **found})
            write(plan, results)


def write(plan: Plan, results: Mapping[str, Any]) -> None:
    """Whole or not at all, so that a stopped command leaves the results before it."""
    path = plan.folder / "results.new"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    path.replace(plan.folder / "results.json")


def begun(plan: Plan, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The results so far, or new ones.

    Raises: ManyHeadsError: those of the folder are of other data, or have other looks.
    """
    path = plan.folder / "results.json"
    key = {"digest": facts["digest"], "looks": plan.looks, "sentences": facts.get("sentences")}
    if path.is_file():
        results: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if any(results[name] != value for name, value in key.items()):
            raise ManyHeadsError(
                f"{path} was begun with other data, or other --looks or --sentences. Name another --work, or delete it."
            )
        return results
    import torch

    from manyheads.nn.kernels.precision import measure_precision

    machine = describe_machine(look_at_machine(lambda text: print(text, file=sys.stderr)))
    precision = measure_precision(torch.device("cpu")).choice
    head = {"what": plan.what, "minutes": plan.minutes, "machine": machine, "precision": precision}
    head["facts"] = {name: value for name, value in facts.items() if name != "prepared"}
    return {**head, **key, "speeds": {}, "left_out": {}, "runs": []}


def parse() -> tuple[Plan, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(SIDES))
    parser.add_argument("--minutes", type=float, required=True, help="of training, of each side")
    parser.add_argument("--work", type=Path, required=True, help="folder for data, environments, runs and results")
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help="of those above; all of them")
    parser.add_argument("--data", default="", help="a folder of `manyheads prepare`; the embedded corpus")
    parser.add_argument("--rounds", type=int, default=2, help="ours first, peers first, and so on (2)")
    parser.add_argument("--looks", type=int, default=6, help="at the quality, the last at the end (6)")
    parser.add_argument("--sentences", type=int, default=1000, help="that are translated of each held-out set (1000)")
    parser.add_argument("--speed-seconds", type=float, default=20.0, help="in each precision, where it is bf16 (20)")
    parser.add_argument("--max-updates", type=int, default=0, help="end a side earlier, to try the script")
    parser.add_argument("--small", action="store_true", help="small models, to try the script")
    parser.add_argument("--json", type=Path, help="write all figures there too")
    parser.add_argument("--picture", type=Path, help="a PNG; needs matplotlib")
    options = parser.parse_args()
    known = SIDES[options.what]
    sides = tuple(side for side in known if side in (options.sides or known))
    if unknown := [side for side in options.sides or () if side not in known]:
        parser.error(f"{options.what} has no side {unknown[0]!r}; it has {', '.join(known)}")
    if not options.minutes > 0 or min(options.rounds, options.looks, options.sentences) < 1:
        parser.error("--minutes must be above 0, and --rounds, --looks and --sentences at least 1")
    names = ("what", "minutes", "rounds", "looks", "max_updates", "small", "speed_seconds")
    return Plan(**{name: getattr(options, name) for name in names}, sides=sides, work=options.work.resolve()), options


def main() -> int:
    plan, options = parse()
    try:
        facts = export(plan.what, options.data, plan.folder / "data", options.sentences)
        results = begun(plan, facts)
    except ManyHeadsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    measure(plan, results, facts)
    print("\n".join(report(results)))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.picture is not None and results["runs"]:
        draw(results, options.picture)
    return 0 if results["runs"] else 1


if __name__ == "__main__":
    sys.exit(main())
