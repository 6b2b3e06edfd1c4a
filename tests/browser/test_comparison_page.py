"""The page that compares models, in a browser: order, search, more; nothing on the console or the wire."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyheads.extras.research.comparison import Comparison, Example, Paired

pytestmark = pytest.mark.one_in(2, "pages in a browser")
HOSTILE = "</script><img src=x onerror=alert(1)>"


def comparison(num_examples: int) -> Comparison:
    examples = [
        Example(
            f"line {place}",
            f"source {place} {HOSTILE}",
            "the right words",
            (f"the wrong {place}", "the right words"),
            (float(place % 7), 5.0 - place % 3),
        )
        for place in range(num_examples)
    ]
    scores = [Paired(20.0, 1.0, None, "sig"), Paired(22.0, 1.0, 0.01, "sig")]
    return Comparison(
        models=["runs/a", HOSTILE], scores={"BLEU": scores}, figures={"nats/sentence": ["9.00", "8.00"]},
        notes=["a note"], examples=examples, example_score="chrF of the sentence", smaller_is_better=False,
        num_shown=3, protocol={"data": HOSTILE}, protocol_lines=["  data  x"],
    )  # fmt: skip


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[[Comparison], Any]]:
    told: list[str] = []
    page = browser.new_page()

    def show(compared: Comparison) -> Any:
        replace(compared, page=str(tmp_path / "page.html")).save()
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("dialog", lambda dialog: told.append("a dialog"))
        page.goto((tmp_path / "page.html").as_uri())
        page.on("request", lambda request: told.append(request.url))
        return page

    yield show
    page.close()
    assert told == []


def test_examples_are_ordered_searched_and_added(opened: Callable[[Comparison], Any]) -> None:
    page = opened(comparison(120))
    assert page.locator("article").count() == 50
    assert page.locator("#scores td").all_inner_texts()[-5:] == ["B", "22.00", "1.00", "0.010*", "8.00"]
    page.click("#more")
    assert page.locator("article").count() == 100
    page.select_option("#order", "0")  # A is best
    for row in page.locator("article").all()[:3]:
        first, second = (float(text) for text in row.locator(".score").all_inner_texts())
        assert first > second
    page.fill("#search", "SOURCE 117 ")
    assert page.locator("#status").inner_text().startswith(("1 of 1 ", "0 of 0 "))
    page.select_option("#order", "all")
    page.fill("#search", "source 117 ")
    assert page.locator("article .place").all_inner_texts() == ["line 117"]
    assert page.locator("article mark").all_inner_texts() == ["wrong", "117"]  # words that the reference has not
    assert HOSTILE in page.locator("article").inner_text()
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") in ("light", "dark")


def test_the_search_of_the_site_runs_its_worker_from_disk(browser: Any, tmp_path: Path) -> None:
    """`docs/assets/iframe-worker.js`: a worker of a page on a disk, which browsers do not start."""
    repository = Path(__file__).parents[2]
    script = (repository / "docs/assets/iframe-worker.js").read_text(encoding="utf-8")
    (tmp_path / "polyfill.js").write_text(script, encoding="utf-8")
    (tmp_path / "more.js").write_text("self.factor = 2;", encoding="utf-8")
    (tmp_path / "worker.js").write_text(
        'addEventListener("message", async (event) => { await importScripts("more.js");'
        " postMessage(event.data * self.factor); });",
        encoding="utf-8",
    )
    (tmp_path / "page.html").write_text("<script src='polyfill.js'></script><body></body>", encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    found = page.evaluate(
        """() => new Promise((done) => {
            const worker = new Worker(new URL("worker.js", location.href));
            worker.addEventListener("message", (event) => done(event.data));
            worker.postMessage(21);
        })"""
    )
    page.close()
    assert found == 42
    settings = (repository / "mkdocs.yml").read_text(encoding="utf-8")
    assert "polyfills: [assets/iframe-worker.js]" in settings


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible(browser: Any, tmp_path: Path, accessible: Callable[[Any], None], scheme: str) -> None:
    replace(comparison(3), page=str(tmp_path / "page.html")).save()
    page = browser.new_page(color_scheme=scheme, viewport={"width": 390, "height": 844}, bypass_csp=True)
    page.goto((tmp_path / "page.html").as_uri())
    accessible(page)
    page.close()
