"""Measures training and decoding on a GPU, side by side with peers. It needs torch, numpy, safetensors and PyYAML.

    python benchmarks/gpu.py --output gpu.json                  # all parts, those in gpu.json excepted
    python benchmarks/gpu.py --minutes 9 --output gpu.json      # the most important parts that fit, in their order
    python benchmarks/gpu.py xl --output gpu.json               # one part
    python benchmarks/gpu.py --device cpu --tiny --output a.json  # checks in seconds that every part runs

Every part runs in a process of its own for six minutes at most, and is written to the JSON file when it ends, so a
run that was cut off continues with the next part. In a part all sides compute in turn, A B A B, in one process. The
ratio of a round is the peer's time for one step divided by ours; the file has the median, the lowest and the highest.
The share of products is a side's matrix products per second (`count_flops` counts them: full rectangles, nothing twice)
divided by the rate of a bf16 product of square matrices in the same round.
A step of ours is the step of a run: checks, clipping, update and the copy of the batch included.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

try:
    import torch
    from gpu_parts import FIRST, LEAST_SECONDS, PARTS
    from gpu_sides import PART_SECONDS, Options
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
    parser.add_argument("--limit", type=float, default=PART_SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
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
    seconds, rounds = (0.0, 1) if given.tiny else (given.seconds, given.rounds)
    options = Options(given.device, given.tiny, seconds, rounds, not given.without_compiler, given.limit)
    names = given.parts or (FIRST if given.minutes else list(PARTS))
    if given.in_this_process:
        given.output.write_text(json.dumps(PARTS[names[0]](options)), encoding="utf-8")
        return 0
    return _run(names, options, given.output, 60 * given.minutes if given.minutes else math.inf)


def _run(names: Sequence[str], options: Options, output: Path, seconds: float = math.inf) -> int:
    """Run the parts that the file does not hold; write the file after each. Returns the exit code.

    Args: seconds: a part ends with them, and none begins that needs more than are left (`LEAST_SECONDS`).
    """
    end = time.monotonic() + seconds
    machine = {**_machine(options), **options.measured}
    record: dict[str, Any] = {"machine": machine, "parts": {}}
    if output.exists():
        record = json.loads(output.read_text(encoding="utf-8"))
        different = [name for name in machine if name != "date" and record["machine"].get(name) != machine[name]]
        if different:
            print(f"{output} holds results with another {different[0]}; give another --output.", file=sys.stderr)
            return 2
    failed = False
    for number, name in enumerate(names):
        if "error" not in record["parts"].get(name, {"error": ""}):
            print(f"{name}: already in {output}")
            continue
        left, least = end - time.monotonic(), 0 if options.tiny else LEAST_SECONDS[name]
        if left < max(least, 1):
            print(f"{name}: left out, {max(left, 0):.0f} seconds are left and it needs {least}")
            continue
        # The later parts keep the least that they need, if there is so much.
        later = 0 if options.tiny else sum(LEAST_SECONDS[one] for one in names[number + 1 :])
        left = min(PART_SECONDS, max(least, left - later))
        record["parts"][name] = part = _in_a_process(name, options, left, output)
        _write(output, record)
        failed |= "error" in part
        for line in _lines(part):
            print(f"{name}: {line}", flush=True)
    return int(failed)


# To start Python and CUDA, and to write the result.
_START_SECONDS = 20


def _with_caches(output: Path) -> dict[str, str]:
    """Return the environment of a part: compiled programs are kept beside the results, for the next call."""
    folder = output.resolve().with_name(output.name + ".compiled")
    kept = {f"{name}_CACHE_DIR": str(folder / name.lower()) for name in ("TORCHINDUCTOR", "TRITON")}
    return {**kept, **os.environ}


def _in_a_process(name: str, options: Options, limit: float, output: Path) -> dict[str, Any]:
    """A part's result; where the process failed or took too long, `error` says so."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "part.json"
        command = [sys.executable, __file__, name, "--in-this-process", "--output", str(answer)]
        command += ["--device", options.device, "--seconds", str(options.seconds), "--rounds", str(options.rounds)]
        command += ["--limit", str(limit - _START_SECONDS)]
        command += ["--tiny"] * options.tiny + ["--without-compiler"] * (not options.compiles)
        began = time.monotonic()
        # A session of its own, so that the processes that a part starts end with it.
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=_with_caches(output)
        )
        try:
            _, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return {"error": f"took longer than {limit:.0f} seconds"}
        if process.returncode or not answer.exists():
            return {"error": (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]}
        part: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return {**part, "wall_seconds": round(time.monotonic() - began, 1)}


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
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


def _lines(part: dict[str, Any]) -> list[str]:
    """For people."""
    if "error" in part or "skipped" in part:
        return [part.get("error") or f"left out: {part['skipped']}"]
    lines = [f"{name}: {text}" for name, text in part.get("facts", {}).items()]
    for name, side in part.get("sides", {}).items():
        if "error" in side:
            lines.append(f"{name}: {side['error']}")
            continue
        share = f", {side['share_of_products']['median']:.0%} of the products" if "share_of_products" in side else ""
        tokens = f", {side['tokens_per_second']['median']:,.0f} tokens/s" if "tokens_per_second" in side else ""
        lines.append(f"{name}: {side['step_seconds']['median'] * 1e3:.2f} ms a step{tokens}{share}")
    for pair, ratio in part.get("ratios", {}).items():
        lines.append(f"{pair}: {ratio['median']:.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f})")
    return lines


if __name__ == "__main__":
    sys.exit(main())
