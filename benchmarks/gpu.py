"""Measures training and decoding on a GPU, side by side with peers. It needs torch, numpy, safetensors and PyYAML.

    python benchmarks/gpu.py --output gpu.json                  # all parts, those in gpu.json excepted
    python benchmarks/gpu.py --minutes 9 --output gpu.json      # the most important parts that fit, in their order
    python benchmarks/gpu.py xl --output gpu.json               # one part
    python benchmarks/gpu.py --device cpu --tiny --output a.json  # a rehearsal: every part at the smallest sizes

Sides that torch compiles are compiled first, in processes side by side; what they compile is kept in the folder
gpu.json.compiled. Then every part runs in a process of its own for six minutes at most, and is written to the JSON file
when it ends, so a run that was cut off continues with the next part. Of a part that takes too long the rounds that
ended are kept, and it is run again the next time. In a part all sides compute in turn, A B A B, in one process. The
ratio of a round is the peer's time for one token divided by ours; the file has the median, the lowest and the highest,
and of each side of ours the ratio to the best peer. The share of products is a side's matrix products per second
(`count_flops` counts them: full rectangles, nothing twice) divided by the rate of a bf16 product of square matrices in
the same round. A step of ours is the step of a run: checks, clipping, update and the copy of the batch included.

On a CPU the side with fewer launches takes the operations of a GPU. With TRITON_INTERPRET=1 the Triton kernels are
interpreted, in float32.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

try:
    import torch
    from gpu_parts import COMPILED, FIRST, LEAST_SECONDS, PARTS
    from gpu_peers import PACKAGES
    from gpu_report import lines_of, table
    from gpu_sides import PART_SECONDS, Options, is_there

    from manyheads.nn.kernels import modes, policy
except ModuleNotFoundError as error:
    sys.exit(f"{error}. Beside torch this needs: pip install numpy safetensors pyyaml")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure training and decoding on a GPU, beside peers.")
    parser.add_argument("parts", nargs="*", help=f"which parts (all): {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, required=True, help="JSON file; the parts in it are not run again")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, one round: checks that all parts run")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of a turn (3)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of a part (5), fewer where time is short")
    parser.add_argument("--without-compiler", action="store_true", help="leave out the sides that torch compiles")
    parser.add_argument("--commit", help="for the record, where git does not know it")
    parser.add_argument("--limit", type=float, default=PART_SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help=argparse.SUPPRESS)
    parser.add_argument(
        "--minutes",
        type=float,
        help="begin no part that does not end by then; without parts: the most important ones, in order",
    )
    given = parser.parse_args()
    unknown = [name for name in given.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; use a machine with one, or check the script by --device cpu --tiny")
    if not given.output.resolve().parent.is_dir():
        parser.error(f"there is no folder {given.output.resolve().parent} for --output; make it first")
    seconds, rounds = (0.0, 1) if given.tiny else (given.seconds, given.rounds)
    partial = str(_partial(given.output)) if given.in_this_process else ""
    options = Options(
        given.device, given.tiny, seconds, rounds, not given.without_compiler, given.limit, given.only, partial
    )
    names = given.parts or (FIRST if given.minutes else list(PARTS))
    if given.in_this_process:
        return _compute(names[0], options, given.output)
    # As an exception, so that the processes of parts are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the parts that ended are in the file"))
    return _run(names, options, given.output, 60 * given.minutes if given.minutes else math.inf, given.commit)


def _compute(name: str, options: Options, output: Path) -> int:
    """Compute one part in this process, which ends with the one that started it."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if options.device == "cpu":
        policy.saves_launches = lambda device: modes.is_fast() and modes.asked.saves_launches  # type: ignore[assignment]
    output.write_text(json.dumps(PARTS[name](options)), encoding="utf-8")
    return 0


