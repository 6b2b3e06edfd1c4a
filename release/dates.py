"""Writes release/dates.json: when the versions in pyproject.toml's extras were released, as the package index says.

    python release/dates.py

For each requirement of an extra there are two versions: the lower bound, and that of constraints.txt (of the loggers,
which are installed apart, that of tests/clients/loggers.txt). The test
`tests/unit/test_bounds.py` has no network and compares the dates with one another.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATES = ROOT / "release" / "dates.json"


def requirements() -> list[str]:
    """The requirements of all extras, without torch and without this package itself."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return sorted({row for rows in extras.values() for row in rows if not row.startswith("manyheads")})


def pins() -> list[str]:
    """Each requirement at the version of constraints.txt, or of the loggers' own list."""
    files = (ROOT / "constraints.txt", ROOT / "tests" / "clients" / "loggers.txt")
    rows = [row for file in files for row in file.read_text(encoding="utf-8").splitlines()]
    names = {re.split(r"[\[><=]", row)[0].lower().replace("_", "-") for row in requirements()}
    return [row for row in rows if row.partition("==")[0].lower().replace("_", "-") in names]


def date_of(uv: str, row: str) -> tuple[str, str]:
    """Return a requirement's package, and the date of the first file of the lowest version that fits.

    Each is asked for by itself, because lower bounds need not fit one another.
    """
    with tempfile.TemporaryDirectory() as folder:
        lines = (
            "[project]",
            'name = "dates"',
            'version = "0"',
            'requires-python = ">=3.11"',
            f'dependencies = ["{row}"]',
        )
        Path(folder, "pyproject.toml").write_text("\n".join(lines), encoding="utf-8")
        options = [
            "--quiet",
            "--no-progress",
            "--resolution",
            "lowest-direct",
            "--prerelease",
            "if-necessary-or-explicit",
        ]
        subprocess.run([uv, "lock", *options, "--directory", folder], check=True)
        packages = tomllib.loads(Path(folder, "uv.lock").read_text(encoding="utf-8"))["package"]
    name = re.split(r"[\[><=]", row)[0].lower().replace("_", "-")
    own = next(one for one in packages if one["name"] == name)
    files = [*own.get("wheels", []), *([own["sdist"]] if "sdist" in own else [])]
    return name, min(one["upload-time"] for one in files)[:10]


def main() -> int:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        print("uv is not installed; run `make dates`, or pip install -r release/requirements.txt", file=sys.stderr)
        return 1
    found: dict[str, dict[str, str]] = {}
    for row in [*requirements(), *pins()]:
        name, date = date_of(uv, row)
        found.setdefault(name, {})[row.partition("=")[2].removeprefix("=").partition(",")[0]] = date
    DATES.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
