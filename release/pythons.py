"""Runs the tests with other Pythons, where they are found: versions of pyenv, or programs of the PATH.

    python release/pythons.py 3.12 3.13                  # make test-pythons: `make test`, in .venv-3.12 and .venv-3.13
    python release/pythons.py --without-torch 3.13       # in CI: help, settings and catalogue, without torch

A whole run writes date and versions into the table of docs/versions.md. A Python that is not found is no failure.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
WITHOUT_TORCH = ("pydantic", "pyyaml", "safetensors")
"""What help pages and settings need; torch and the others are imported when something is computed."""

# Runs in the other Python, so it imports nothing but the package.
_LOOK = """
import contextlib, io, sys
from manyheads.catalogue import ARCHITECTURES, COMMANDS, PRESETS
from manyheads.cli.main import main
from manyheads.config.build import resolve
from manyheads.config.files import parse_yaml, to_yaml

for name in COMMANDS:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            code = main([name, "--help"])
        except SystemExit as ended:
            code = ended.code
    assert not code and "usage: manyheads" in text.getvalue(), (name, text.getvalue())
for name, preset in PRESETS.items():
    config = preset()
    assert resolve(type(config), [parse_yaml(to_yaml(config), name)]) == config, name
assert all(one.presets for one in ARCHITECTURES.values())
assert "torch" not in sys.modules
print(f"{len(COMMANDS)} help pages, {len(PRESETS)} presets, {len(ARCHITECTURES)} architectures")
"""


def find(version: str) -> Path | None:
    """Return the newest Python of a version such as 3.13 that starts; None: there is none."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    of_pyenv = [path for path in root.glob(f"versions/{version}.*/bin/python") if path.parents[1].name[-1].isdigit()]
    newest = sorted(of_pyenv, key=lambda path: [int(part) for part in re.findall(r"\d+", path.parents[1].name)])
    named = shutil.which(f"python{version}")
    for path in [*reversed(newest), *([Path(named)] if named else [])]:
        if (found := full_version(path)) is not None and found.startswith(f"{version}."):
            return path
    return None


def full_version(python: Path) -> str | None:
    """Return a Python's version; None: it does not start."""
    try:
        command = [str(python), "-c", "import platform; print(platform.python_version())"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def run_tests(version: str, python: Path) -> bool:
    """Run `make test`, and write what ran into the page. Returns: whether it passed."""
    environment = ROOT / f".venv-{version}"
    command = ["make", "test", f"PYTHON={python}", f"VENV={environment.name}"]
    passed = subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    look = "import torch; print(torch.__version__)"
    done = subprocess.run([environment / "bin" / "python", "-c", look], capture_output=True, text=True, check=False)
    system = f"{platform.system()} {platform.machine()}"
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    torch = done.stdout.strip() or "none"
    row = (
        f"| {full_version(python)} | {torch} | {system} | `make test` | {today} | {'passed' if passed else 'failed'} |"
    )
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_row(text, version, row), encoding="utf-8")
    return passed


def with_row(text: str, version: str, row: str) -> str:
    """Return the page with the row of a version such as 3.13, replaced or after the last row of the table.

    Raises: SystemExit: the page has no such table.
    """
    if (table := re.search(r"^\| Python \|.*\n\|[-|]+\n(?:\|.*\n)*", text, re.MULTILINE)) is None:
        raise SystemExit(f"{PAGE.relative_to(ROOT)} has no table that begins with `| Python |`.")
    rows = table[0].splitlines()
    kept = [one for one in rows if not re.match(rf"\| {re.escape(version)}(\.\d+)? \|.*`make test`", one)]
    return text.replace(table[0], "\n".join([*kept, row]) + "\n")


def look_without_torch(python: Path) -> bool:
    """Install a few packages, and look at help, settings and catalogue. Returns: whether all is well."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        inside = Path(folder) / "bin" / "python"
        # As they are tested, where this Python has wheels of those versions.
        install = [inside, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *WITHOUT_TORCH]
        if subprocess.run(install, check=False).returncode:
            return False
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        return subprocess.run([inside, "-c", _LOOK], env=environment, check=False).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="X.Y")
    parser.add_argument("--without-torch", action="store_true")
    options = parser.parse_args(arguments)
    if wrong := [version for version in options.versions if not re.fullmatch(r"3\.\d+", version)]:
        parser.error(f"{wrong[0]!r} is no version such as 3.13")
    failed = []
    for version in options.versions:
        python = find(version)
        if python is None:
            print(f"Python {version}: not found here, not run; `pyenv install {version}` installs it.", flush=True)
            continue
        print(f"Python {version}: {python}", flush=True)
        passed = look_without_torch(python) if options.without_torch else run_tests(version, python)
        failed += [] if passed else [version]
    if failed:
        print(f"failed with Python {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
