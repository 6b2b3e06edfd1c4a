"""A browser without a window, where there is one."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


# Playwright's event loop counts as running until its driver ends. It must end with the file: later tests of the same
# process could not call asyncio.run().
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, by Playwright; MANYHEADS_CHROMIUM names another than the system's."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright; pip install playwright")
    named = os.environ.get("MANYHEADS_CHROMIUM")
    found = named or next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser found ({', '.join(NAMES)}); install chromium, or name one by MANYHEADS_CHROMIUM")
    with playwright.sync_playwright() as driver:
        # Chromium keeps its sandbox from root, as whom containers run tests; the page is our own.
        options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        window = driver.chromium.launch(executable_path=found, args=options)
        yield window
        window.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """axe-core, a script. MANYHEADS_AXE names axe.min.js; otherwise it is where `make check-serving` installs it."""
    root = Path(__file__).resolve().parents[2]
    path = Path(os.environ.get("MANYHEADS_AXE") or root / ".venv-clients" / "node_modules" / "axe-core" / "axe.min.js")
    if not path.is_file():
        pytest.skip("no axe-core; npm install axe-core, and name its axe.min.js by MANYHEADS_AXE")
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def accessible(axe: str) -> Callable[[Any], None]:
    """A check by axe-core: no violation of impact serious or critical. The context must bypass the page's policy."""

    def check(page: Any) -> None:
        page.evaluate(axe)
        found = page.evaluate("axe.run().then((found) => found.violations)")
        assert found is not None
        grave = [one for one in found if one["impact"] in ("serious", "critical")]
        assert not grave, [(one["id"], [node["target"] for node in one["nodes"]]) for one in grave]

    return check
