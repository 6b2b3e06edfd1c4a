"""The documentation as a site, in a browser: axe-core finds nothing grave but in a few elements of the theme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).resolve().parents[2] / "site"
PAGES = (
    "index",
    "words",
    "own-data",
    "performance",
    "serving",
    "reference",
    "tutorials/attention",
    "sources/annotated-transformer",
    "decisions/index",
    "repository/index",
    "repository/recipes/index",
)
THEME: set[tuple[str, str]] = {
    ("aria-dialog-name", ".md-search"),
    ("scrollable-region-focusable", ".md-typeset__scrollwrap"),
}
"""Rule and selector of what Material for MkDocs itself does wrong. This list may only become shorter."""

# Rule, element as a selector and its HTML, and which selectors of THEME it matches.
VIOLATIONS = """([rules, selectors]) => axe.run(rules ? {runOnly: rules} : {}).then((found) => found.violations
    .filter((one) => ["serious", "critical"].includes(one.impact))
    .flatMap((one) => one.nodes.map((node) => {
        const element = document.querySelector(node.target[0]);
        const matching = selectors.filter((selector) => element !== null && element.matches(selector));
        return [one.id, node.target.join(" "), node.html.slice(0, 100), matching];
    })))"""


@pytest.mark.page
def test_the_site_is_accessible(browser: Any, axe: str) -> None:
    """In both themes; only colours differ in the dark."""
    if not (SITE / "index.html").is_file():
        pytest.skip("no site; `make docs` builds it")
    mistakes: dict[tuple[str, str, str], str] = {}  # the first of a kind
    used: set[tuple[str, str]] = set()
    selectors = sorted({selector for _, selector in THEME})
    page = browser.new_context(bypass_csp=True).new_page()
    page.set_default_timeout(200_000)
    for scheme, rules in (("light", None), ("dark", ["color-contrast"])):
        page.emulate_media(color_scheme=scheme)
        for name in PAGES:
            page.goto((SITE / f"{name}.html").as_uri())
            page.evaluate(axe)
            for rule, target, html, matching in page.evaluate(VIOLATIONS, [rules, selectors]):
                known = {(rule, selector) for selector in matching} & THEME
                used |= known
                if not known:
                    mistakes.setdefault((scheme, rule, html.split(" href=")[0]), f"{name}: {target} {html}")
    assert not mistakes, "\n".join(f"{scheme} {rule} {where}" for (scheme, rule, _), where in mistakes.items())
    assert used == THEME, f"no longer needed: {THEME - used}"
