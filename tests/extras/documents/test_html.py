"""HTML: what is text, and that nothing else changes. selectolax, an independent parser, compares the trees."""

from collections.abc import Callable

import pytest
from growth import assert_grows_in_proportion
from hypothesis import given
from hypothesis import strategies as st

from manyheads.extras.documents.formats import read_document
from manyheads.extras.documents.parts import Text

Texts = Callable[..., list[str]]
Translated = Callable[..., str]

PAGE = """<!DOCTYPE html>
<html lang="en"><head><title>cats &amp; dogs</title><style>p { a: b }</style>
<script>if (a < b) alert("no text</p>");</script></head>
<body class="x" data-y='a > b'>
<!-- no <b>text</b> -->
<h1>i am <em>very</em> happy</h1>
<p>he said &lt;<b>love</b>&gt;.  he went
   <a href="x.html" title="no text">to the station</a>.<br>then he <code>ran x</code> home &mdash; alone.
<ul><li>one <img src="a.png" alt="no text"/> dog<li>two <span translate="no">no text</span> cats</ul>
<pre>no text</pre><textarea>no text</textarea>
<div class="a notranslate b"><div>no text</div>no text</div><p>last</p>
</body></html>
"""


def test_only_text_changes(translated: Translated) -> None:
    result = translated(PAGE, "html")
    for kept in ("no text", "p { a: b }", "<code>ran x</code>", '<a href="x.html" title="no text">', "data-y='a > b'"):
        assert result.count(kept) == PAGE.count(kept)
    for text in (
        "CATS &amp; DOGS",
        "I AM <em>VERY</em> HAPPY",
        "HE SAID &lt;<b>LOVE</b>&gt;.",
        "HOME — ALONE.",
        "LAST",
    ):
        assert text in result


def test_segments(texts: Texts) -> None:
    assert texts(PAGE, "html") == [
        "cats & dogs",
        "i am <>very<> happy",
        "he said <<>love<>>. he went <>to the station<>.",
        "then he <> home — alone.",
        "one <> dog",
        "two <> cats",
        "last",
    ]


def test_the_tree_is_the_same() -> None:
    parser = pytest.importorskip("selectolax.lexbor").LexborHTMLParser
    document = read_document(PAGE, "page.html", "html")
    parts = [[Text(p.text.upper()) if isinstance(p, Text) else p for p in one.parts] for one in document.segments]
    result, kept = document.with_translations(parts)
    assert not kept

    def tree(page: str) -> list[tuple[str, str]]:
        return [(str(node.tag), str(sorted(node.attributes.items()))) for node in parser(page).css("*")]

    assert tree(result) == tree(PAGE)
    assert parser(result).css_first("title").text() == "CATS & DOGS"


def test_tags_at_the_ends_without_their_other_half_stay_outside(texts: Texts) -> None:
    assert texts("<p><span>one</p><p>two</span></p>", "html") == ["one", "two"]
    assert texts("<p><b>all</b></p>", "html") == ["<>all<>"]


def test_a_translation_is_escaped(translated: Translated) -> None:
    assert translated("<p>a</p>", "html", lambda _: "<b> & c") == "<p>&lt;b&gt; &amp; c</p>"


@given(st.text("ab <>/\"'=!-p&;\n", max_size=60))
def test_any_text_is_read_and_comes_back(page: str) -> None:
    document = read_document(page, "file", "html")
    assert document.with_translations([one.parts for one in document.segments]) == (page, [])
    document.with_translations([[Text("x"), *one.parts] for one in document.segments])


@pytest.mark.parametrize(
    "part", ["</b>", "<b>", "<b></i>", "<!", "<code ", "</code ", "<code></code x", "<a '", "<!-- ", "<svg", "a"]
)
def test_hostile_markup_takes_time_in_proportion(part: str) -> None:
    """With a search from every tag to the end of the file, a megabyte of some of these would take minutes."""

    def work(length: int) -> None:
        start = "<" * (part == "a") + "<code>" * (part == "</code ")
        document = read_document(start + part * (length // len(part)), "page.html", "html")
        assert document.with_translations([None] * len(document.segments)) == (document.text, [])

    assert_grows_in_proportion(work, 10_000)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("<p translate=no>one<p>two", ["two"]),
        ("<div><p translate=no>one <b>more</b></div>two", ["two"]),
        ("<p translate=no>one</p>two", ["two"]),
        ("<ul><li translate=no>one<ul><li>in<li>it</ul><li>two</ul>three", ["two", "three"]),
        ("<ul><li>one<li translate=no>two</ul>three", ["one", "three"]),
        ("<table><tr><td translate=no>one<table><td>in</table><td>two<tr translate=no><td>x<tr><td>y", ["two", "y"]),
        ("<dl><dt translate=no>one<dd>two<dt>three</dl>", ["two", "three"]),
    ],
)
def test_an_element_without_an_end_tag_ends_where_it_must(page: str, expected: list[str], texts: Texts) -> None:
    assert texts(page, "html") == expected


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("<p>in <ruby>a<rp>(</rp><rt>x</rt><rp>)</rp></ruby> now</p>", ["in <>a<> now"]),
        ("<p>in <ruby>a<rt>x<rt>y</ruby> now</p>", ["in <>a<> now"]),
        ("<p>in <ruby><rb>a</rb><rtc><rt>x</rt></rtc></ruby> now</p>", ["in <><>a<><> now"]),
        ("<p>is <nobr>very big</nobr> and</p>", ["is <>very big<> and"]),
        ("<p>my <x-tip>a</x-tip> is</p>", ["my <>a<> is"]),
        ("<p>a<o:p></o:p> b</p><title>c</title><caption>d</caption>e", ["a<><> b", "c", "d", "e"]),
        ('<p data-translate="no">a</p><p class="notranslate-off">b</p>', ["a", "b"]),
        ('<p title="translate=no">a</p><p translate="none">b</p>', ["a", "b"]),
        ("<p TRANSLATE = 'NO'>a</p><p class='a notranslate'>b</p><p class=notranslate>c</p>d", ["d"]),
    ],
)
def test_what_is_inside_a_sentence_and_what_stays(page: str, expected: list[str], texts: Texts) -> None:
    assert texts(page, "html") == expected
