"""A browser without a window, where there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
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
