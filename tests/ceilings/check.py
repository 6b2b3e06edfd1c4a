"""Figures of the structure and of journeys must not grow: within `make check`.

`ceilings.json` has a goal and a ceiling of each. While a figure is above its goal, its ceiling is the figure itself, so
who adds must remove. `--lower` writes the figures of today as ceilings, where they are lower (`make ceilings`); nothing
here raises one. `--no-journeys` takes three seconds.
"""

import json
import re
import sys
from pathlib import Path

from ceilings.journeys import files_of_journeys
from ceilings.structure import Structure

ROOT = Path(__file__).resolve().parents[2]
CEILINGS = Path(__file__).with_name("ceilings.json")
PAGE = ROOT / "docs" / "adding-an-architecture.md"
COARSE = 100
"""Ceilings of lines are multiples of this."""


def lowered(ceilings: dict[str, dict[str, int]], figures: dict[str, int]) -> dict[str, dict[str, int]]:
    """Ceilings after a measurement: of each the old one, or the figure or goal where both are lower."""
    new = {name: dict(entry) for name, entry in ceilings.items()}
    for name, figure in figures.items():
        unit = COARSE if name.startswith("lines") else 1
        ceiling = max(ceilings[name]["goal"], -(-figure // unit) * unit)
        new[name]["ceiling"] = min(ceiling, ceilings[name].get("ceiling", ceiling))
    return new


def faults(ceilings: dict[str, dict[str, int]], figures: dict[str, int]) -> list[str]:
    """A sentence for each figure that is above its ceiling."""
    return [
        f"{name}: {figures[name]:,}, but the ceiling is {entry['ceiling']:,} (goal {entry['goal']:,})"
        for name, entry in ceilings.items()
        if name in figures and figures[name] > entry["ceiling"]
    ]


def untrue_rows(page: str, journeys: dict[str, set[str]]) -> list[str]:
    """Files in the first column of the page's tables of journeys that did not run; those of the command line do not."""
    train, translate = re.findall(r"^\| file \|.*\n\|[-| ]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [
        f"{PAGE.name}: {path} did not run in `{journey}`"
        for journey, table in (("train debug", train), ("translate", translate))
        for path in re.findall(r"^\| `([\w/]+\.py)`", table, re.MULTILINE)
        if path not in journeys[journey] and not path.startswith("cli/")
    ]


def main(arguments: list[str]) -> int:
    figures = Structure(ROOT).figures()
    found: list[str] = []
    if "--no-journeys" not in arguments:
        journeys = files_of_journeys(ROOT)
        figures |= {f"files that run in {journey}": len(files) for journey, files in journeys.items()}
        found = untrue_rows(PAGE.read_text("utf-8"), journeys)
    ceilings = json.loads(CEILINGS.read_text("utf-8"))
    if "--lower" in arguments:
        ceilings = lowered(ceilings, figures)
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in ceilings.items())
        CEILINGS.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    for name, figure in figures.items():
        print(f"{name:44}{figure:>8,}{ceilings[name]['ceiling']:>9,}{ceilings[name]['goal']:>9,}")
    found += faults(ceilings, figures)
    print(*found, sep="\n", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
