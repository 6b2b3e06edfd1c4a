"""The server's page in Chromium, by Playwright: what a user does, and axe-core's rules of accessibility.

    python tests/clients/check_page.py http://127.0.0.1:8000 --axe node_modules/axe-core/axe.min.js --pictures pictures

Every state is looked at in light and dark, on a wide screen and at 390 pixels. The pictures are for people.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright

TEXT = "I am hungry.\n\nWhere is the station? I am hungry."
WAIT = 120_000  # milliseconds; only stops a check that hangs
SIZES = {"wide": 1440, "phone": 390}


class Checked:
    """A page, the accessibility rules and the folder of pictures."""

    def __init__(self, page: Page, name: str, axe: str, pictures: Path | None) -> None:
        self.page, self._name, self._axe, self._pictures = page, name, axe, pictures

    def look(self, state: str) -> None:
        """Apply axe-core's rules, and take a picture.

        Raises: AssertionError: a rule is broken, or the page is wider than the screen.
        """
        self.page.evaluate(self._axe)
        found = self.page.evaluate("axe.run().then((found) => found.violations)")
        told = [f"{one['id']}: {one['nodes'][0]['html']}" for one in found]
        assert not told, f"{self._name}, {state}: " + "; ".join(told)
        assert self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{state}: too wide"
        if self._pictures is not None:
            self._pictures.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=str(self._pictures / f"{self._name}-{state}.png"), full_page=True)


def translate(checked: Checked) -> None:
    """Type, point at words, take an alternative, force a word."""
    page = checked.page
    checked.look("empty")
    page.locator("#t-source").press_sequentially(TEXT[:12])
    page.locator(".sentence").first.wait_for()
    page.fill("#t-source", TEXT)
    page.locator(".sentence").nth(2).wait_for()
    assert page.inner_text("#t-target").count("\n") == 2
    sentence = page.locator(".sentence").nth(1)
    sources, targets = (sentence.locator(".tokens").nth(side).locator("button") for side in (0, 1))
    targets.nth(1).hover()
    colour = "one => one.style.backgroundColor"
    assert any(sources.nth(place).evaluate(colour) for place in range(sources.count())), "pointing shows nothing"
    checked.look("translated")
    second = sentence.locator(".candidates button").nth(1)
    text = second.inner_text().rsplit(" (", 1)[0].strip()
    second.click()
    assert text in page.inner_text("#t-target")
    sentence.locator(".candidates button").nth(0).click()
    before = page.inner_text("#t-target")
    targets.nth(0).click()
    page.locator("#choices-list button").first.wait_for()
    checked.look("choices")
    page.locator("#choices-list button").nth(2).click()
    expect(page.locator("#t-target")).not_to_have_text(before)


def errors(checked: Checked) -> None:
    """A full server, a server that is gone, a text that is too long; the user's text stays."""
    page = checked.page
    refusals = [429, 429]

    def busy(route: Any) -> None:
        if not refusals:
            route.continue_()
            return
        body = '{"error": {"message": "The queue is full; try again in 1 s.", "param": null}}'
        route.fulfill(status=refusals.pop(), headers={"retry-after": "1"}, body=body, content_type="application/json")

    page.route("**/v1/translate", busy)
    page.fill("#t-source", "Where is the station?")
    expect(page.locator("#t-message")).to_contain_text("busy")
    checked.look("busy")
    expect(page.locator("#t-message")).to_have_text("")
    page.unroute("**/v1/translate")
    page.context.set_offline(True)
    page.fill("#t-source", "I am hungry")
    expect(page.locator("#t-message")).to_contain_text("does not answer")
    checked.look("gone")
    page.context.set_offline(False)
    page.fill("#t-source", "word " * 9000)
    expect(page.locator("#t-message")).to_contain_text("limit")
    page.fill("#t-source", "")


def write(checked: Checked) -> None:
    """With the keyboard alone: choose the mode, write, stop, look at alternatives, go on from one of them."""
    page = checked.page
    page.keyboard.press("Home")
    for _ in range(40):
        if page.evaluate("document.activeElement.id") == "show-write":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    for _ in range(40):
        if page.evaluate("document.activeElement.id") == "w-prompt":
            break
        page.keyboard.press("Tab")
    page.keyboard.type("The old")
    page.keyboard.press("Control+Enter")
    page.locator("#w-output .piece").nth(3).wait_for(state="attached")  # a line break has no size
    page.locator("#w-keep:enabled").wait_for()
    checked.look("written")
    page.locator("#w-output .piece").first.focus()
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.locator("#choices-list button").first.wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator("#choices").wait_for(state="hidden")
    page.locator("#w-keep:enabled").wait_for()
    page.fill("#w-tokens", "4000")
    page.focus("#w-prompt")
    page.keyboard.press("Control+Enter")
    page.locator("#w-stop:enabled").wait_for()
    page.locator("#w-output .piece").nth(5).wait_for()
    page.focus("#w-stop")
    page.keyboard.press("Enter")
    page.locator("#w-start:enabled").wait_for()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--axe", type=Path, required=True, help="axe.min.js of axe-core")
    parser.add_argument("--pictures", type=Path)
    options = parser.parse_args()
    names = ("chromium", "chromium-browser", "google-chrome")
    program = os.environ.get("MANYHEADS_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if program is None:
        print("no browser found; install chromium, or name one by MANYHEADS_CHROMIUM", file=sys.stderr)
        return 1
    axe = options.axe.read_text("utf-8")
    expect.set_options(timeout=WAIT)
    with sync_playwright() as driver:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=program, args=arguments)
        for scheme in ("light", "dark"):
            for size, width in SIZES.items():
                page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})  # type: ignore[arg-type]
                page.set_default_timeout(WAIT)
                faults: list[str] = []
                page.on("pageerror", lambda error, faults=faults: faults.append(str(error)))  # type: ignore[misc]
                page.goto(options.url)
                page.locator("#t-source").wait_for()
                checked = Checked(page, f"{scheme}-{size}", axe, options.pictures)
                for do in (translate, errors, write):
                    do(checked)
                page.goto(f"{options.url}/docs")
                checked.look("docs")
                assert not faults, faults
                page.close()
                print(f"page, {scheme}, {size}: good")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
