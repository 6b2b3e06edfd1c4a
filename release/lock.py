"""Writes requirements.lock: what a user of the package installs, with the SHA-256 of every file, without torch.

    python release/lock.py

The versions are those of constraints.txt, for every system and for Python 3.11 and later. torch is left out, because
each machine needs another build of it. The extras `dev` and `docs` are left out, because users need neither, and those
of loggers, which exclude some of these versions.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
LEFT_OUT = ("dev", "docs", "mlflow", "trackio", "wandb")
HEADER = """\
# Written by `make lock` from pyproject.toml and constraints.txt; do not edit. Install torch first, then:
#     pip install --require-hashes -r requirements.lock
#     pip install --no-deps .
"""


def user_requirements() -> list[str]:
    """The dependencies of pyproject.toml and of its extras for users, without torch."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = [rows for name, rows in project["optional-dependencies"].items() if name not in LEFT_OUT]
    rows = [*project["dependencies"], *(row for some in extras for row in some)]
    return [row for row in rows if not row.startswith("torch>")]


def main() -> int:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        print("uv is not installed; run `make lock`, or pip install -r release/requirements.txt", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        wanted, pins, found = (Path(folder) / name for name in ("wanted.in", "pins.txt", "found.txt"))
        wanted.write_text("\n".join(user_requirements()) + "\n", encoding="utf-8")
        known = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        pins.write_text("\n".join(row for row in known if not row.startswith("torch==")) + "\n", encoding="utf-8")
        options = ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-annotate", "--no-header"]
        command = [uv, "pip", "compile", str(wanted), "--constraint", str(pins), *options, "--quiet"]
        code = subprocess.run([*command, "--output-file", str(found)], cwd=folder, check=False).returncode
        if code != 0:
            return code
        LOCK.write_text(HEADER + found.read_text(encoding="utf-8"), encoding="utf-8")
    print(f"wrote {LOCK.name}: {sum('==' in row for row in LOCK.read_text(encoding='utf-8').splitlines())} packages")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
