"""The page of attention in a browser: pickers, pointer, keys, pictures to save; nothing on the console or the wire."""

import itertools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from slices import sliced

from manyheads.extras.inspect.drawings.attention import AttentionView, attention_view
from manyheads.extras.inspect.drawings.pages import attention_page, save_page, write_page

pytestmark = pytest.mark.one_in(2, "pages in a browser")
WORDS = [
    "The",
    "cat",
    "我",
    "爱",
    "你",
    "שלום",
    "مرحبا",
    "😀",
    "👨\u200d👩\u200d👧",
    "▁straße",
    "naïve",
    "<b>",
    "sat",
    "on",
]


def stack(layers: int, heads: int, q_len: int, k_len: int) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.dirichlet(np.full(k_len, 0.3), size=(heads, q_len)) for _ in range(layers)]


def names(count: int) -> list[str]:
    return [f"{WORDS[place % len(WORDS)]}{place}" for place in range(count)]


def views(layers: int, heads: int, length: int) -> list[AttentionView]:
    return [
        attention_view("encoder", stack(layers, heads, length, length), query_tokens=names(length)),
        attention_view(
            "cross", stack(layers, heads, length, length), query_tokens=names(length), key_tokens=names(length)
        ),
    ]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a page; afterwards neither console nor network may have seen anything."""
    told: list[str] = []
    contexts = []

    def show(
        shown: list[AttentionView],
        scheme: str = "light",
        title: str = "a <title>",
        size: tuple[int, int] = (1280, 860),
        bypass_csp: bool = False,
    ) -> Any:
        path = save_page(attention_page(shown, title=title, note="a note"), tmp_path / "page.html")
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,
            accept_downloads=True,
            bypass_csp=bypass_csp,
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: told.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: told.append(str(error)))

        def requested(request: Any) -> None:
            if not request.url.startswith(("file:", "data:", "blob:")):
                told.append(request.url)

        page.on("request", requested)
        page.goto(path.as_uri(), timeout=120_000)  # a browser that has just begun may wait for a busy machine
        settled(page)
        return page

    yield show
    for context in contexts:
        context.close()
    assert told == []


def settled(page: Any, act: Callable[[], Any] | None = None) -> None:
    """Wait until the picture that was asked for last is there.

    Asked again and again from here: Playwright's own waiting evaluates text within the page, which its policy forbids.
    """

    def drawn() -> int:
        return int(page.evaluate("document.body.dataset.drawn || 0"))

    before = drawn() if act is not None else 0
    if act is not None:
        act()
    limit = time.monotonic() + 300
    while drawn() <= before:
        assert time.monotonic() < limit, "no picture came"
        time.sleep(0.01)


def status(page: Any) -> str:
    return str(page.locator("#status").text_content())


def test_pickers_and_keys(opened: Callable[..., Any]) -> None:
    page = opened(views(3, 4, 9))
    assert page.locator("#title").text_content() == "a <title>"
    assert status(page).startswith("encoder · layer 1 of 3 · head 1 of 4 · entropy ")
    assert "mean distance" in status(page)
    settled(page, lambda: page.get_by_role("button", name="cross").click())
    assert status(page).startswith("cross · layer 1")
    assert "mean distance" not in status(page)
    settled(page, lambda: page.locator("#layer").select_option(label="3"))
    settled(page, lambda: page.locator("#head").select_option(label="mean"))
    assert "layer 3 of 3 · mean of 4 heads" in status(page)
    assert page.locator("#modes button[aria-pressed=true]").text_content() == "matrix"
    for key, expected in (
        ("v", "encoder · layer 3 of 3 · mean"),
        ("ArrowRight", "layer 3 of 3 · head 1"),
        ("ArrowDown", "layer 1 of 3 · head 1"),
        ("ArrowLeft", "layer 1 of 3 · mean"),
    ):
        page.locator("#stage").focus()
        settled(page, lambda key=key: page.keyboard.press(key))
        assert expected in status(page)
    for key, mode in (("g", "grid"), ("l", "lines"), ("m", "matrix")):
        settled(page, lambda key=key: page.keyboard.press(key))
        assert page.locator("#modes button[aria-pressed=true]").text_content() == mode
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()


def test_the_pointer_reads_the_weight_of_its_cell(opened: Callable[..., Any]) -> None:
    shown = views(1, 2, 6)
    page = opened(shown)
    box = page.locator("#canvas").bounding_box()
    seen = set()
    for step in range(3, 20):
        page.mouse.move(box["x"] + box["width"] * step / 24, box["y"] + box["height"] * step / 24)
        if not page.locator("#tip").is_visible():
            continue
        said = page.locator("#tip").text_content().replace("\u2068", "").replace("\u2069", "")
        found = re.fullmatch(r"(.*) \((\d+)\) → (.*) \((\d+)\)\nweight (\d\.\d{3})", said)
        assert found is not None, said
        row, column = int(found[2]) - 1, int(found[4]) - 1
        assert (found[1], found[3]) == (shown[0].query_tokens[row], shown[0].key_tokens[column])
        assert abs(float(found[5]) - shown[0].layers[0][0, row, column]) < 0.005
        seen.add((row, column))
    assert len(seen) > 2
    # The same by keys: the status line tells the cell.
    page.locator("#stage").focus()
    for _ in range(2):
        settled(page, lambda: page.keyboard.press("Shift+ArrowDown"))
    assert f"{shown[0].layers[0][0, 1, 0]:.2f}"[:3] in status(page)


def test_lines_show_whom_a_token_looks_at(opened: Callable[..., Any]) -> None:
    shown = views(1, 2, 6)
    page = opened(shown)
    settled(page, lambda: page.keyboard.press("l"))
    before = page.locator("#canvas").screenshot()
    box = page.locator("#canvas").bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 30 + 24 * 2.5)
    said = page.locator("#tip").text_content().replace("\u2068", "").replace("\u2069", "")
    weights = shown[0].layers[0][0, 2]
    assert said.startswith(f"{shown[0].query_tokens[2]} (3) looks at\n")
    assert shown[0].key_tokens[int(weights.argmax())] in said.split("\n")[1]
    page.wait_for_timeout(100)
    assert page.locator("#canvas").screenshot() != before  # its lines alone


def test_a_click_in_the_grid_opens_a_head(opened: Callable[..., Any]) -> None:
    page = opened(views(3, 4, 9))
    settled(page, lambda: page.keyboard.press("g"))
    box = page.locator("#canvas").bounding_box()
    settled(page, lambda: page.mouse.click(box["x"] + box["width"] - 40, box["y"] + 60))
    assert "layer 1 of 3 · head 4 of 4" in status(page)
    assert page.locator("#modes button[aria-pressed=true]").text_content() == "matrix"


@pytest.mark.parametrize("mode", sliced("gml", 3, "pictures of a page"))
def test_pictures_to_save(opened: Callable[..., Any], tmp_path: Path, mode: str) -> None:
    page = opened(views(2, 3, 14))
    settled(page, lambda: page.keyboard.press(mode))
    for kind in ("png", "svg"):
        with page.expect_download() as waited:
            page.locator(f"#{kind}").click()
        assert waited.value.suggested_filename.endswith(f".{kind}")
        path = tmp_path / f"saved.{kind}"
        waited.value.save_as(path)
        content = path.read_bytes()
        if kind == "png":
            assert content.startswith(b"\x89PNG")
            assert len(content) > 3000
        else:
            tree = ElementTree.fromstring(content)
            texts = {
                (element.text or "").strip("\u2068\u2069") for element in tree.iter() if element.tag.endswith("text")
            }
            assert ("head 3" if mode == "g" else names(14)[7]) in texts
            assert not any(element.tag.endswith("script") for element in tree.iter())


def test_twelve_layers_of_twelve_heads_are_a_small_page(opened: Callable[..., Any], tmp_path: Path) -> None:
    """Less than 5 MB, and no element for each of its 590,000 weights: it opens at once."""
    page = opened(views(12, 12, 64))
    assert "layer 1 of 12" in status(page)
    assert (tmp_path / "page.html").stat().st_size < 5e6
    assert page.evaluate("document.querySelectorAll('*').length") < 5000


@pytest.mark.parametrize(
    ("length", "scheme"),
    sliced(
        list(itertools.product([1, 30, 512, 700], ["light", "dark"])), 3, "pages", lambda case: f"{case[0]}-{case[1]}"
    ),
)
def test_any_length_in_light_and_dark(opened: Callable[..., Any], length: int, scheme: str) -> None:
    page = opened(views(1, 1 if length > 100 else 2, length), scheme)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    for key in "mlg":
        settled(page, lambda key=key: page.keyboard.press(key))
    assert ("a cell is 2 × 2 tokens" in status(page)) == (length == 700)
    settled(page, lambda: page.keyboard.press("t"))
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != paper


@pytest.mark.parametrize(("length", "faint"), [(60, "false"), (512, "true")])
def test_long_texts_begin_with_faint_weights_shown_and_their_controls_in_sight(opened, length, faint):
    """As a title, a text of 512 tokens would fill the screen."""
    page = opened(views(1, 1, length), title="He opened the door and went in. " * length)
    assert page.locator("#contrast").get_attribute("aria-pressed") == faint
    assert page.locator("#title").bounding_box()["height"] < 80
    stage = page.locator("#stage").bounding_box()
    assert stage["y"] + stage["height"] <= 860
    assert stage["height"] > 500


def test_the_names_of_both_sides_are_whole(opened: Callable[..., Any]) -> None:
    """Beside names of one letter there is less room than `query` takes."""
    letters = attention_view("decoder", stack(1, 1, 6, 6), query_tokens=list("abcdef"), is_self=True)
    page = opened([letters])
    settled(page, lambda: page.keyboard.press("l"))
    cut = page.evaluate(
        """() => {
          const canvas = document.getElementById("canvas"), ratio = canvas.width / canvas.clientWidth;
          const strip = canvas.getContext("2d").getImageData(0, 0, Math.ceil(2 * ratio), Math.ceil(20 * ratio)).data;
          return strip.some((part, index) => index % 4 < 3 && part < 200);
        }"""
    )
    assert not cut  # nothing is written at the very edge


def test_memory_is_set_apart(opened: Callable[..., Any]) -> None:
    shown = attention_view(
        "decoder", stack(1, 1, 4, 10), query_tokens=names(10)[6:], key_tokens=names(10), num_memory=6, is_self=True
    )
    page = opened([shown])
    assert "4 × 10, 6 of memory" in status(page)
    page.locator("#stage").focus()
    settled(page, lambda: page.keyboard.press("Shift+ArrowRight"))
    assert "(memory)" in status(page)


@pytest.mark.parametrize(
    ("size", "length"),
    sliced(list(itertools.product([(390, 844), (1440, 900)], [5, 9, 18, 40])), 4, "windows"),
)
def test_it_opens_on_words_and_the_matrix_fills_the_window(opened, size, length):
    page = opened(views(2, 4, length), size=size)
    assert page.locator("#modes button[aria-pressed=true]").text_content() == "matrix"
    stage, canvas = (page.locator(name).bounding_box() for name in ("#stage", "#canvas"))
    assert stage["width"] >= 0.94 * size[0]
    assert 0.93 * stage["width"] <= canvas["width"] <= stage["width"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.getElementById('stage').scrollWidth <= document.getElementById('stage').clientWidth")
    if length == 18:
        assert canvas["height"] > 0.9 * stage["height"]
    with page.expect_download() as waited:
        page.locator("#svg").click()
    texts = ElementTree.fromstring(Path(waited.value.path()).read_bytes()).iter("{http://www.w3.org/2000/svg}text")
    turned = {
        "rotate(-90" in one.get("transform", "")
        for one in texts
        if (one.text or "").strip("\u2068\u2069") in names(length) and one.get("text-anchor") != "end"
    }
    assert len(turned) == 1  # the names of the keys stand in one direction


def self_weights(length: int, offset: int, share: float) -> list[Any]:
    """One head that puts `share` of its weight on the token at an offset, and the rest evenly on all."""
    weights = np.full((1, length, length), (1 - share) / length)
    for row in range(length):
        weights[0, row, min(max(row + offset, 0), length - 1)] += share
    return [weights]


def on_key(length: int, key: int, share: float) -> list[Any]:
    weights = np.full((1, length, length), (1 - share) / length)
    weights[0, :, key] += share
    return [weights]


@pytest.mark.parametrize(
    ("weights", "is_self", "said"),
    [
        (self_weights(10, -1, 0.8), True, "looks mostly at the token before: 82% of the weight."),
        (self_weights(10, 0, 0.5), True, "looks mostly at the token itself: 55% of the weight."),
        (on_key(10, 9, 0.6), True, "looks mostly at naïve9 (10): 64% of the weight."),
        (on_key(10, 9, 0.6), False, "looks mostly at naïve9 (10): 64% of the weight."),
        (self_weights(10, 0, 0.5), False, "looks at several tokens: the most, 10% of the weight, is on"),
    ],
)
def test_a_sentence_says_what_a_head_attends_to(opened, weights, is_self, said):
    keys = [f"{WORDS[place % len(WORDS)]}{place}" for place in range(9)] + ["naïve9"]
    view = attention_view("encoder", weights, query_tokens=keys, key_tokens=None if is_self else keys)
    page = opened([view])
    text = page.locator("#sentence").text_content().replace("\u2068", "").replace("\u2069", "")
    assert text.startswith("Head 1 of layer 1 ")
    assert said in text


def test_the_heading_has_no_path(tmp_path: Path) -> None:
    (tmp_path / "demo" / "model").mkdir(parents=True)
    for model, name in (("demo", "demo"), ("demo/model", "demo"), ("demo/model/", "demo")):
        page = write_page(views(1, 1, 3), tmp_path / "page.html", text="a", model=str(tmp_path / model))
        content = page.read_text(encoding="utf-8")
        assert f'"note":"{name}: ' in content
        assert str(tmp_path) not in content


@pytest.mark.parametrize(
    ("scheme", "size"),
    sliced([("light", (390, 844)), ("dark", (1440, 900))], 2, "pages for axe", lambda case: case[0]),
)
def test_it_is_accessible(opened, accessible, scheme, size):
    page = opened(views(2, 4, 12), scheme, size=size, bypass_csp=True)
    for key in "mlg":
        settled(page, lambda key=key: page.keyboard.press(key))
        accessible(page)
    page.keyboard.press("?")
    accessible(page)
