"""Lower bounds of extras: each has one, and neither it nor the version of constraints.txt is older than two years.

Without a recent bound, pip resolves a conflict by taking an ancient version. Dates are those of release/dates.json
(`make dates`), and an age counts up to the newest of the versions in constraints.txt, so time alone breaks nothing.
"""

import json
import tomllib
from datetime import date, timedelta
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
ROWS = [(extra, row) for extra, rows in EXTRAS.items() for row in rows if not row.startswith("manyheads")]
DATES: dict[str, dict[str, str]] = json.loads((ROOT / "release" / "dates.json").read_text(encoding="utf-8"))
PINS = {
    canonicalize_name(name): version
    for file in ("tests/clients/loggers.txt", "constraints.txt")  # the loggers are installed apart
    for name, _, version in (row.partition("==") for row in (ROOT / file).read_text("utf-8").splitlines())
    if version
}
OLDEST = max(date.fromisoformat(DATES[name][PINS[name]]) for name in DATES) - timedelta(days=730)


@pytest.mark.parametrize(("extra", "row"), ROWS)
def test_a_bound_is_recent_and_resolves_to_the_constraints(extra: str, row: str) -> None:
    wanted = Requirement(row)
    name = canonicalize_name(wanted.name)
    bounds = [one.version for one in wanted.specifier if one.operator == ">="]
    assert bounds, f"{row} in the extra {extra} has no lower bound"
    assert name in PINS, f"{wanted.name} is not in constraints.txt"
    assert wanted.specifier.contains(PINS[name]), f"{row} does not allow {PINS[name]} of constraints.txt"
    for version in (*bounds, PINS[name]):
        assert version in DATES.get(name, {}), f"the date of {wanted.name} {version} is unknown: run make dates"
        released = DATES[name][version]
        assert date.fromisoformat(released) >= OLDEST, f"{wanted.name} {version} is of {released}: raise the bound"


def test_every_extra_for_users_has_requirements() -> None:
    assert all(EXTRAS.values())
