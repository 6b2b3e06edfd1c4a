"""Markdown: what is text, and that nothing else changes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyheads.extras.documents.formats import read_document
from manyheads.extras.documents.parts import Tag, Text

pytest.importorskip("markdown_it")
Texts = Callable[..., list[str]]
Translated = Callable[..., str]
ROOT = Path(__file__).resolve().parents[3]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]

PAGE = """---
title: Not text
---
# A *heading*

First line with **bold words** and with [a link](https://example.org "Title"), and
second line with `code` here.

- item one
- [ ] item <b>two</b>
   continued

> quoted text

| Name | What |
|------|:----:|
| one | a \\| b |

```python
not_text = 1
```

    indented code

<div>html block</div>

Hard break at the end\x20\x20
of the line.[^1]

[ref]: https://example.org
[^1]: A note.
"""


def test_only_text_changes(translated: Translated) -> None:
    expected = PAGE
    for text in (
        "heading", "A ", "First line with ", "bold words", " and with ", "a link", ", and\n", "second line with ",
        " here.",
        "item one", "item <b>two</b>", "continued", "quoted text", "Name", "What", "| one | a \\| b",
        "Hard break at the end", "of the line.", "A note.",
    ):  # fmt: skip
        assert text in expected
        expected = expected.replace(text, text.upper())
    expected = expected.replace("<B>", "<b>").replace("</B>", "</b>")
    assert translated(PAGE, "markdown") == expected


def test_crlf_and_byte_order_mark_stay(translated: Translated) -> None:
    page = "\ufeff" + PAGE.replace("\n", "\r\n")
    result = translated(page, "markdown")
    assert result.startswith("\ufeff---\r\ntitle: Not text\r\n")
    assert result.count("\r\n") == result.count("\n") == page.count("\n")


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("a *b* c", "a <>b<> c"),
        ("a **b** c", "a <>b<> c"),
        ("a ***b*** c", "a <><>b<><> c"),
        ("a ~~b~~ c", "a <>b<> c"),
        ("2 * 3 * 4", "2 * 3 * 4"),
        ("a\\*b&amp;c &copy;", "a*b&c ©"),
        ("see ![alt](x.png) here", "see <> here"),
        ("a `b` and ``c`d`` e", "a <> and <> e"),
        ("a ` b", "a ` b"),
        ("<https://x.org> a", "<> a"),
        ("a <b class='x'>b</b> c<br>d", "a <>b<> c<>d"),
        ("sum $x_1 + y_2$ costs $5 and $6", "sum <> costs $5 and $6"),
        ("a[^1] b", "a<> b"),
        ("[a *b*](c_d_e)", "<>a <>b<><>"),
        ("**a** and **b *c***", "<>a<> and <>b <>c<><>"),
    ],
)
def test_inline_markup(page: str, text: str, texts: Texts, translated: Translated) -> None:
    assert texts(page, "markdown") == [text]
    assert translated(page, "markdown", lambda one: one) == page


def test_a_reference_keeps_its_name(translated: Translated) -> None:
    page = "See [the book] and [it][] and [more][the book].\n\n[the book]: x\n[it]: y\n"
    expected = "SEE [THE BOOK][the book] AND [IT][it] AND [MORE][the book].\n\n[the book]: x\n[it]: y\n"
    assert translated(page, "markdown") == expected


def test_fences_of_containers_stay_on_their_lines(texts: Texts, translated: Translated) -> None:
    page = "::: warning Look\nbe *careful*\nhere\n:::\nand go on\n::: tip\nslowly\n:::\n"
    assert texts(page, "markdown") == ["be <>careful<> here", "and go on", "slowly"]
    expected = page.replace("be *careful*\nhere", "BE *CAREFUL*\nHERE").replace("and go on", "AND GO ON")
    assert translated(page, "markdown") == expected.replace("slowly", "SLOWLY")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("* not a list", "\\* not a list"),
        ("1. not a list", "1\\. not a list"),
        ("# not a heading", "\\# not a heading"),
        ("> no quote", "\\> no quote"),
        ("a *b* c", "a \\*b\\* c"),
        ("[b](c)", "\\[b\\](c)"),
        ("<b>", "\\<b\\>"),
        ("2 * 3 and a_b", "2 * 3 and a_b"),  # no escapes where none are needed
    ],
)
def test_a_translation_with_special_characters_is_escaped(text: str, expected: str, translated: Translated) -> None:
    assert translated("text", "markdown", lambda _: text) == expected


def test_a_bar_in_a_cell_is_escaped(translated: Translated) -> None:
    assert translated("| a |\n|---|\n| b |", "markdown", lambda one: one + "|c") == "| a\\|c |\n|---|\n| b\\|c |"


def test_a_paragraph_is_wrapped_as_its_source(translated: Translated) -> None:
    page = "> " + "word " * 8 + "word\n> " + "word " * 8 + "end\n"
    result = translated(page, "markdown", lambda one: one.replace("word", "longer"))
    assert all(line.startswith("> ") for line in result.split("\n")[:-1])
    assert result.count("longer") == 17
    assert max(map(len, result.split("\n"))) <= len(page.split("\n")[0])


def test_no_line_begins_with_a_block_marker_after_wrapping(translated: Translated) -> None:
    page = "one two three four five six\nseven\n"
    result = translated(page, "markdown", lambda _: "one two three four five 1. - # + six seven eight nine")
    assert [line.split()[0] for line in result.split("\n") if line] == ["one", "six"]


def test_directives_and_math_are_no_text(texts: Texts) -> None:
    assert texts('!!! note "Title"\n    The text.\n\n::: a.b.c\n\n$$\na = b\n$$\n', "markdown") == ["The text.", "<>"]


def test_alerts_of_github_keep_their_kind(texts: Texts, translated: Translated) -> None:
    page = "> [!NOTE]\n> Some text.\n\n> [!WARNING]\n\nend\n"
    assert texts(page, "markdown") == ["Some text.", "end"]
    assert translated(page, "markdown") == "> [!NOTE]\n> SOME TEXT.\n\n> [!WARNING]\n\nEND\n"


def test_footnotes_and_definitions_are_texts_of_their_own(texts: Texts, translated: Translated) -> None:
    page = (
        "A text.[^1]\n\n[^1]: The first note\nhas two lines.\n[^b]:  The second one.\n\nterm\n: what it is\n: or this\n"
    )
    wanted = ["A text.<>", "The first note has two lines.", "The second one.", "term", "what it is", "or this"]
    assert texts(page, "markdown") == wanted
    result = translated(page, "markdown")
    assert [line[:4] for line in result.split("\n")] == [
        "A TE",
        "",
        "[^1]",
        "HAS ",
        "[^b]",
        "",
        "TERM",
        ": WH",
        ": OR",
        "",
    ]
    assert "[^1]: THE FIRST NOTE\nHAS TWO LINES.\n[^b]:  THE SECOND ONE.\n" in result


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_our_own_pages_keep_their_code_and_markup(path: Path) -> None:
    from markdown_it import MarkdownIt

    text = path.read_text(encoding="utf-8")
    document = read_document(text, path.name, "markdown")
    parts = [[Text(p.text.upper()) if isinstance(p, Text) else p for p in one.parts] for one in document.segments]
    result, kept = document.with_translations(parts)
    assert not kept
    assert not document.left

    def skeleton(page: str) -> list[tuple[str, str]]:
        """Blocks and inline markup in order; code and links' targets word for word."""
        tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(page)
        inside = [one for token in tokens for one in (token, *(token.children or []))]
        kinds = ("text", "softbreak", "inline")
        return [
            (one.type, str(one.attrs) + (one.content if "code" in one.type or "fence" in one.type else ""))
            for one in inside
            if one.type not in kinds
        ]

    assert skeleton(result) == skeleton(text)


@given(st.text("ab *_`[]()<>!#-+|\\\n&;~$^\t:>1.", max_size=40))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_read_and_comes_back(page: str) -> None:
    document = read_document(page, "file", "markdown")
    ends = 0
    for segment in document.segments:
        assert ends <= segment.start < segment.end
        ends = segment.end
    assert document.with_translations([one.parts for one in document.segments]) == (page, [])
    document.with_translations([[Text("x"), *one.parts] for one in document.segments])


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("---\n\none two\n\n---\n\nthree\n", ["one two", "three"]),
        ("---\n- one\n\n---\nthree\n", ["one", "three"]),
        ("---\n# no text\n\ntitle: no text\n---\nthree\n", ["three"]),
        ("\ufeff---\r\nmy key:\r\n- no text\r\n...\r\nthree\r\n", ["three"]),
        ("---\n---\nthree\n", ["three"]),
    ],
)
def test_only_keys_make_a_front_matter(page: str, expected: list[str], texts: Texts) -> None:
    assert texts(page, "markdown") == expected


