"""The server's page in a browser: typing, hovering, alternatives, forced words, errors, the keyboard."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_sockets import running
from slices import sliced

from manyheads.catalogue import build_model
from manyheads.decoding.settings import DecodingSettings, GenerationSettings
from manyheads.extras.serving.server import Server
from manyheads.extras.serving.settings import ServingSettings
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer import config as presets
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabulary import ByteVocabulary

pytest.importorskip("playwright", reason="no playwright; pip install playwright")
from playwright.sync_api import expect

pytestmark = pytest.mark.one_in(2, "pages in a browser")
PATIENCE_MILLISECONDS = 200_000
expect.set_options(timeout=PATIENCE_MILLISECONDS)
TEXT = "I am hungry.\n\nWhere is the station? The cat sees the dog."


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Two translators, one the reverse of the other by name, and a language model."""
    made = tmp_path_factory.mktemp("served")
    tokenizer = Tokenizer.train([TEXT, "Ich habe Hunger. Wo ist der Bahnhof?"] * 8, TokenizerSettings(vocab_size=320))
    size = tokenizer.vocab_size
    torch.manual_seed(1)
    config = dataclasses.replace(presets.PRESETS["debug"], source_vocab_size=size, target_vocab_size=size)
    settings = DecodingSettings(num_beams=2, max_new_tokens=12, min_new_tokens=6, banned_ids=tuple(range(4, 260)))
    save_pretrained(build_model(config), made / "en-de", tokenizer=tokenizer, generation=settings)
    vocabulary = ByteVocabulary()
    novel = TransformerXLConfig(
        vocab_size=vocabulary.vocab_size, d_model=16, num_heads=2, d_ff=24, num_layers=2, memory_len=12
    )
    printable = tuple({*range(256)} - {*range(32, 127)})
    generation = GenerationSettings(banned_ids=printable)
    save_pretrained(build_model(novel), made / "novel", tokenizer=vocabulary, generation=generation)
    return made / "en-de", made / "novel"


@pytest.fixture(scope="module")
def served(folders: tuple[Path, ...]) -> Iterator[tuple[Server, str]]:
    settings = ServingSettings(models=tuple(map(str, folders)), source_lang="en", target_lang="de", device="cpu")
    with running(settings) as (server, port):
        yield server, f"http://127.0.0.1:{port}"


LIGHT = ("light", 1200)
DARK_PHONE = ("dark", 390)
in_both = pytest.mark.parametrize(
    "page", sliced([(LIGHT,), (DARK_PHONE,)], 2, "looks of the page", lambda case: case[0][0]), indirect=True
)
"""What depends on colours or on room is tested in one, another each time, and in the long check in both; all else in
the light."""


@pytest.fixture(params=[pytest.param(LIGHT, id="light"), pytest.param(DARK_PHONE, id="dark", marks=pytest.mark.slow)])
def page(browser: Any, served: tuple[Server, str], request: pytest.FixtureRequest) -> Iterator[Any]:
    scheme, width = request.param
    opened = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text) if "Policy" in message.text else None)
    opened.on(
        "request", lambda sent: problems.append(sent.url) if not sent.url.startswith((served[1], "data:")) else None
    )
    opened.set_default_timeout(PATIENCE_MILLISECONDS)
    opened.goto(served[1])
    opened.locator("#show-write").wait_for()  # which shows once the page knows its models
    yield opened
    opened.close()
    assert problems == []


def translated(page: Any) -> Any:
    page.fill("#t-source", TEXT)
    page.locator(".sentence").nth(2).wait_for()
    return page.locator(".sentence").nth(1)


@in_both
def test_translating_while_typing(page: Any) -> None:
    translated(page)
    text = page.inner_text("#t-target")
    assert text.count("\n") == 2
    is_within = "document.documentElement.scrollWidth <= window.innerWidth"
    assert page.evaluate(is_within)
    page.click("#show-write")
    assert page.evaluate(is_within)
    page.click("#show-translate")
    page.fill("#t-source", "")
    page.locator(".sentence").first.wait_for(state="detached")
    assert page.inner_text("#t-target") == ""


@in_both
def test_pointing_at_a_word_shows_what_it_attends_to(page: Any) -> None:
    sentence = translated(page)
    sources, targets = (sentence.locator(".tokens").nth(side).locator("button") for side in (0, 1))
    colour = "one => one.style.backgroundColor"
    targets.nth(1).hover()
    assert any(sources.nth(place).evaluate(colour) for place in range(sources.count()))
    sources.nth(0).focus()
    assert any(targets.nth(place).evaluate(colour) for place in range(targets.count()))
    assert not sources.nth(0).evaluate(colour)


