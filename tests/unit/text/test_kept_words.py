"""What is no word of a language, and is kept in translations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.text.words import KEPT, PRIVATE, has_words, hide, is_loose, kept_index, unhide


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("See https://example.com/a?b=c&d=%20#x, please.", ["https://example.com/a?b=c&d=%20#x"]),
        ("(http://foo.bar/~u/x_(y)) and www.x.org/a.", ["http://foo.bar/~u/x_(y)", "www.x.org/a"]),
        ("Visit example.org. Or foo.co.uk/bar!", ["example.org", "foo.co.uk/bar"]),
        ("mail me:first.last+tag@sub.example.co.uk!", ["first.last+tag@sub.example.co.uk"]),
        ("{name} {0:.2f} {{ a.b }} {% if x %} ${var} #{user} %s %1$s %(n)d", 9),
        (
            "$count :name :tada: @alice #123 #tag [[Page one]]",
            ["$count", ":name", ":tada:", "@alice", "#123", "#tag", "[[Page one]]"],
        ),
        ("<b>bold</b> <a href='x y'>z</a> <0>", ["<b>", "</b>", "<a href='x y'>", "</a>", "<0>"]),
        ("a &amp; b &#39; c &nbsp; &#x27;", ["&amp;", "&#39;", "&nbsp;", "&#x27;"]),
        (
            "snake_case f_1() --verbose __NAME__ MAX_SIZE %NAME%",
            ["snake_case", "f_1()", "--verbose", "__NAME__", "MAX_SIZE", "%NAME%"],
        ),
        ("the_report.v2.pdf, my_site.org/a", ["the_report.v2.pdf", "my_site.org/a"]),
        ("ISBN 978-3-16-148410-0.", ["978-3-16-148410-0"]),
        (
            "C:\\temp\\a.txt, /usr/bin/env, ~/x/y and report.pdf.",
            ["C:\\temp\\a.txt", "/usr/bin/env", "~/x/y", "report.pdf"],
        ),
        ("2020-01-01 and 2020-01-01T10:20:30Z.", ["2020-01-01", "2020-01-01T10:20:30Z"]),
        ("31.12.2020, 12/31/2020.", ["31.12.2020", "12/31/2020"]),
        (
            "+447378099903, +49 30 1234567, (030) 123-4567, 0171/123 45 67, 555-1234.",
            ["+447378099903", "+49 30 1234567", "(030) 123-4567", "0171/123 45 67", "555-1234"],
        ),
        (f"The data {'aGVsbG8+/w' * 20}==, {'x' * 199}.", ["aGVsbG8+/w" * 20 + "=="]),
        ("<" + "a" * 30_000, ["a" * 30_000]),
        ("192.168.0.1, v1.2.3 and 1234567.", ["192.168.0.1", "v1.2.3", "1234567"]),
        ("访问https://example.org，邮箱a@b.de。", ["https://example.org", "a@b.de"]),
        ("😊 👨\u200d👩\u200d👧\u200d👦 ❤\ufe0f 👍🏽👍 🇩🇪 1\ufe0f\u20e3 🏴\U000e0067\U000e0062\U000e007f ☀ ★", 9),
    ],
)
def test_what_is_kept(text: str, kept: list[str] | int) -> None:
    hidden, words = hide(text)
    assert words == kept if isinstance(kept, list) else len(words) == kept
    assert not KEPT.search(hidden)
    assert unhide(hidden, words) == text


@pytest.mark.parametrize(
    "text",
    [
        "It costs 1,500,000 dollars, 3.14 or 10.5 %, $5.",
        "2 000 000 people at 5:30, 3/4 of a cup",
        "e.g. the U.S.A. etc. The end.Next one: this :) ;-)",
        "He said:hello -- and left. AT&T; and/or",
        "C# and F# 100% sure, 3 < 4 and 5 > 2",
        "the 1990s, 15th, B2B, A380",
        "x" * 199,
        "猫が" * 300,
        "a<" * 300,
        "“quoted” … ． — ™ ©",
        "5-6 or 3-4 of 100% pure",
        "_so_ it is A_",
    ],
)
def test_what_is_translated(text: str) -> None:
    assert hide(text) == (text, [])


def test_whether_there_is_a_letter_to_translate() -> None:
    assert not any(has_words(hide(text)[0]) for text in ("--- 12", "😊", "2020-01-01", "1 १ ½ .", "a@b.de {x}"))
    assert all(has_words(hide(text)[0]) for text in ("a", "猫", "{x} é"))


def test_emoji_are_loose_and_addresses_are_not() -> None:
    hidden, words = hide("😊 x@y.de")
    assert [(is_loose(char), words[index]) for char in hidden if (index := kept_index(char)) is not None] == [
        (True, "😊"),
        (False, "x@y.de"),
    ]


def test_a_text_with_private_characters_is_left_as_it_is() -> None:
    text = f"{chr(PRIVATE)} https://x.org"
    assert hide(text) == (text, [])


@given(st.text("a1.@:/-_ {}()<>&;#$%[]+👍\u200d", max_size=60))
def test_every_text_comes_back(text: str) -> None:
    hidden, words = hide(text)
    assert unhide(hidden, words) == text