@pytest.mark.parametrize(
    "kept",
    [
        "<code>ls</code>", "<kbd>a <b>c</b></kbd>", "<samp>x</samp>", "<var>x</var>", "<b class='a notranslate'>c</b>",
        '<span translate="no">a *b* [c](d)</span>', "$$\n: x\n$$", "<pre>a</pre>", "<script>a = 1</script>",
    ],
)  # fmt: skip
def test_inline_html_and_math_keep_their_content(kept: str, translated: Callable[..., str]) -> None:
    assert translated(f"use {kept.replace(chr(10), ' ')} now", "markdown") == f"USE {kept.replace(chr(10), ' ')} NOW"
    if kept[0] == "$":
        document = read_document(kept, "file", "markdown")
        assert [part.kind for one in document.segments for part in one.parts if isinstance(part, Tag)] == ["word"]


def test_readings_stay_with_their_word(texts: Texts, translated: Translated) -> None:
    page = "in <ruby>a<rp>(</rp><rt>x</rt><rp>)</rp></ruby> *now*"
    assert texts(page, "markdown") == ["in <>a<> <>now<>"]
    assert translated(page, "markdown") == "IN <ruby>A<rp>(</rp><rt>x</rt><rp>)</rp></ruby> *NOW*"
    assert translated("a <ruby>b<rt>c", "markdown") == "A <ruby>B<rt>C"


