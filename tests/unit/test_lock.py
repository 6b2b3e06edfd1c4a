"""requirements.lock: the versions of constraints.txt, with hashes, for all that users install; see release/lock.py."""

import re
import tomllib
from functools import cache
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("dev", "docs", "mlflow", "trackio", "wandb")  # as in release/lock.py
UNPINNED = {"setuptools"}  # part of every environment, so constraints.txt does not list it


@cache
def locked() -> dict[str, tuple[Requirement, list[str]]]:
    """Name -> the requirement and its hashes."""
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8").replace("\\\n", " ")
    rows = [row.split("--hash=") for row in text.splitlines() if row and not row.startswith("#")]
    found = [(Requirement(row), [one.strip() for one in hashes]) for row, *hashes in rows]
    assert len(found) > 30
    return {canonicalize_name(one.name): (one, hashes) for one, hashes in found}


def pinned() -> dict[str, str]:
    """Name -> version in constraints.txt."""
    rows = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [row.split("==") for row in rows if "==" in row and not row.startswith("#")]
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def test_versions_are_those_of_the_constraints() -> None:
    pins = pinned()
    for name, (one, _) in locked().items():
        if name in pins:
            assert str(one.specifier) == f"=={pins[name]}", f"{one}: run make lock"
        else:
            elsewhere = one.marker is not None and not Marker(str(one.marker)).evaluate()
            assert elsewhere or name in UNPINNED, f"{one} is not in constraints.txt"


def test_every_file_has_a_hash_and_no_place_is_named() -> None:
    for one, hashes in locked().values():
        assert hashes, one
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value) for value in hashes), one
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index-url" not in text
    assert "--find-links" not in text


def test_it_holds_what_users_install_and_not_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    rows = [*project["dependencies"], *(row for name in extras if name not in LEFT_OUT for row in extras[name])]
    for wanted in map(Requirement, rows):
        name = canonicalize_name(wanted.name)
        if name == "torch":
            continue
        assert name in locked(), f"{wanted}: run make lock"
        [version] = [spec.version for spec in locked()[name][0].specifier]
        assert wanted.specifier.contains(version), f"{wanted}: run make lock"
    assert not {"torch", "triton"} & locked().keys()
    assert not [name for name in locked() if name.startswith("nvidia")]