def test_alternatives_are_taken_and_words_forced(page: Any) -> None:
    sentence = translated(page)
    second = sentence.locator(".candidates button").nth(1)
    text = second.inner_text().rsplit(" (", 1)[0].strip()
    second.click()
    assert text in page.inner_text("#t-target")
    sentence.locator(".candidates button").nth(0).click()
    before = page.inner_text("#t-target")
    sentence.locator(".tokens").nth(1).locator("button").nth(0).click()
    page.locator("#choices-list button").nth(2).click()
    expect(page.locator("#t-target")).not_to_have_text(before)
    assert page.locator(".sentence").count() == 3


def test_writing_stopping_and_going_on(page: Any) -> None:
    page.click("#show-write")
    page.fill("#w-prompt", "The old")
    page.fill("#w-tokens", "30")
    page.click("#w-start")
    page.locator("#w-keep:enabled").wait_for()
    first = page.locator("#w-output").text_content()
    assert len(first) == 30
    assert "of at most 12 tokens" in page.inner_text("#w-memory")
    page.click("#w-start")
    page.locator("#w-keep:enabled").wait_for()
    assert page.locator("#w-output").text_content() == first, "the same seed"
    page.locator("#w-output .piece").nth(4).click()
    page.locator("#choices-list button").nth(1).click()
    page.locator("#w-keep:enabled").wait_for()
    again = page.locator("#w-output").text_content()
    assert again[:4] == first[:4]
    assert len(again) == 35
    page.click("#w-keep")
    assert page.input_value("#w-prompt") == "The old" + again
    page.fill("#w-tokens", "4000")
    page.click("#w-start")
    page.locator("#w-output .piece").nth(3).wait_for()
    page.click("#w-stop")
    page.locator("#w-start:enabled").wait_for()


def test_the_keyboard_is_enough(page: Any) -> None:
    page.focus("#show-write")
    page.keyboard.press("Enter")
    page.focus("#w-prompt")
    page.keyboard.type("It")
    page.fill("#w-tokens", "10")
    page.focus("#w-prompt")
    page.keyboard.press("Control+Enter")
    page.locator("#w-keep:enabled").wait_for()
    page.locator("#w-output .piece").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator("#choices-list button").first.wait_for()
    page.keyboard.press("Escape")
    assert not page.locator("#choices").is_visible()


def test_errors_are_shown_beside_the_input(page: Any, served: tuple[Server, str]) -> None:
    page.fill("#t-source", "word " * 4000)
    expect(page.locator("#t-message")).to_contain_text("limit")
    state = served[0]._service.state
    most, state.num_requests = state.num_requests, 10**6
    try:
        page.fill("#t-source", "I am hungry.")
        expect(page.locator("#t-message")).to_contain_text("busy")
    finally:
        state.num_requests = most
    page.locator(".sentence").first.wait_for()
    assert page.inner_text("#t-message") == ""
    page.route("**/v1/translate", lambda route: route.abort())
    page.fill("#t-source", "Another text.")
    expect(page.locator("#t-message")).to_contain_text("does not answer")
    assert page.input_value("#t-source") == "Another text."


def test_models_cannot_write_markup(page: Any) -> None:
    answer = (
        '{"translations": [{"text": "", "sentences": [{"start": 0, "end": 1, "source_tokens": ["<b>a</b>"],'
        ' "candidates": [{"text": "<img src=x onerror=alert(1)>", "score": null, "tokens": ["<i>"], "token_ids": [5],'
        ' "token_log_probs": [-1]}]}]}]}'
    )
    page.route("**/v1/translate", lambda route: route.fulfill(body=answer, content_type="application/json"))
    page.fill("#t-source", "a")
    page.locator(".sentence").first.wait_for()
    assert page.inner_text("#t-target") == "<img src=x onerror=alert(1)>"
    assert page.locator("main img, main b, main i").count() == 0


@in_both
def test_terms_and_a_dropped_document(page: Any, tmp_path: Path) -> None:
    page.locator("#t-more summary").click()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the screen"
    page.fill("#t-terms", "hungry = Bahnhof\n")
    page.fill("#t-source", "I am hungry.")
    expect(page.locator("#t-target")).to_contain_text("Bahnhof")
    assert '"terms": "hungry\\tBahnhof"' in page.locator("#t-curl").text_content()
    drop = """(names) => {
        const data = new DataTransfer();
        for (const name of names) data.items.add(new File(["# I am hungry\\n"], name));
        const event = new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true});
        document.getElementById("t-source").dispatchEvent(event);
    }"""
    page.evaluate(drop, ["page.md", "other.md"])
    expect(page.locator("#t-file-message")).to_contain_text("one document at a time")
    page.evaluate(drop, ["page.md"])
    with page.expect_download() as download:
        page.locator("#t-file-message a").click()
    assert download.value.suggested_filename == "page.translated.md"
    assert Path(download.value.path()).read_text(encoding="utf-8").startswith("# ")
    file = tmp_path / "letter.docx"
    file.write_bytes(b"PK")
    page.set_input_files("#t-file", file)
    expect(page.locator("#t-file-message")).to_contain_text("not read")
    expect(page.locator("#t-cancel")).to_be_hidden()