def test_blocks_inside_html_that_stays(translated: Translated) -> None:
    page = 'one\n\n<div translate="no">\n\ntwo\n\n- <div>\n\n  in\n  </div>\n\n</div>\n\nthree\n\n'
    assert translated(page, "markdown") == page.replace("one", "ONE").replace("three", "THREE")
    quoted = '> <p class="notranslate">\n>\n> two\n>\n> </p>\n\nthree\n'
    assert translated(quoted, "markdown") == quoted.replace("three", "THREE")
    never_closed = '<div translate="no">\n\none\n\n<div>\n\n'
    assert translated(never_closed * 3, "markdown") == never_closed.replace("one", "ONE") * 3


def test_a_kept_element_without_an_end_is_a_tag(translated: Callable[..., str]) -> None:
    assert translated("use <code>a *b* now", "markdown") == "USE <code>A *B* NOW"


@pytest.mark.parametrize(
    "part", ["[^", "<code>", "<a>", "</b>", "a<b>  \n", "<ruby><rt>", "<rt></rt>", "<div translate=no>\n\na\n\n"]
)
def test_hostile_inline_markup_is_read(part: str) -> None:
    document = read_document(part * 4_000, "file", "markdown")
    assert document.with_translations([None] * len(document.segments)) == (document.text, [])


@pytest.mark.parametrize(
    "page",
    [
        "A <span\nclass=x>b</span> c",
        "> A <span\n>   class=x>b</span> c\n",
        "- A `code\n  over` c\n",
        'A [b](https://example.org\r\n"Title") c\r\n',
        "A ![b\nc](d.png) e",
        "A <!-- b\n\tc --> d",
        "A $x\n+ y$ b $$x\n= y$$ c",
    ],
)
def test_markup_over_two_lines_keeps_its_bytes(page: str, translated: Translated) -> None:
    found = translated(page, "markdown")
    assert found != page
    assert found.lower() == page.lower()
    kept = [
        page[place : place + 4] for place in (page.find("span"), page.find("over"), page.find("http")) if place >= 0
    ]
    assert all(text in found for text in kept)