def _end_with(parent: int) -> None:
    """A process whose parent was killed would compute on, and disturb the next one."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _partial(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def _run(
    names: Sequence[str], options: Options, output: Path, seconds: float = math.inf, commit: str | None = None
) -> int:
    """Run the parts that the file does not hold; write the file after each. Returns the exit code.

    Args: seconds: a part ends with them, and none begins that needs more than are left (`LEAST_SECONDS`).
    """
    end = time.monotonic() + seconds
    machine = {**_machine(options), **options.measured}
    record: dict[str, Any] = {"machine": machine, "parts": {}}
    if output.exists():
        try:
            record = json.loads(output.read_text(encoding="utf-8"))
            before = record["machine"], record["parts"]
        except (ValueError, KeyError, TypeError):
            print(f"{output} holds no results of this script; give another --output.", file=sys.stderr)
            return 2
        different = [name for name in machine if name not in _MAY_DIFFER and before[0].get(name) != machine[name]]
        if different:
            print(f"{output} holds results with another {different[0]}; give another --output.", file=sys.stderr)
            return 2
        record["machine"] = machine
    commit = commit or _commit()
    pending = []
    for name in names:
        part = record["parts"].get(name, {"error": ""})
        lacked = {one["missing"] for one in part.get("sides", {}).values() if "missing" in one}
        came = sorted(filter(is_there, lacked))
        if came:
            print(f"{name}: again, because {', '.join(came)} is there now")
        if came or "error" in part:
            pending.append(name)
        else:
            print(f"{name}: already in {output}")
    failed = False
    _compile_first(pending, options, output, end)
    for number, name in enumerate(pending):
        left, least = end - time.monotonic(), 0 if options.tiny else LEAST_SECONDS[name]
        if left < max(least, 1):
            print(f"{name}: left out, {max(left, 0):.0f} seconds are left and it needs {least}")
            continue
        # The later parts keep the least that they need, if there is so much.
        later = 0 if options.tiny else sum(LEAST_SECONDS[one] for one in pending[number + 1 :])
        left = min(PART_SECONDS, max(least, left - later))
        print(f"{name}: {left:.0f} seconds at most", flush=True)
        record["parts"][name] = part = {**_in_a_process(name, options, left, output), "commit": commit}
        _write(output, record)
        failed |= "error" in part
        for line in lines_of(part):
            print(f"{name}: {line}", flush=True)
    print("\n".join(["", *table({name: one for name, one in record["parts"].items() if name in names})]), flush=True)
    return int(failed)


# To start Python and CUDA, and to write the result.
_START_SECONDS = 20
# No ten seconds pass without a line.
_BEAT_SECONDS = 8.0
_COMPILE_SECONDS = 150
_MAY_DIFFER = ("date", "packages")


@dataclass
class _Process:
    """A part, or one side of it, in a process and session of its own, whose processes end with it."""

    process: subprocess.Popen[bytes]
    answer: Path
    errors: Path
    began: float

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def error(self) -> str | None:
        """Return why there is no result, as one line; None: there is one."""
        code = self.process.returncode
        if not code and self.answer.exists():
            return None
        lines = self.lines()
        told = next((line for line in reversed(lines) if "Error" in line.split(":")[0]), None)
        if code and code < 0:
            return f"killed by {signal.Signals(-code).name}" + (f"; {lines[-1]}" if lines else "")
        return told or (lines or [f"exit code {code}"])[-1]

    def lines(self) -> list[str]:
        text = self.errors.read_text(encoding="utf-8", errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()]


def _start(name: str, options: Options, limit: float, output: Path, folder: Path, only: str = "") -> _Process:
    """Args: folder: for its files. only: one side, whose output is not shown."""
    answer, errors = folder / "part.json", folder / "errors"
    command = [sys.executable, __file__, name, "--in-this-process", "--output", str(answer)]
    command += ["--device", options.device, "--seconds", str(options.seconds), "--rounds", str(options.rounds)]
    command += ["--limit", str(max(1.0, limit - _START_SECONDS)), "--only", only]
    command += ["--tiny"] * options.tiny + ["--without-compiler"] * (not options.compiles)
    with errors.open("wb") as into:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL if only else None, stderr=into, start_new_session=True,
            env=_environment(output),
        )  # fmt: skip
    return _Process(process, answer, errors, time.monotonic())


def _environment(output: Path) -> dict[str, str]:
    """Return the environment of a part: compiled programs are kept beside the results, for the next call."""
    folder = output.resolve().with_name(output.name + ".compiled")
    kept = {f"{name}_CACHE_DIR": str(folder / name.lower()) for name in ("TORCHINDUCTOR", "TRITON")}
    found = {**kept, **os.environ}
    libraries = _older_cublas(folder / "libraries")
    if libraries is not None:
        found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(libraries), found.get("LD_LIBRARY_PATH")]))
    return found


def _older_cublas(folder: Path) -> Path | None:
    """Return a folder in which cuBLAS 13 has the name of cuBLAS 12, which CTranslate2 opens; None: where it has no use.

    It must be named before the process starts, as the linker reads the variable only then.
    """
    if torch.version.cuda is None or not torch.version.cuda.startswith("13."):
        return None
    places = [*Path(torch.__file__).parents[1].glob("nvidia/*/lib"), Path("/usr/local/cuda/lib64")]
    library = next((place / "libcublas.so.13" for place in places if (place / "libcublas.so.13").exists()), None)
    if library is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for one in (library, library.with_name("libcublasLt.so.13")):
        link = folder / one.name.replace(".so.13", ".so.12")
        if not link.exists():
            link.symlink_to(one)
    return folder


def _compile_first(names: Sequence[str], options: Options, output: Path, end: float) -> None:
    """Build the sides that torch compiles, in processes side by side; the parts then find them in the cache."""
    jobs = [(name, side) for name in names for side in COMPILED.get(name, ())]
    needed = 0 if options.tiny else sum(LEAST_SECONDS[name] for name in names)
    end = min(end - needed, time.monotonic() + _COMPILE_SECONDS)
    if not options.compiles or len(jobs) < 2 or end - time.monotonic() < 20:
        return
    at_once = max(2, (os.cpu_count() or 2) // 2)
    print(f"compiling {len(jobs)} sides, {at_once} at once, for {end - time.monotonic():.0f} seconds at most")
    running: dict[str, _Process] = {}
    beat = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while (jobs or running) and time.monotonic() < end:
                while jobs and len(running) < at_once:
                    name, side = jobs.pop(0)
                    own = Path(tempfile.mkdtemp(dir=folder))
                    running[f"{name}: {side}"] = _start(name, options, math.inf, output, own, side)
                for title, one in list(running.items()):
                    if one.process.poll() is not None:
                        said = _side_error(one) or "compiled"
                        print(f"  {title}: {said}, {time.monotonic() - one.began:.0f} s", flush=True)
                        del running[title]
                        beat = time.monotonic()
                if time.monotonic() - beat > _BEAT_SECONDS:
                    beat = time.monotonic()
                    print(f"  compiling; {len(running) + len(jobs)} sides are left", flush=True)
                time.sleep(0.1)
            for title in [*running, *(f"{name}: {side}" for name, side in jobs)]:
                print(f"  {title}: not compiled in time; its part compiles it", flush=True)
        finally:
            for one in running.values():
                one.stop()


def _side_error(one: _Process) -> str | None:
    error = one.error()
    if error is not None:
        return error
    sides = json.loads(one.answer.read_text(encoding="utf-8"))["sides"]
    return next((side["error"] for side in sides.values() if "error" in side), None)


def _in_a_process(name: str, options: Options, limit: float, output: Path) -> dict[str, Any]:
    """A part's result; where the process failed or took too long, `error` says so."""
    with tempfile.TemporaryDirectory() as folder:
        one = _start(name, options, limit, output, Path(folder))
        try:
            while one.process.poll() is None:
                left = limit - (time.monotonic() - one.began)
                if left <= 0:
                    one.stop()
                    return _of_partial(one, f"took longer than {limit:.0f} seconds")
                with suppress(subprocess.TimeoutExpired):
                    one.process.wait(min(left, _BEAT_SECONDS))
                    break
                print(f"  {name}: {time.monotonic() - one.began:.0f} of {limit:.0f} s", flush=True)
        finally:
            one.stop()
        error = one.error()
        if error is not None:
            return {**_of_partial(one, error), "trace": one.lines()[-20:]}
        part: dict[str, Any] = json.loads(one.answer.read_text(encoding="utf-8"))
        return {**part, "wall_seconds": round(time.monotonic() - one.began, 1)}


def _of_partial(one: _Process, error: str) -> dict[str, Any]:
    """Return what the part had measured when it ended."""
    path = _partial(one.answer)
    if not path.exists():
        return {"error": error}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    side = found.pop("building", None)
    return {**found, "error": error if side is None else f"{error}, at the side {side}"}


def _write(output: Path, record: dict[str, Any]) -> None:
    """In one piece: a run that is cut off leaves the file as it was."""
    beside = output.with_name(output.name + ".new")
    beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    beside.replace(output)


def _machine(options: Options) -> dict[str, Any]:
    cuda = options.device == "cuda"
    return {
        "name": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "count": torch.cuda.device_count() if cuda else 1,
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else 0,
        "capability": list(torch.cuda.get_device_capability()) if cuda else None,
        "driver": _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        "files": _digest(),
        "date": date.today().isoformat(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest() -> str:
    """Return a digest of the package's files: what has been measured, also where git is not there."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src" / "manyheads").rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _commit() -> str | None:
    return _answer("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _answer(*command: str) -> str | None:
    """Return the first line that a command prints; None: it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


if __name__ == "__main__":
    sys.exit(main())
