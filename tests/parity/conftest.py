"""The folder of parity fixtures: each is NAME.json and NAME.safetensors, made by another implementation."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Fixture:
    """One fixture, read when a test asks. path: of its JSON."""

    path: Path
    meta: dict[str, Any] = field(repr=False)

    def tensors(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.path.with_suffix(".safetensors"))


def parity_folder() -> Path | None:
    """MANYHEADS_PARITY_DIR, or fixtures/parity in the folder of large fixtures (see the `shared` fixture)."""
    named = os.environ.get("MANYHEADS_PARITY_DIR")
    if named:
        if not Path(named).is_dir():
            raise pytest.UsageError(f"MANYHEADS_PARITY_DIR is {named!r}, which is no folder")
        return Path(named)
    shared = Path(os.environ.get("MANYHEADS_SHARED", HERE.parents[2] / "shared"))
    folder = shared / "fixtures" / "parity"
    return folder if folder.is_dir() else None


def all_fixtures() -> list[Fixture]:
    folder = parity_folder()
    paths = sorted(folder.glob("*.json")) if folder else []
    return [Fixture(path, json.loads(path.read_text("utf-8"))) for path in paths if path.name != "manifest.json"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fixture" in metafunc.fixturenames:
        found: list[Any] = list(all_fixtures())
        ids = [one.path.stem for one in found]
        if not found:
            reason = "no folder of parity fixtures; MANYHEADS_PARITY_DIR may name one"
            found, ids = [pytest.param(None, marks=pytest.mark.skip(reason=reason))], ["none"]
        metafunc.parametrize("fixture", found, ids=ids)


@pytest.fixture(scope="session")
def pending() -> dict[str, str]:
    """Kinds of fixtures whose peer has no loader yet, with the reason: the only place that lists them."""
    return json.loads((HERE / "pending.json").read_text("utf-8"))


@pytest.fixture
def fixtures() -> list[Fixture]:
    found = all_fixtures()
    if not found:
        pytest.skip("no folder of parity fixtures; MANYHEADS_PARITY_DIR may name one")
    return found
