"""Plain text: paragraphs."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from manyheads.extras.documents.formats import read_document

Texts = Callable[..., list[str]]
Translated = Callable[..., str]


def test_wrapped_lines_are_joined_and_wrapped_again(texts: Texts, translated: Translated) -> None:
    page = "\n  the first line is this\n  and the second one\n\n\nanother paragraph \r\n"
    assert texts(page, "text") == ["the first line is this and the second one", "another paragraph"]
    expected = "\n  THE FIRST LINE IS THIS\n  AND THE SECOND ONE\n\n\nANOTHER PARAGRAPH \r\n"
    assert translated(page, "text") == expected


def test_short_lines_are_texts_of_their_own(texts: Texts) -> None:
    assert texts("milk\nbread and butter\ncheese", "text") == ["milk", "bread and butter", "cheese"]


def test_items_of_a_list_are_texts_of_their_own(texts: Texts) -> None:
    """Although the first item is the longest line, so that the next word does not fit behind it."""
    for mark in ("-", "*", "•", "1)", "12."):
        page = f"things to buy today:\n\n  {mark} bread and butter\n  {mark} milk\n"
        assert texts(page, "text")[1:] == [f"{mark} bread and butter", f"{mark} milk"]
    wrapped = "wir sahen ihn am\n12. Mai und danach\nnie mehr"
    assert texts(wrapped, "text") == [wrapped.replace("\n", " ")]


def test_a_byte_order_mark_is_no_text(texts: Texts, translated: Translated) -> None:
    assert texts("\ufeffmilk\n", "text") == ["milk"]
    assert translated("\ufeffmilk\n", "text", lambda _: "Milch") == "\ufeffMilch\n"


@given(st.text("ab \n\r\t\u2028", max_size=60))
def test_any_text_comes_back(page: str) -> None:
    document = read_document(page, "file", "text")
    assert document.with_translations([one.parts for one in document.segments]) == (page, [])
