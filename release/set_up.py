"""Sets up an environment: torch in the build that fits this machine, then the package with some of its extras.

    python release/set_up.py .venv --extras plot [--torch torch==2.13.0] [--torch-index URL]

Needs nothing but Python's standard library. On Linux where no NVIDIA driver answers, torch's CPU build is taken: PyPI
has the build for CUDA there, which is ten times as large. `make` calls this; TORCH_SPEC and TORCH_INDEX choose.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import urllib.request
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""torch's own index of CPU builds."""
ANSWER_SECONDS = 10.0
_TICK_SECONDS = 10.0
_KEPT_LINES = 40
_OF_GPUS = ("nvidia-", "cuda-", "pytorch-triton-rocm")


class SetUpError(Exception):
    """Something that the user must change; the message says what."""


@dataclass(frozen=True)
class Choice:
    """The build of torch to install. index: empty: those that pip is set up with. why: for people."""

    index: str
    why: str


def has_nvidia_driver() -> bool:
    """Return whether `nvidia-smi` lists a GPU."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=ANSWER_SECONDS, check=False)  # noqa: S607
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and b"GPU" in done.stdout


def choose_torch(python: Path, spec: str, index: str = "", *, cpu_index: str = CPU_INDEX) -> Choice | None:
    """Choose where torch comes from; None: it is there already.

    Args: python: of the environment. spec: torch and its version. index: the user's choice; if it cannot be used, the
        choice is that without it. cpu_index: torch's own.
    """
    fault = _silence_of(f"{index.rstrip('/')}/torch/") if _can_be_asked(index) else None
    planned = None if fault else _planned(python, spec, index)
    if planned == []:
        return None
    if index:
        fault = fault or (None if planned else f"it has no {spec} for this Python")
        if fault is None:
            return Choice(index, f"torch from {index}, as TORCH_INDEX says")
        instead = choose_torch(python, spec, cpu_index=cpu_index)
        if instead is None:
            return None
        return Choice(instead.index, f"TORCH_INDEX={index} cannot be used ({fault}); taken instead: {instead.why}")
    if not sys.platform.startswith("linux"):
        return Choice("", "torch as PyPI has it for this system")
    if has_nvidia_driver():
        return Choice("", f"torch for CUDA, because an NVIDIA driver answers{_size(planned)}")
    if planned and not any(_name(one).startswith(_OF_GPUS) for one in planned):
        return Choice("", f"torch's CPU build, because no NVIDIA driver answers{_size(planned)}")
    if (silence := _silence_of(f"{cpu_index}/torch/")) is None:
        found = _planned(python, spec, cpu_index)
        if found:
            return Choice(cpu_index, f"torch's CPU build, because no NVIDIA driver answers{_size(found)}")
        silence = f"it has no {spec} for this Python"
    return Choice(
        "", f"torch as PyPI has it{_size(planned)}: no NVIDIA driver answers, but neither does {cpu_index} ({silence})"
    )


def _can_be_asked(index: str) -> bool:
    """Return whether an index is a server without a password in its address, which urllib does not send.

    It is asked before pip, which waits for it once for each package if torch is also in another of its places.
    """
    return index.startswith(("http://", "https://")) and "@" not in index


def _planned(python: Path, spec: str, index: str) -> list[dict[str, Any]] | None:
    """Return what pip would install for torch, one record a package; None: it cannot tell."""
    options = ["--index-url", index] if index else []
    command = [str(python), "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-"]
    command += ["--retries", "0", "--timeout", f"{ANSWER_SECONDS:g}", *options, spec]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    packages: list[dict[str, Any]] = json.loads(done.stdout)["install"]
    return packages


def _name(package: dict[str, Any]) -> str:
    return str(package["metadata"]["name"]).lower().replace("_", "-")


def _size(packages: Sequence[dict[str, Any]] | None) -> str:
    """Return the version of torch and the size of all downloads as text; without what servers do not tell."""
    if not packages:
        return ""
    version = next((f"torch {one['metadata']['version']}" for one in packages if _name(one) == "torch"), "")
    sizes = [_num_bytes(one["download_info"]["url"]) for one in packages]
    total = f"{sum(sizes) / 1e6:,.0f} MB" if all(sizes) else ""
    shown = ", ".join(filter(None, [version, total and f"{total} to download in {len(sizes)} packages"]))
    return f" ({shown})" if shown else ""


def _num_bytes(url: str) -> int:
    """Return the size of a file on a server or this machine; 0: unknown."""
    try:
        if url.startswith("file:"):
            return Path(urllib.request.url2pathname(url.removeprefix("file://"))).stat().st_size
        request = urllib.request.Request(url, method="HEAD")  # noqa: S310  (an address that pip gave)
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
            return int(answer.headers.get("Content-Length") or 0)
    except (OSError, ValueError):
        return 0


def _silence_of(address: str) -> str | None:
    """Return why a server cannot be used; None: it answers in time. A server may also send a byte now and then."""
    found: list[str | None] = []
    too_late = f"no answer in {ANSWER_SECONDS:g} seconds"

    def ask() -> None:
        try:
            shown = address + "index.html" if address.startswith("file:") else address
            with urllib.request.urlopen(shown, timeout=ANSWER_SECONDS) as answer:  # noqa: S310
                answer.read()
            found.append(None)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            found.append(too_late if isinstance(reason, TimeoutError) else str(reason))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return found[0] if found else too_late


def install(python: Path, what: str, arguments: Sequence[str]) -> None:
    """Run `pip install`, and show what it does: a line every ten seconds, on a terminal a line that changes.

    Args: what: for people.

    Raises: SetUpError: pip failed; with the end of its output.
    """
    # Python compiles what it imports; to compile all of torch would take longer than to install it.
    command = [str(python), "-m", "pip", "install", "--progress-bar", "off", "--no-compile", *arguments]
    began, shown, lines = time.monotonic(), 0.0, [""]
    is_terminal = sys.stdout.isatty()

    def tick(*, now: bool = False) -> None:
        nonlocal shown
        seconds = time.monotonic() - began
        if now or seconds - shown >= (0.2 if is_terminal else _TICK_SECONDS):
            shown = seconds
            text = f"  {what}: {seconds:.0f} s  {_doing(lines)}"
            print(f"\r\x1b[K{text[:100]}" if is_terminal else text, end="" if is_terminal else "\n", flush=True)

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        ended = threading.Event()
        stream = process.stdout

        def read() -> None:
            for line in stream:
                lines.append(line.strip())
            ended.set()

        threading.Thread(target=read, daemon=True).start()
        while not ended.wait(0.2):
            tick()
        code = process.wait()
    lines.append("done" if code == 0 else "failed")
    tick(now=True)
    if is_terminal:
        print()
    if code != 0:
        told = "\n".join(lines[-_KEPT_LINES - 1 : -1])
        raise SetUpError(f"{told}\n\nset-up: pip could not install {what}; see above.")


def _doing(lines: Sequence[str]) -> str:
    """Return what pip does, from its last line that says so."""
    for line in reversed(lines):
        if line == "done" or line == "failed":
            return line
        if line.startswith(("Collecting ", "Downloading ", "Building ", "Preparing ")):
            return line[:70]
        if line.startswith("Installing collected packages"):
            return f"installing {line.count(',') + 1} packages"
    return "looking for versions"


def write_constraints(environment: Path, spec: str) -> Path:
    """Write the tested versions, with this torch in place of theirs. Returns: the file."""
    rows = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    path = environment / "constraints.txt"
    path.write_text("\n".join([*(row for row in rows if not row.startswith("torch==")), spec]) + "\n", encoding="utf-8")
    return path


def _text(reason: object) -> str:
    text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
    return text.strip()[-500:].rstrip(".")


def summary(environment: Path) -> str:
    """Return the number of packages and their size on disk."""
    places = list(environment.glob("lib/python3*/site-packages"))
    count = sum(1 for place in places for _ in place.glob("*.dist-info"))
    size = sum(path.lstat().st_size for place in places for path in place.rglob("*") if path.is_file())
    return f"{environment}: {count} packages, {size / 1e9:.2f} GB"


def _has_pip(python: Path) -> bool:
    """Return whether an environment is there and whole."""
    try:
        done = subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def set_up(environment: Path, extras: str, spec: str, index: str, *, cpu_index: str = CPU_INDEX) -> None:
    """Make or complete the environment.

    Raises: SetUpError: pip failed.
    """
    python = environment / "bin" / "python"
    if not _has_pip(python):  # also what an interrupted set-up left
        print(f"Setting up {environment}, once.", flush=True)
        venv.create(environment, with_pip=True)
    constraints = write_constraints(environment, spec)
    choice = choose_torch(python, spec, index, cpu_index=cpu_index)
    if choice is not None:
        print(f"  {choice.why}")
        print(f"  to choose another build: make TORCH_INDEX={CPU_INDEX}, or .../whl/cu130", flush=True)
        # torch goes first and alone, so that its index serves nothing else.
        install(python, "torch", [*(["--index-url", choice.index] if choice.index else ["-c", str(constraints)]), spec])
    install(python, f"manyheads[{extras}]", ["-c", str(constraints), "-e", f"{ROOT}[{extras}]"])
    print(f"  {summary(environment)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--extras", default="plot")
    parser.add_argument("--torch", default="torch")
    parser.add_argument("--torch-index", default="")
    options = parser.parse_args()
    try:
        set_up(options.environment, options.extras, options.torch, options.torch_index)
    except SetUpError as error:
        print(error, file=sys.stderr)
        return 2
    except (OSError, subprocess.CalledProcessError) as error:  # venv's are of both kinds
        reason = getattr(error, "output", None) or error
        print(f"set-up: {options.environment} cannot be made: {_text(reason)}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nset-up: interrupted; the same command goes on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
