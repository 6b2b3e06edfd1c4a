"""Builds the image on a base of Debian's own packages, runs it as deploy/ says, and asks it for a translation.

    python tests/clients/check_container.py MODEL [--runtime runc] [--base NAME] [--torch-index URL] [--keep]

For Debian, as root, with podman, runc and mmdebstrap installed. It pulls nothing from a registry of images: the base is
made by mmdebstrap. The settings of pip of this machine, and the folders that they name, hold in the build as well.
Prints sizes, times and memory; exits with 1 after a failure. Images and containers lie in a
folder of their own, which is deleted at the end; with --keep it stays, so that the next run is fast.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BASE, IMAGE, CONTAINER = "localhost/manyheads-check-base", "localhost/manyheads-check", "manyheads-check"
STORE = Path("/var/tmp/manyheads-check")  # noqa: S108
MOST_BYTES = 1_300_000_000
LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
"""Some hosts do not permit the runtime's own."""
READY_SECONDS, DRAIN_SECONDS = 300, 5
PACKAGES = "python3,python3-venv,ca-certificates"


def podman(*given: Any, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run podman with its files in plain folders of our own, which needs no support of the kernel."""
    places = ["--root", STORE / "images", "--runroot", STORE / "running"]
    command = ["podman", "--storage-driver", "vfs", *map(str, [*places, *given])]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(command)}: {(done.stdout + done.stderr)[-3000:]}")
    return done


def build_base(release: str) -> None:
    """Make the base image of Debian's packages, unless it is there."""
    if podman("image", "exists", BASE, check=False).returncode == 0:
        return
    with tempfile.TemporaryDirectory() as name:
        tar = Path(name) / "base.tar"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", release, str(tar)]
        subprocess.run(command, check=True)
        podman("import", "--quiet", tar, BASE)


def pip_settings() -> list[str]:
    """Return options of `podman build` with which pip works as on this machine."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], text=True, capture_output=True, check=True
    ).stdout
    options, places = [], set(re.findall(r"(?:file://)?(/[^\s']+)", re.sub(r"https?://\S+", "", listed)))
    for place in sorted({place.removesuffix("/simple") for place in places}):  # an index names files beside it
        if Path(place).exists():
            options += ["--volume", f"{place}:{place}:ro"]
    values = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):  # which have the last word
        name, _, value = line.partition("=")
        values[name.partition(".")[2]] = value.strip("'\"").replace("\\n", " ")
    rows = [f"{name} = {value}" for name, value in values.items()]
    file = Path(tempfile.gettempdir()) / "manyheads-check-pip.conf"
    file.write_text("\n".join(["[global]", *rows, ""]), encoding="utf-8")
    return [*options, "--volume", f"{file}:/etc/pip.conf:ro"] if rows else []


def build(runtime: str, base: str, torch_index: str) -> int:
    """Build the image. Returns: its size in bytes."""
    arguments = ["--build-arg", f"BASE={base}", "--build-arg", f"TORCH_INDEX={torch_index}"]
    # With plain folders each layer is a copy of the whole, so only the last one is kept.
    podman("--runtime", runtime, "build", "--quiet", "--layers=false", "--format", "docker", "--network", "host",
           *LIMITS, *arguments,
           *pip_settings(), "-t", IMAGE, "-f", ROOT / "deploy/Containerfile", ROOT)  # fmt: skip
    [found] = json.loads(podman("image", "inspect", IMAGE).stdout)
    assert found.get("Healthcheck") or found["Config"].get("Healthcheck"), "the image has no HEALTHCHECK"
    return int(found["Size"])


@contextmanager
def running(runtime: str, model: Path | None, *given: str) -> Iterator[str]:
    """Run the image with a read-only root and few rights. Yields the address of the server."""
    podman("rm", "--force", CONTAINER, check=False)
    mount = ["--volume", f"{model}:/models/model:ro"] if model is not None else []
    podman("--runtime", runtime, "run", "--detach", "--name", CONTAINER, "--network", "host", "--read-only",
           "--tmpfs", "/tmp", "--user", "10001", "--cap-drop", "all",  # noqa: S108
           "--security-opt", "no-new-privileges", *LIMITS,
           *mount, IMAGE, *given)  # fmt: skip
    try:
        yield "http://127.0.0.1:8000"
    finally:
        podman("rm", "--force", CONTAINER, check=False)


def wait_until_ready(url: str) -> float:
    """Return the seconds until /readyz answers 200."""
    began = time.monotonic()
    while time.monotonic() - began < READY_SECONDS:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return time.monotonic() - began
        except (OSError, urllib.error.HTTPError):
            if inspected()["State"]["Status"] not in ("running", "created", "initialized"):
                break
            time.sleep(0.5)
    raise SystemExit(f"the server did not become ready: {podman('logs', CONTAINER, check=False).stderr[-3000:]}")


def inspected() -> dict[str, Any]:
    [found] = json.loads(podman("inspect", CONTAINER).stdout)
    return dict(found)


def memory_of(process: int) -> int:
    """Return the resident memory of a process in bytes."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def translate(url: str, text: str) -> str:
    request = urllib.request.Request(
        f"{url}/v1/translate", json.dumps({"text": text}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["translations"][0]["text"])


def check_server(runtime: str, model: Path) -> None:
    """Start the server, translate, and stop it."""
    with running(runtime, model, "--drain-delay", "1", "--deadline", str(DRAIN_SECONDS)) as url:
        print(f"ready after {wait_until_ready(url):.1f} s")
        text = translate(url, "I am very hungry.")
        assert text.strip(), "the translation is empty"
        state = inspected()
        process = int(state["State"]["Pid"])
        owner = Path(f"/proc/{process}").stat().st_uid
        assert owner == 10001, f"the server runs as user {owner}"
        print(f"a translation: {text!r}; {memory_of(process) / 1e6:.0f} MB resident")
        healthy = podman("--runtime", runtime, "healthcheck", "run", CONTAINER, check=False)
        print(f"HEALTHCHECK: {'healthy' if healthy.returncode == 0 else healthy.stdout + healthy.stderr}")
        began = time.monotonic()
        podman("--runtime", runtime, "stop", "--time", "60", CONTAINER)
        seconds, code = time.monotonic() - began, inspected()["State"]["ExitCode"]
        print(f"stopped after {seconds:.1f} s, exit code {code}")
        assert code == 0, f"the server ended with {code}"
        assert seconds < 1 + DRAIN_SECONDS + 10, "the server did not stop within its drain time"


def check_without_model(runtime: str) -> None:
    """Without a model: one sentence, exit code 2."""
    with running(runtime, None):
        podman("wait", CONTAINER)
        code, told = inspected()["State"]["ExitCode"], podman("logs", CONTAINER).stderr.strip()
        print(f"without a model: exit code {code}: {told}")
        assert code == 2, f"without a model the exit code is {code}"
        assert "Traceback" not in told
        assert len(told.splitlines()) == 1, told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a translator")
    parser.add_argument("--runtime", default="runc", help="OCI runtime; some hosts run runc and not crun")
    parser.add_argument("--base", default=BASE, help="base image; the default is made by mmdebstrap")
    parser.add_argument("--release", default="bookworm", help="of Debian, for the base")
    parser.add_argument("--torch-index", default="", help="where pip finds torch; empty: where it finds everything")
    parser.add_argument("--keep", action="store_true", help="keep the images")
    options = parser.parse_args()
    needed = ["podman", options.runtime, *(["mmdebstrap"] if options.base == BASE else [])]
    missing = [name for name in needed if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        what = f"{', '.join(missing)}: apt-get install podman runc mmdebstrap" if missing else "root"
        print(f"check_container.py needs {what}.", file=sys.stderr)
        return 2
    if not (options.model / "config.json").is_file():
        print(f"{options.model} is no model folder; name one with config.json.", file=sys.stderr)
        return 2
    began = time.monotonic()
    try:
        if options.base == BASE:
            build_base(options.release)
            print(f"base: {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        size = build(options.runtime, options.base, options.torch_index)
        print(f"image: {time.monotonic() - began:.0f} s, {size:,} bytes", flush=True)
        assert size <= MOST_BYTES, f"the image has more than {MOST_BYTES:,} bytes"
        check_without_model(options.runtime)
        check_server(options.runtime, options.model.resolve())
    finally:
        if not options.keep:
            shutil.rmtree(STORE, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
