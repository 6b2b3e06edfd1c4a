"""Builds a release into dist/ and tries it as a user would: a wheel, a source archive, a list of its contents (SBOM).

    python release/build.py [--torch torch==2.13.0] [--torch-index URL]

The wheel is built from the source archive, checked by twine, and installed with requirements.lock into an environment
of its own. There README's first commands run in an empty folder, and the tests of the source archive that are marked
`first_minute`. The documentation becomes a site, which names its version. Without a green end dist/ stays empty.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
MOST_WHEEL_BYTES = 14_000_000
TEST_PACKAGES = ("pytest", "hypothesis")  # what the marked tests import, in the versions of constraints.txt


def build(folder: Path) -> tuple[Path, Path]:
    """Build the source archive, then the wheel from it, by the backend of this environment. Returns: wheel, archive."""
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)], check=True)
    [wheel], [archive] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, archive


def check_contents(wheel: Path) -> None:
    """Check that the wheel holds what git knows below src/ and nothing else: code, pages, sample data."""
    command = ["git", "ls-files", "-z", "src"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    known = {name.removeprefix("src/") for name in listed.stdout.split("\0") if name}
    with zipfile.ZipFile(wheel) as file:
        found = {name for name in file.namelist() if ".dist-info/" not in name}
        licences = {name.rpartition("/")[2] for name in file.namelist() if ".dist-info/licenses/" in name}
    if found != known:
        raise SystemExit(f"the wheel lacks {sorted(known - found)} and has besides {sorted(found - known)}.")
    if licences != {"LICENSE", "NOTICE"}:
        raise SystemExit(f"the wheel has the licence files {sorted(licences)}; it needs LICENSE and NOTICE.")


def check_for_index(wheel: Path, archive: Path) -> None:
    """Check the size of the wheel, and what the package index will show of both files."""
    size = wheel.stat().st_size
    if size >= MOST_WHEEL_BYTES:
        raise SystemExit(f"the wheel has {size:,} bytes; it must have fewer than {MOST_WHEEL_BYTES:,}.")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(archive)], check=True)


def first_blocks(readme: str) -> list[str]:
    """Return README's tested blocks of shell before the first one that trains: what needs the package alone."""
    blocks: list[str] = []
    for block in re.findall(r"<!-- test -->\n```(?:sh)?\n(.*?)```", readme, re.DOTALL):
        if re.search(r"^manyheads (prepare|train)\b", block, re.MULTILINE):
            break
        blocks.append(block)
    if not blocks:
        raise SystemExit("README.md has no tested block before the first one that trains.")
    return blocks


def run_first_blocks(python: Path, folder: Path) -> None:
    """Run README's first blocks in an empty folder, with the installed package alone."""
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MANYHEADS_SHARED")}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    for block in first_blocks((ROOT / "README.md").read_text(encoding="utf-8")):
        print(block, flush=True)
        code = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=folder, env=environment, check=False)  # noqa: S607
        if code.returncode != 0:
            raise SystemExit(f"README's block ended with {code.returncode}; nothing is left in dist/.")


def build_site(version: str, folder: Path) -> Path:
    """Return an archive of the documentation as a site, whose pages name the version at their foot."""
    site = folder / f"manyheads-{version}-docs"
    pages = [sys.executable, "docs/_site/pages.py", "build/pages", "--addresses"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}  # names of the reference; torch is not needed
    named = subprocess.run(pages, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    known = dict(one.split("=", 1) for one in named.split())
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, env={**environment, **known, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    if version not in (site / "index.html").read_text(encoding="utf-8"):
        raise SystemExit(f"the site does not name its version, {version}.")
    archive = folder / f"{site.name}.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(site, site.name)
    shutil.rmtree(site)
    return archive


def install(environment: Path, wheel: Path, torch: str, torch_index: str) -> Path:
    """Make an environment with torch, all that is locked, and the wheel. Returns: its Python."""
    venv.create(environment, with_pip=True, clear=True)
    python = environment / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *(["--index-url", torch_index] if torch_index else []), torch], check=True)
    subprocess.run([*pip, "--require-hashes", "-r", str(ROOT / "requirements.lock")], check=True)
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    subprocess.run([str(python), "-m", "pip", "check"], check=True)
    return python


def write_sbom(python: Path, version: str, target: Path) -> None:
    """Write what is installed as CycloneDX JSON, before the packages of the tests are installed.

    The version is read from the code when the wheel is built, so pyproject.toml does not name it; and pip belongs to
    the environment, not to the release.
    """
    command = [sys.executable, "-m", "cyclonedx_py", "environment", str(python), "--pyproject"]
    options = [str(ROOT / "pyproject.toml"), "--output-reproducible", "--output-format", "JSON", "--output-file"]
    subprocess.run([*command, *options, str(target)], check=True)
    document = json.loads(target.read_text(encoding="utf-8"))
    document["metadata"]["component"] |= {"version": version, "purl": f"pkg:pypi/manyheads@{version}"}
    [pip] = [one["bom-ref"] for one in document["components"] if one["name"] == "pip"]
    document["components"] = [one for one in document["components"] if one["bom-ref"] != pip]
    document["dependencies"] = [
        one | {"dependsOn": [name for name in one.get("dependsOn", []) if name != pip]}
        for one in document["dependencies"]
        if one["ref"] != pip
    ]
    target.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def run_tests(python: Path, archive: Path, folder: Path) -> None:
    """Run the marked tests of the source archive, beside which the package's own sources are removed."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [row for row in pins if row.partition("==")[0] in TEST_PACKAGES]
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    [sources] = folder.iterdir()
    shutil.rmtree(sources / "src")
    tests = sorted((sources / "tests").rglob("test_*.py"))
    marked = [str(path) for path in tests if "mark.first_minute" in path.read_text(encoding="utf-8")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["MANYHEADS_TYPECHECK"] = "0"  # as users have it, who have no beartype
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "first_minute", *marked]
    code = subprocess.run(command, cwd=sources, env=environment, check=False).returncode
    if code != 0:
        raise SystemExit(f"the tests of the installed wheel ended with {code}; nothing is left in dist/.")


def publish(files: list[Path]) -> None:
    """Move the files into dist/, which is emptied first, with a file of their SHA-256."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    rows = []
    for file in files:
        rows.append(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n")
        print(f"{file.stat().st_size:>12,} bytes  dist/{file.name}")
        shutil.move(file, DIST / file.name)
    (DIST / "SHA256SUMS").write_text("".join(rows), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default="torch==2.13.0", help="which torch is installed to try the wheel")
    parser.add_argument("--torch-index", default="", help="where that torch is found, if not at pip's own index")
    options = parser.parse_args()
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="manyheads-release-") as name:
        folder = Path(name)
        for part in ("built", "tests"):
            (folder / part).mkdir()
        wheel, archive = build(folder / "built")
        check_contents(wheel)
        check_for_index(wheel, archive)
        version = wheel.name.split("-")[1]
        site = build_site(version, folder / "built")
        python = install(folder / "environment", wheel, options.torch, options.torch_index)
        sbom = folder / "built" / f"{wheel.name.partition('-py3')[0]}.cdx.json"
        write_sbom(python, version, sbom)
        run_first_blocks(python, folder / "empty")
        run_tests(python, archive, folder / "tests")
        publish([wheel, archive, sbom, site])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
