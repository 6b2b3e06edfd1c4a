"""The check of ceilings (`make check`): it counts, names what is above, and never raises a ceiling."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from ceilings import check
from ceilings.journeys import Watch
from ceilings.structure import Structure

FILES = {
    "__init__.py": "",
    "catalogue.py": 'TABLE = {"a": "manyheads.extras.a:A"}\n',
    "nn/layers.py": "class Attention: ...\nclass Plain: ...\n",
    "nn/use.py": "from manyheads.nn.layers import Attention\nfrom . import layers\nisinstance(0, Attention)\n",
    "cli.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import manyheads.catalogue\n"
        "def run(x):\n    import manyheads.extras.a\n    import manyheads.nn.use\n"
        "    isinstance(x, (Attention, Plain))\n"
        "    assert type(x) is nn.Attention\n    match x:\n        case Attention(): return 'extras.a:A'\n"
    ),
    "extras/a.py": "import manyheads.nn.use\n" + "#\n" * 60,
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "src/manyheads" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/a.py").write_text("1\n2\n")
    return tmp_path


def test_figures_of_a_small_package(checkout):
    assert Structure(checkout).figures() == {
        "lines of the package": 1 + 2 + 3 + 10 + 61,
        "files of the package": 6,
        "lines of the core": 1 + 2 + 3 + 10,
        "files of the core": 5,
        "imports": 4,
        "imports of extras by the core": 2,  # an import, and a string outside the catalogue
        "depth of imports": 4,
        "files with one importer": 2,
        "files of at most 60 lines": 4,
        "classes recognised outside their folder": 3,
        "lines of tests": 2,
    }


def test_a_ceiling_is_lowered_to_the_figure_or_the_goal_and_never_raised():
    ceilings = {
        "imports": {"goal": 10, "ceiling": 20},
        "lines of tests": {"goal": 100, "ceiling": 900},
        "depth": {"goal": 3, "ceiling": 5},
        "new": {"goal": 1},
        "not measured": {"goal": 1, "ceiling": 2},
    }
    lowered = check.lowered(ceilings, {"imports": 5, "lines of tests": 701, "depth": 9, "new": 4})
    assert [entry["ceiling"] for entry in lowered.values()] == [10, 800, 5, 4, 2]
    assert check.faults(lowered, {"imports": 11, "depth": 5}) == ["imports: 11, but the ceiling is 10 (goal 10)"]


def test_a_page_that_lists_a_file_that_does_not_run_is_named():
    row = "| file | what |\n|---|---|\n| `{}` | x |\n| `cli/a.py` | x |\n"
    page = f"{row.format('a/b.py')}\n{row.format('c.py')}"
    journeys = {"train debug": {"a/b.py"}, "translate": {"a/b.py"}}
    assert check.untrue_rows(page, journeys) == ["adding-an-architecture.md: c.py did not run in `translate`"]


def test_a_function_counts_and_a_module_does_not(tmp_path):
    (tmp_path / "module.py").write_text("x = 1\n")
    (tmp_path / "called.py").write_text("(lambda: 1)()\n")
    with Watch() as files:
        runpy.run_path(str(tmp_path / "module.py"))
        runpy.run_path(str(tmp_path / "called.py"))
    assert str(tmp_path / "called.py") in files
    assert str(tmp_path / "module.py") not in files
