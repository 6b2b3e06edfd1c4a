"""The documentation as a site, read from a disk by a browser: axe-core finds nothing grave, and Chinese is at home."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

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
    "zh/index",
    "zh/own-data",
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


@pytest.fixture
def page(browser: Any) -> Any:
    if not (SITE / "index.html").is_file():
        pytest.skip("no site; `make docs` builds it")
    return browser.new_page(viewport={"width": 1440, "height": 1000})


@pytest.mark.page
def test_the_language_is_switched_from_a_disk_and_back(page: Any) -> None:
    pages = sorted(path.relative_to(SITE / "zh") for path in (SITE / "zh").rglob("*.html"))
    assert len(pages) >= 4
    for name in pages:
        page.goto((SITE / name).as_uri())
        page.click("article a[hreflang='zh-Hans']")
        assert (page.url, page.evaluate("document.documentElement.lang")) == ((SITE / "zh" / name).as_uri(), "zh")
        page.click("article a[hreflang='en']")
        assert (page.url, page.evaluate("document.documentElement.lang")) == ((SITE / name).as_uri(), "en")


@pytest.mark.page
@pytest.mark.parametrize("word", ["注意力", "掩码", "词元"])
def test_the_search_finds_chinese_words(page: Any, word: str) -> None:
    """The first results are pages in Chinese with this word."""
    page.goto((SITE / "zh" / "index.html").as_uri())
    page.click("input.md-search__input")
    page.keyboard.type(word)
    page.keyboard.press("End")  # the search looks when a key goes up, as an input method sends it
    found = page.locator(".md-search-result__item").first
    found.wait_for(timeout=60_000)
    place = found.locator("a").first.get_attribute("href").partition("?")[0].partition("#")[0]
    assert re.search(r"/zh/|README\.zh-CN", place)
    page.goto(urljoin(page.url, place))
    assert word in page.inner_text("article")
